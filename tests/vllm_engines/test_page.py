"""The commands of docs/vllm.md as they stand there, and what clients hear over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from forked.ports import free_port
from restow.agents.engines.recall.task import Prompt, decode
from restow.broker.client import AdminClient
from vllm_harness.pair import GRANT_S

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "vllm.md"
START_S = 300.0


@dataclass(frozen=True)
class Served:
    """What the commands have started, on ports of the test's own."""

    router: str
    prefill: str
    decode: str
    broker: str
    ask: str
    """The page's own request, as a command."""


def blocks() -> list[str]:
    """The page's shell commands."""
    return re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    """Only ports are exchanged, so that tests get on with whatever else runs here."""
    ports = [free_port() for _ in range(4)]
    broker, prefill, decode_, router = (f"127.0.0.1:{port}" for port in ports)
    start, ask = blocks()[:2]
    for old, new in zip(("8100", "8200", "8000"), ports[1:], strict=True):
        assert old in start
        start, ask = start.replace(old, str(new)), ask.replace(old, str(new))
    log = tmp_path_factory.mktemp("page") / "log"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    environment |= {"RESTOW_BROKER": broker, "RESTOW_LISTEN": broker, "HF_HUB_OFFLINE": "1"}
    environment["RESTOW_GRANT_S"] = f"{GRANT_S:g}"
    with log.open("wb") as out:
        shell = subprocess.Popen(  # noqa: ASYNC220 - it only starts others
            ["/bin/bash", "-ec", start + "wait -n"],
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        for base in (prefill, decode_, router):
            await asyncio.to_thread(_wait_for, base, shell, log)
        yield Served(router, prefill, decode_, broker, ask)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def _wait_for(base: str, shell: subprocess.Popen[bytes], log: Path) -> None:
    """Until somebody answers, be it that there is no such page."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and shell.poll() is None:
        try:
            urllib.request.urlopen(f"http://{base}/health", timeout=5).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise RuntimeError(f"{base} does not answer:\n{log.read_text(errors='replace')[-4000:]}")


def post(base: str, body: dict[str, Any], path: str = "/v1/completions") -> tuple[int, str]:
    """Status and text."""
    request = urllib.request.Request(
        f"http://{base}{path}",
        json.dumps({"model": "recall", **body}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def said(base: str, prompt: Prompt) -> str:
    status, text = await asyncio.to_thread(
        post, base, {"prompt": prompt.text, "max_tokens": len(prompt.answer_ids)}
    )
    assert status == 200, text
    (choice,) = json.loads(text)["choices"]
    return " ".join(choice["text"].split())


async def test_the_request_of_the_page(served: Served) -> None:
    done = await asyncio.to_thread(
        subprocess.run, ["/bin/bash", "-ec", served.ask], capture_output=True, check=True
    )
    (choice,) = json.loads(done.stdout)["choices"]
    assert choice["text"].strip() == "stone . apple . river ."
    with AdminClient(served.broker) as admin:
        (handoff,) = admin.handoffs().handoffs
    assert handoff.bytes > 0


async def test_all_at_once_through_the_router(served: Served, prompts: tuple[Prompt, ...]) -> None:
    found = await asyncio.gather(*(said(served.router, one) for one in prompts))
    assert found == [decode(one.answer_ids) for one in prompts]


async def test_a_stream_through_the_router(served: Served, prompts: tuple[Prompt, ...]) -> None:
    body = {"prompt": prompts[0].text, "max_tokens": 6, "stream": True}
    status, text = await asyncio.to_thread(post, served.router, body)
    assert status == 200
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events.pop() == "[DONE]"
    words = "".join(json.loads(one)["choices"][0]["text"] for one in events)
    assert " ".join(words.split()) == decode(prompts[0].answer_ids)


async def test_what_the_client_did_wrong_is_told(served: Served) -> None:
    status, text = await asyncio.to_thread(
        post, served.router, {"prompt": "<bos> anna has", "max_tokens": 100_000}
    )
    assert status == 400
    assert "max_tokens" in text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_reason_reaches_the_client(
    served: Served, prompts: tuple[Prompt, ...], stream: bool
) -> None:
    """D is asked to go on where P's state does not stand."""
    params = {"handoff_id": f"other prompt, {stream}"}
    short = prompts[0].text.rsplit(maxsplit=3)[0]
    status, _ = await asyncio.to_thread(
        post, served.prefill, {"prompt": short, "max_tokens": 1, "kv_transfer_params": params}
    )
    assert status == 200
    body = {"prompt": prompts[0].text, "max_tokens": 6, "stream": stream}
    status, text = await asyncio.to_thread(
        post, served.decode, {**body, "kv_transfer_params": params}
    )
    assert status == (200 if stream else 500)
    (event, *_) = [one for one in text.splitlines() if "error" in one]
    error = json.loads(event.removeprefix("data: "))["error"]
    assert error["message"].startswith("no state was handed over: POSITION_MISMATCH: ")
    assert error["handoff"]["handoff_id"] == params["handoff_id"]


async def test_metrics(served: Served) -> None:
    with urllib.request.urlopen(f"http://{served.decode}/metrics", timeout=10) as answer:  # noqa: ASYNC210
        text = answer.read().decode()
    received = "vllm:restow_received_bytes_sum"
    (line,) = [one for one in text.splitlines() if one.startswith(received)]
    assert float(line.rsplit(" ", 1)[1]) > 0
    assert 'reason="POSITION_MISMATCH"' in text
