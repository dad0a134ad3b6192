"""The contract alone suffices for engines in another language: no code of ours is used.

They are Node's, with memory in shared memory, which daemons serve. What they do when a stream
breaks is what the comments of the contract say.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from agent_harness.processes import READY, child
from agent_harness.relay import Relay, relayed
from chaos_harness.lives import BrokerLife
from forked.ports import free_port
from restow.agents.daemon.cli import run_agent_daemon
from restow.broker.client import AdminClient

HERE = Path(__file__).parent
PROMPTS = 200
WITHIN_S = 240.0
LEFT_OUT = 77
MEMORY = "restow-contract-"
PATIENT = ("--grant-s", "60")
"""So that a machine that is busy with other tests fails no read."""


@pytest.fixture(scope="module")
def packages() -> Path:
    """Return the folder of the client's packages; skip with the reason if they can't be had."""
    done = subprocess.run([HERE / "install.sh"], capture_output=True, text=True, check=False)
    if done.returncode == LEFT_OUT:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.split()[-1])


@pytest.fixture(autouse=True)
def no_memory_left() -> Iterator[None]:
    """Remove the memory that ended Node processes left; leave that of another test run."""
    yield
    for path in Path("/dev/shm").glob(f"{MEMORY}*"):  # noqa: S108 - where Linux has it
        pid = path.name.removeprefix(MEMORY).partition("-")[0]
        if not Path("/proc", pid).exists():
            path.unlink(missing_ok=True)


def serve_daemon(pipe: Connection, broker: str, socket: str) -> None:
    pipe.send(READY)
    run_agent_daemon(broker, socket)


class Scene:
    """A broker, daemons of both sides, wires to it that can be cut, and Node."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.wires: list[Relay] = []
        """Of the engines' sessions, then of each daemon."""
        self._folder = folder
        self.said: dict[str, Any] = {}
        self._node: asyncio.subprocess.Process | None = None
        self.start_broker()

    def start_broker(self) -> None:
        self.broker = BrokerLife("", self.address, self._folder / "broker.log", {}, PATIENT)

    def cut(self, *wires: int) -> None:
        for index in wires:
            self.wires[index].reset()

    async def hears(self) -> dict[str, Any]:
        """Return the next message from Node; fail with what Node found if it gave up."""
        assert self._node is not None
        assert self._node.stdout is not None
        said = json.loads(await self._node.stdout.readline() or '{"failed": "it has ended"}')
        assert "failed" not in said, said
        self.said = said
        return dict(said)

    async def hears_of(self, word: str, least: int = 0) -> dict[str, Any]:
        """Return Node's first message that has a word, with a value of at least ``least``."""
        while word not in (said := await self.hears()) or (least and said[word] < least):
            pass
        return said

    def let_begin(self, prompts: float) -> None:
        self.tell(f"{prompts}".replace("inf", "Infinity"))

    def tell(self, line: str) -> None:
        assert self._node is not None
        assert self._node.stdin is not None
        self._node.stdin.write(f"{line}\n".encode())

    async def run(self, packages: Path, daemons: dict[str, Path]) -> None:
        words = {
            "broker": self.wires[0].address,
            "daemons": {side: str(path) for side, path in daemons.items()},
            "prompts": PROMPTS,
        }
        self._node = await asyncio.create_subprocess_exec(
            "node",
            HERE / "handover.js",
            json.dumps(words),
            stdin=PIPE,
            stdout=PIPE,
            env={**os.environ, "NODE_PATH": str(packages / "node_modules")},
        )

    async def close(self) -> None:
        """Let Node leave, if it still runs, and end the broker."""
        if self._node is not None and self._node.returncode is None:
            if "ghosts" not in self.said:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(5):
                        self.tell("open")
                        print(await self.hears_of("open"))
                        with AdminClient(self.address) as client:
                            print(client.handoffs())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(20):
                    self.let_begin(float("inf"))
                    await self._node.wait()
            print("Node said last:", self.said)
            with contextlib.suppress(ProcessLookupError):
                self._node.kill()
            await self._node.wait()
        self.broker.end(signal.SIGKILL)

    def left_at_the_broker(self) -> tuple[int, int, list[str]]:
        """Return the handoffs that have not ended, those in quarantine, and an audit's findings."""
        with AdminClient(self.address) as client:
            status = client.status()
            return status.handoffs_live, status.handoffs_quarantined, list(client.audit().findings)


@contextlib.asynccontextmanager
async def scene(folder: Path, packages: Path) -> AsyncIterator[Scene]:
    one = Scene(folder)
    daemons = {side: folder / f"{side}.sock" for side in ("p", "d")}
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(one.close)
        for _ in range(3):
            one.wires.append(await stack.enter_async_context(relayed(one.address)))
        for wire, path in zip(one.wires[1:], daemons.values(), strict=True):
            await stack.enter_async_context(child(serve_daemon, wire.address, str(path)))
        await one.run(packages, daemons)
        await one.hears_of("done")
        yield one


def check(found: dict[str, Any]) -> None:
    """Check that all prompts arrived unchanged, and that no other memory was written."""
    assert found["done"] == PROMPTS
    assert found["wrong"] == found["lost"] == found["ghosts"] == []
    assert found["renewals"] > 0
    assert found["replaced"] == "ENGINE_REPLACED"


async def test_every_state_is_handed_over(tmp_path: Path, packages: Path) -> None:
    async with asyncio.timeout(WITHIN_S), scene(tmp_path, packages) as one:
        one.let_begin(PROMPTS)
        found = await one.hears_of("ghosts")
        check(found)
        assert found["again"] == []
        assert found["streams"] == [1, 1, 1, 1]
        assert await asyncio.to_thread(one.left_at_the_broker) == (0, 0, [])


async def test_what_breaks_is_said_again(tmp_path: Path, packages: Path) -> None:
    """Cut wires, and kill and restart the broker, while states are on their way."""
    async with asyncio.timeout(WITHIN_S), scene(tmp_path, packages) as one:
        one.let_begin(60)
        await one.hears_of("done", 20)
        one.cut(0)  # the engines' sessions
        await one.hears_of("done", 40)
        one.let_begin(100)
        await one.hears_of("done", 60)
        one.cut(1, 2)  # both agents' links
        await one.hears_of("done", 80)
        one.let_begin(140)
        await one.hears_of("done", 105)
        one.broker.end(signal.SIGKILL)
        one.tell("alone")
        silent = await one.hears_of("silent")
        assert silent["silent"] == "BROKER_SILENT"
        one.start_broker()
        await one.hears_of("done", 132)
        one.let_begin(180)
        await one.hears_of("done", 155)
        one.cut(0, 1, 2)
        await one.hears_of("done", 170)
        one.let_begin(PROMPTS)
        found = await one.hears_of("ghosts")
        check(found)
        assert found["epochs"] == 2
        assert min(found["streams"][:2]) >= 4, "sessions: begun, two cuts, a killed broker"
        assert await asyncio.to_thread(one.left_at_the_broker) == (0, 0, [])
