"""What docker/kubernetes says to vLLM and to the router is said to them here, with TLS."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.token_house import Served, served
from forked.ports import free_port
from restow.broker.client import AdminClient
from restow.demo.recall.task import Prompt, decode
from restow.v1 import broker_pb2
from vllm_harness.house import MODEL

pytestmark = pytest.mark.timeout(600)
PODS = Path(__file__).resolve().parents[2] / "docker" / "kubernetes"
START_S = 300.0
HERE = ["--dtype=float32", "--enforce-eager", "--no-enable-prefix-caching"]
"""What a Mamba2 model needs on a CPU; ranks there need no GPU, and one is enough."""


def containers(file: str) -> list[dict[str, Any]]:
    return [
        container
        for one in yaml.safe_load_all((PODS / file).read_text())
        if one["kind"] in ("StatefulSet", "Deployment")
        for container in one["spec"]["template"]["spec"]["containers"]
    ]


@contextlib.contextmanager
def engine(
    container: dict[str, Any], python: Path, broker: Served, port: int, folder: Path
) -> Iterator[None]:
    """Run the container's process, with other files for the Secret, the model and the Service."""
    told = {
        pair["name"]: pair["value"].replace("/etc/restow", str(folder))
        for pair in container["env"]
        if "value" in pair
    }
    known = {name: one for name, one in os.environ.items() if name != "PYTHONSAFEPATH"}
    known |= told | {"RESTOW_BROKER": broker.address, "VLLM_CPU_KVCACHE_SPACE": "1"}
    known |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    arguments = [
        str(MODEL) if one == "/models/model" else one
        for one in (*container["command"][1:], *container["args"])
    ]
    mine = {"--port": f"--port={port}", "--tensor-parallel-size": "--tensor-parallel-size=1"}
    arguments = [mine.get(one.partition("=")[0], one) for one in arguments]
    arguments = [one.replace("$(POD_NAME)", "vllm-pair-0") for one in arguments]
    with (folder / f"{container['name']}.log").open("wb") as log:
        process = subprocess.Popen(
            [python.with_name("vllm"), *arguments, *HERE], env=known, stdout=log, stderr=log
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(180)


def wait_for(port: int) -> None:
    """Wait until /health says that the engine is healthy."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        time.sleep(0.5)
    raise RuntimeError(f"nobody is well on port {port}")


def completion(port: int, prompt: Prompt) -> str:
    asks = {"model": "model", "prompt": prompt.text, "max_tokens": len(prompt.answer_ids)}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(asks).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        return str(answer.read().decode())


async def test_the_pods_hand_over(
    vllm_python: Path, prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    ports = [free_port() for _ in range(3)]
    p, d = containers("one-host.yaml")
    [router] = containers("router.yaml")
    with served(tmp_path) as broker, contextlib.ExitStack() as stack:
        assert broker.known.tls_ca is not None
        (tmp_path / "ca.crt").write_bytes(broker.known.tls_ca.read_bytes())
        for container, port in zip((p, d), ports, strict=False):
            stack.enter_context(engine(container, vllm_python, broker, port, tmp_path))
        for port in ports[:2]:
            await asyncio.to_thread(wait_for, port)
        sides = [
            f"--{side}=http://127.0.0.1:{ports[at]}"
            for at, side in enumerate(("prefill", "decode"))
        ]
        listens = f"--listen=127.0.0.1:{ports[2]}"
        command = [sys.executable, "-m", "restow.broker.cli.main", *router["command"][1:]]
        asked = subprocess.Popen([*command, listens, *sides])  # noqa: ASYNC220 - it is asked later
        stack.callback(asked.wait, 30)
        stack.callback(asked.terminate)
        await asyncio.to_thread(wait_for, ports[2])
        for prompt in prompts[:2]:
            text = await asyncio.to_thread(completion, ports[2], prompt)
            (choice,) = json.loads(text)["choices"]
            assert " ".join(choice["text"].split()) == decode(prompt.answer_ids)
        with AdminClient(broker.address, credentials=broker.known) as client:
            names = {one.engine_id for one in client.engines()}
            assert names == {"vllm-pair-0-prefill", "vllm-pair-0-decode"}
            ended = {one.state: one.count for one in client.status().ended if one.count}
            assert ended == {broker_pb2.HANDOFF_STATE_DONE: 2}
