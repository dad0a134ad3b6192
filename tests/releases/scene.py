"""Engines of two releases as processes, and handoffs between them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

SAYS = b"engine: "
"""As `engine.py` has it, which runs in processes of its own."""
ENGINE = Path(__file__).with_name("engine.py")
READY_S = 90.0
TP = {"p": 2, "d": 1}


class Engine:
    """An engine of a release."""

    def __init__(self, process: Process, side: str, release: str, log: Path) -> None:
        self.side, self.release, self._process, self._log = side, release, process, log
        self._ends: dict[str, asyncio.Future[str]] = {}
        self._hears = asyncio.create_task(self._hear())
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def take_part(self, handoff_id: str) -> str:
        """Return the state and the reason in which a handoff ends for the engine."""
        self._ends[handoff_id] = asyncio.get_running_loop().create_future()
        self._write(handoff_id)
        return await self._ends[handoff_id]

    async def drain(self) -> None:
        """Have the engine end when its handoffs have ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.wait_for(self._process.wait(), READY_S)
        await self._hears

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._hears

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    async def _hear(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if not line.startswith(SAYS):
                continue
            word, _, rest = line.removeprefix(SAYS).decode().strip().partition(" ")
            if word in ("ready", "refused"):
                self.ready.set_result(f"{word} {rest}".strip())
            else:
                self._ends.pop(word).set_result(rest)
        for one in (self.ready, *self._ends.values()):
            if not one.done():
                one.set_result(f"GONE {self._log.read_text()[-2000:]}")


class Engines:
    """All engines of a test, which end with it."""

    def __init__(self, folder: Path, brokers: str, trees: dict[str, Path]) -> None:
        self._folder, self._brokers, self._trees = folder, brokers, trees
        self._all: list[Engine] = []
        self._numbers = itertools.count()

    async def start(self, side: str, release: str) -> Engine:
        """Start an engine, whose name tells its release, and wait until it is ready."""
        engine = await self.begin(side, release)
        assert (said := engine.ready.result()) == "ready", said
        return engine

    async def begin(self, side: str, release: str) -> Engine:
        """Start an engine, and wait until it is ready or was refused."""
        name = f"{side}{next(self._numbers)}-{release}"
        log = self._folder / f"{name}.log"
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, ENGINE, side, name, f"{TP[side]}", self._brokers),
                stdin=PIPE,
                stdout=PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": f"{self._trees[release]}"},
            )
        engine = Engine(process, side, release, log)
        self._all.append(engine)
        await asyncio.wait_for(asyncio.shield(engine.ready), READY_S)
        return engine

    async def close(self) -> None:
        await asyncio.gather(*(one.kill() for one in self._all))


@contextlib.asynccontextmanager
async def engines(folder: Path, brokers: str, trees: dict[str, Path]) -> AsyncIterator[Engines]:
    made = Engines(folder, brokers, trees)
    try:
        yield made
    finally:
        await made.close()


class Traffic:
    """Handoffs between the engines that serve, which begin at a steady pace."""

    def __init__(self, serving: list[Engine]) -> None:
        self.serving = serving
        self.done: Counter[tuple[str, str]] = Counter()
        """Handoffs that both sides were told are DONE, by the releases of P and D."""
        self.failed: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = itertools.count()

    async def hand_over(self, p: Engine, d: Engine) -> None:
        handoff_id = f"h{next(self._turns)}"
        ends = await asyncio.gather(d.take_part(handoff_id), p.take_part(handoff_id))
        if {*ends} == {"DONE"}:
            self.done[p.release, d.release] += 1
        else:
            self.failed.append(f"{handoff_id} from {p.release} to {d.release}: {ends}")

    async def run(self, every_s: float) -> None:
        for turn in itertools.count():
            p_side, d_side = ([e for e in self.serving if e.side == side] for side in "pd")
            d = d_side[turn // len(p_side) % len(d_side)]
            task = asyncio.create_task(self.hand_over(p_side[turn % len(p_side)], d))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(every_s)

    async def ended(self) -> None:
        async with asyncio.timeout(READY_S):
            await asyncio.gather(*self._tasks)


@contextlib.asynccontextmanager
async def traffic(serving: list[Engine], every_s: float = 0.05) -> AsyncIterator[Traffic]:
    """Run traffic inside the ``async with``; at its end, wait until all handoffs have ended."""
    one = Traffic(serving)
    running = asyncio.create_task(one.run(every_s))
    try:
        yield one
    finally:
        running.cancel()
        await one.ended()
