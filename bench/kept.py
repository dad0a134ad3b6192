"""A state out of a store's memory and off its disk, beside P's own and a contiguous READ, in turns.

All ranks, the store and the broker are processes of their own. Every state is of 8,192 tokens, and
is asked for by its content: seconds are from the demand to DONE. What comes from the disk comes
from a store that has just been started, so that nothing of it is in memory; files are read without
the system's cache, the plain one too. KEPT_FOLDER: where the disk is that is measured.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import uvloop
from geometry import geometries
from offers import all_there
from restarts import serve
from rows import Yield, compared
from scene import Engines, Scene, contiguous, scene

from restow.broker.client import Offer, PrefixChain, chain_of
from restow.broker.client.engine.delivery import HandoffEnded
from restow.broker.families import EngineSettings, build_layout
from restow.broker.layout import Layout
from restow.broker.planner import make_plan

SUITE = "kept"
GEOMETRY = "nemotron3-nano-30b"
TOKENS = 8192
TPS = (1, 2)
"""D's; P and the store have 1."""
OWN = 1000
"""The number of a state that P holds."""
WARM = 2
"""Turns that are not counted: they have plans and peers."""
MEMORY_GOAL_S, DISK_GOAL_S, OTHER_TP_GOAL = 0.025, 0.080, 1 / 1.3
P = "Playout1"
"""The engine that has states: that of the scene for D's of TP 1."""
STORE = [sys.executable, "-m", "restow.broker.cli.main", "store", "--engine", P]
SIZES = ["--memory", "4GiB", "--disk-size", "8GiB"]
READY_S = 60.0


@dataclass
class Samples:
    """Seconds, by D's TP."""

    store: dict[int, list[float]] = field(default_factory=lambda: {tp: [] for tp in TPS})
    p: dict[int, list[float]] = field(default_factory=lambda: {tp: [] for tp in TPS})
    read: dict[int, list[float]] = field(default_factory=lambda: {tp: [] for tp in TPS})
    file: dict[int, list[float]] = field(default_factory=dict)


def run(put: Yield, repeats: int) -> None:
    """Memory first, then the disk, each from a store of its own."""
    memory, disk, size_bytes = uvloop.run(_measure(repeats))
    for where, samples, goal_s in (
        ("memory", memory, MEMORY_GOAL_S),
        ("disk, cold", disk, DISK_GOAL_S),
    ):
        for tp in TPS:
            case, ours = f"from the store's {where}, to TP {tp}", samples.store[tp]
            beside = [("a contiguous READ", samples.read[tp]), ("P itself", samples.p[tp])]
            if tp in samples.file:
                beside.append(("a plain file read", samples.file[tp]))
            if tp == TPS[0]:
                words = f"goal of {goal_s * 1e3:.0f} ms"
                put(compared(SUITE, case, ours, words, [goal_s], size_bytes=size_bytes, goal=1.0))
            else:
                first = samples.store[TPS[0]]
                put(compared(SUITE, case, ours, "to the same TP", first, goal=OTHER_TP_GOAL))
            for reference, theirs in beside:
                put(compared(SUITE, case, ours, reference, theirs, size_bytes=size_bytes))


async def _measure(repeats: int) -> tuple[Samples, Samples, int]:
    spec = replace(geometries()[GEOMETRY], revision="v1")
    p, *ds = (build_layout(spec, EngineSettings(tp=tp, page_tokens=16)) for tp in (1, *TPS))
    plans = {tp: make_plan(p, d) for tp, d in zip(TPS, ds, strict=True)}
    broker, address = serve("127.0.0.1:0")
    rng = np.random.default_rng(0)
    scenes: dict[int, Scene] = {}

    def give(offer: Offer) -> None:
        scenes[1].give("layout", offer.handoff_id, rng, offer.content)

    try:
        async with AsyncExitStack() as stack:
            folder = os.environ.get("KEPT_FOLDER")
            disk = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="restow-kept-", dir=folder)
            )
            for tp, d in zip(TPS, ds, strict=True):
                read = contiguous(plans[tp], TOKENS)
                kinds = {
                    "layout": Engines((p, d), address, 2, on_offer=give),
                    "contiguous": Engines(_named(read, f"contiguous{tp}"), address, 1),
                }
                scenes[tp] = await stack.enter_async_context(scene(f"{tp}", kinds, TOKENS))
            await all_there(address, sum(2 * (1 + tp) for tp in TPS))
            size_bytes = plans[1].bytes_at(TOKENS)
            whole_blocks = -(-size_bytes // 4096) * 4096
            house = _House(scenes, address, Path(disk), rng, whole_blocks)
            memory = await house.memory(repeats + WARM)
            return memory, await house.disk(repeats + WARM), size_bytes
    finally:
        broker.kill()
        broker.wait()


def _named(layouts: tuple[Layout, Layout], name: str) -> tuple[Layout, Layout]:
    """The same of another model: one with other fields is no engine's of this."""
    first, second = (replace(one, model=replace(one.model, name=name)) for one in layouts)
    return first, second


@dataclass
class _House:
    scenes: dict[int, Scene]
    """By D's TP."""
    address: str
    folder: Path
    rng: np.random.Generator
    size_bytes: int
    """Of a plain file."""
    asked: int = 0

    async def memory(self, turns: int) -> Samples:
        """A store hears of states from P, which forgets them then; and gives each to every D."""
        samples = Samples()
        async with self._store():
            for number in range(turns * len(TPS)):  # off the disk each comes to one D
                self._tell(_chain(number), held=True)
                self.scenes[1].sessions["P", "layout"].keep(_chain(number).prefix(TOKENS))
                await self._held(_chain(number), {P, "store"})
                self._tell(_chain(number), held=False)
                await self._held(_chain(number), {"store"})
            for number in range(turns):
                for tp in TPS:
                    await self._beside(samples, tp)
                    samples.store[tp].append(await self._ask(tp, _chain(number)))
        return _without_warm(samples)

    async def disk(self, turns: int) -> Samples:
        """A store that has just been started gives each state once: to one D, then to another."""
        samples, count = Samples(file={tp: [] for tp in TPS}), turns * len(TPS)
        files = [self._plain_file(number) for number in range(count)]
        async with self._store():
            await self._held(_chain(count - 1), {"store"})
            for number, file in enumerate(files):
                tp = TPS[number % len(TPS)]
                await self._beside(samples, tp)
                samples.store[tp].append(await self._ask(tp, _chain(number)))
                samples.file[tp].append(_read_plainly(file, self.size_bytes))
                file.unlink()
        return _without_warm(samples)

    async def _beside(self, samples: Samples, tp: int) -> None:
        """P gives a state of its own, and the same bytes are read as one piece."""
        own = _chain(OWN)
        self._tell(own, held=True)
        await self._held(own, {P})
        samples.p[tp].append(await self._ask(tp, own))
        self._tell(own, held=False)
        self.asked += 1
        name = f"{self.asked}"
        reads = self.scenes[tp].asked("contiguous", name, self.rng)
        samples.read[tp].append(await _timed(reads))

    def _tell(self, chain: PrefixChain, held: bool) -> None:
        session = self.scenes[1].sessions["P", "layout"]
        layout, _ = self.scenes[1].layouts["layout"]
        groups = {r.group: r.page_tokens for k in layout.ranks for r in k.regions}
        for group, tokens in groups.items():
            say = session.hold if held else session.evict
            say(chain.form, group, chain.hashes if tokens else chain.hashes[-1:])

    async def _held(self, chain: PrefixChain, by: set[str]) -> None:
        """Wait until just these hold the state."""
        session = self.scenes[1].sessions["P", "layout"]
        async with asyncio.timeout(READY_S):
            while True:
                (found,) = await session.find([chain])
                if {one.engine_id for one in found if one.tokens == TOKENS} == by:
                    return
                await asyncio.sleep(0.01)

    async def _ask(self, tp: int, chain: PrefixChain) -> float:
        made = self.scenes[tp]
        session, (_, layout) = made.sessions["D", "layout"], made.layouts["layout"]
        self.asked += 1
        blocks = made.blocks(layout, self.rng)
        prefix = chain.prefix(TOKENS)
        return await _timed(session.request(f"ask-{self.asked}", blocks, prefix=prefix))

    @asynccontextmanager
    async def _store(self) -> AsyncIterator[None]:
        """A life of it, with what those before it have left on the disk."""
        process = _start_store(self.address, self.folder / "store")
        try:
            lines = process.stderr or ()
            if not await asyncio.to_thread(lambda: any("store ready" in line for line in lines)):
                raise RuntimeError("the store did not start")
            yield
        finally:
            process.send_signal(signal.SIGTERM)  # it writes what is not on the disk yet
            await asyncio.to_thread(process.wait)

    def _plain_file(self, number: int) -> Path:
        path = self.folder / f"plain{number}"
        with path.open("wb") as file:
            file.write(self.rng.bytes(self.size_bytes))
            os.fsync(file.fileno())
        return path


@cache
def _chain(number: int) -> PrefixChain:
    """A prompt of its own; a token of it is left to compute."""
    first = number * 2 * TOKENS
    return chain_of(range(first, first + TOKENS + 1))


def _start_store(broker: str, disk: Path) -> subprocess.Popen[str]:
    command = [*STORE, "--broker", broker, "--disk", f"{disk}", *SIZES]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


async def _timed(ends: Awaitable[HandoffEnded]) -> float:
    """Seconds until it is DONE."""
    begun_s = time.perf_counter()
    ended = await ends
    if not ended.done:
        raise RuntimeError(f"{ended.handoff_id}: {ended.reason}: {ended.detail}")
    return time.perf_counter() - begun_s


def _read_plainly(path: Path, size_bytes: int) -> float:
    """Seconds for all of a file, in one call, into memory that is there."""
    with mmap.mmap(-1, size_bytes) as memory:
        memory.write(bytes(size_bytes))
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            begun_s, moved = time.perf_counter(), 0
            while moved < size_bytes:
                moved += os.preadv(fd, [memoryview(memory)[moved:]], moved)
            return time.perf_counter() - begun_s
        finally:
            os.close(fd)


def _without_warm(samples: Samples) -> Samples:
    for by_tp in (samples.store, samples.p, samples.read, samples.file):
        for seconds in by_tp.values():
            del seconds[:WARM]
    return samples
