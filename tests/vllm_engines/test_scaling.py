"""docs/operators.md's "Scaling engines up and down", typed as it stands while clients stream."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ClientTimeout

from operators_day.shell import Shell, free_ports
from restow.broker.client import AsyncAdminClient
from vllm_harness.engine import RESTING, START_S, environment_of_vllm
from vllm_harness.house import GRANT_S, drawn
from vllm_harness.tiny_models import tiny_model

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not shutil.which("curl"), reason="needs curl"),
]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "operators.md"
PORTS = (7350, 8000, 8100, 8200, 8201)
CLIENTS, TOKENS = 6, 300
SMALL = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"),
    *("--block-size", "32", "--num-gpu-blocks-override", "256"),
)
"""What a tiny model needs on a CPU, beside what the page says."""


def blocks() -> list[str]:
    """Return the section's shell commands, block by block."""
    (section,) = re.findall(r"^## Scaling engines.*?(?=^## )", PAGE.read_text(), re.S | re.M)
    return re.findall(r"```bash\n(.*?)```", section, re.DOTALL)


class Clients:
    """Clients that stream one reply after another, and know what each has to say."""

    def __init__(self, http: ClientSession, router: str, alone: str) -> None:
        """Ask a ``router``, and the engine ``alone`` for what is right."""
        self.replies = 0
        self._http, self._router, self._alone = http, router, alone
        self._right: list[str] = []
        self._prompts = [drawn(100, seed) for seed in range(CLIENTS)]
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Find out what is right, and begin to ask."""
        self._right = [await self._said(self._alone, ids, "alone") for ids in self._prompts]
        assert len({*self._right}) == CLIENTS
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(CLIENTS)]

    async def go_on(self) -> None:
        """Return when each client may have had two more replies; fail if one has gone wrong."""
        wanted = self.replies + 2 * CLIENTS
        while self.replies < wanted:
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.1)

    async def end(self) -> None:
        """Wait until all have their last reply."""
        self._over = True
        await asyncio.gather(*self._tasks)

    async def _ask(self, number: int) -> None:
        turn = 0
        while not self._over:
            turn += 1
            # Of a salt of its own nothing is held, and P has something to compute.
            said = await self._said(self._router, self._prompts[number], f"{number}-{turn}")
            assert said == self._right[number], turn
            self.replies += 1

    async def _said(self, base: str, ids: list[int], salt: str) -> str:
        """Return the text of a streamed reply that ends as it should."""
        asked = {"model": "model", "prompt": ids, "max_tokens": TOKENS, "temperature": 0.0}
        asked |= {"ignore_eos": True, "stream": True, "cache_salt": salt}
        parts: list[dict[str, Any]] = []
        async with self._http.post(f"{base}/v1/completions", json=asked) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                words = line.removeprefix(b"data: ").strip()
                if words and words != b"[DONE]":
                    parts.append(json.loads(words))
        assert not [part for part in parts if "error" in part], parts[-1]
        choices = [choice for part in parts for choice in part["choices"]]
        assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["length"]
        return "".join(choice["text"] for choice in choices)


async def test_a_day_of_scaling_goes_as_the_page_tells(vllm_python: Path, tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "model")
    (folder := tmp_path / "day").mkdir()
    ports = dict(zip(PORTS, free_ports(PORTS), strict=True))
    broker, base, p0 = (f"localhost:{ports[port]}" for port in (7350, 8000, 8100))
    told = {"MODEL": str(model), "RESTOW_BROKER": broker, "RESTOW_LISTEN": broker}
    environment = environment_of_vllm(TORCH_COMPILE_DISABLE="1", RESTOW_GRANT_S=f"{GRANT_S:g}")
    del environment["PYTHONPATH"]
    vllm = f"PYTHONPATH={RESTING['PYTHONPATH']} exec {vllm_python.with_name('vllm')}"
    programs = {"vllm": f'{vllm} "$@" {" ".join(SMALL)}\n'}
    start, *rest = blocks()
    with ExitStack() as stack:
        shell = stack.enter_context(
            Shell(folder, environment | told, ports, programs, longest_s=START_S)
        )
        stack.callback(lambda: print(*_ends_of_logs(folder), sep="\n"))
        shell.run("set -e")
        await asyncio.to_thread(shell.run, start)
        async with (
            ClientSession(timeout=ClientTimeout(None)) as http,
            AsyncAdminClient(broker) as admin,
        ):
            clients = Clients(http, f"http://{base}", f"http://{p0}")
            await clients.begin()
            for block in rest:
                await clients.go_on()
                await asyncio.to_thread(shell.run, block)
            before = (await admin.handoffs()).handoffs[0].number
            await clients.go_on()
            await clients.end()
            last = [one for one in (await admin.handoffs()).handoffs if one.number > before]
            pairs = {(one.source_engine, one.destination_engine) for one in last}
            assert pairs == {("d0", "d1")}
            open_ids = {one.engine_id for one in await admin.engines() if one.session}
            assert open_ids == {"d0", "d1"}
        assert "a reply moves" in (folder / "router.log").read_text()
        assert "an engine failed" not in (folder / "router.log").read_text()


def _ends_of_logs(folder: Path) -> list[str]:
    """Return what the programs have said last; it is shown if the test fails."""
    return [f"{log.name}\n{log.read_text()[-3000:]}" for log in sorted(folder.glob("*.log"))]
