"""The time to read a state from a store's memory or disk, beside P and a contiguous READ.

Ranks, store and broker are processes of their own. D requests each state of 8,192 tokens by its
content, and the time counts from the request to DONE. For the disk the store is restarted, so that
nothing is in memory; its files and the plain file beside are read past the system's cache.
The variable STORE_FOLDER names a folder on the disk to measure.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import uvloop

from bench.engine_pairs import (
    EnginePair,
    RunningPairs,
    connected,
    contiguous,
    must_be_done,
    page_tokens_of,
    running_pairs,
)
from bench.model_sizes import real_models
from bench.processes import module, open_log, running_broker
from bench.report import Put, compared
from restow.broker.client import Offer, PrefixChain, chain_of
from restow.broker.client.engine.handoff_futures import HandoffEnded
from restow.broker.families import EngineSettings, build_layout
from restow.broker.layout import Layout
from restow.broker.planner import make_plan

SUITE = "store-reads"
MODEL = "nemotron3-nano-30b"
TOKENS = 8192
TPS = (1, 2)
"""TP of the D engines; P and the store have 1."""
ENGINES, AGENTS = 4 * len(TPS), sum(2 * (1 + tp) for tp in TPS)
"""Without the store."""
OWN = 1000
"""Number of the state that P holds."""
WARM = 2
"""Turns that do not count, because they make plans and introduce peers."""
MEMORY_GOAL_S, DISK_GOAL_S, OTHER_TP_GOAL = 0.025, 0.080, 1 / 1.3
P = "Playout1"
"""The engine that holds states: the P of the pairs for D of TP 1."""
STORE = (*module("restow.broker.cli.main"), "store", "--engine", P)
SIZES = ("--memory", "4GiB", "--disk-size", "8GiB")
READY_S = 60.0


@dataclass
class Samples:
    """Seconds by D's TP: from the store, from P, a contiguous READ, and a plain file."""

    store: dict[int, list[float]] = field(default_factory=lambda: {tp: [] for tp in TPS})
    p: dict[int, list[float]] = field(default_factory=lambda: {tp: [] for tp in TPS})
    read: dict[int, list[float]] = field(default_factory=lambda: {tp: [] for tp in TPS})
    file: dict[int, list[float]] = field(default_factory=dict)


def run(put: Put, repeats: int) -> None:
    """Measure the memory first, then the disk, each with a store of its own."""
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
    spec = replace(real_models()[MODEL], revision="v1")
    p, *ds = (build_layout(spec, EngineSettings(tp=tp, page_tokens=16)) for tp in (1, *TPS))
    plans = {tp: make_plan(p, d) for tp, d in zip(TPS, ds, strict=True)}
    rng = np.random.default_rng(0)
    running: dict[int, RunningPairs] = {}

    def give(offer: Offer) -> None:
        running[1].publish_as("layout", offer.handoff_id, rng, offer.content)

    async with AsyncExitStack() as stack:
        address = stack.enter_context(running_broker()).address
        folder = os.environ.get("STORE_FOLDER")
        disk = stack.enter_context(tempfile.TemporaryDirectory(prefix="restow-store-", dir=folder))
        for tp, d in zip(TPS, ds, strict=True):
            read = contiguous(plans[tp], TOKENS)
            pairs = {
                "layout": EnginePair((p, d), address, 2, on_offer=give),
                "contiguous": EnginePair(_named(read, f"contiguous{tp}"), address, 1),
            }
            running[tp] = await stack.enter_async_context(running_pairs(f"{tp}", pairs, TOKENS))
        await connected(address, ENGINES, AGENTS)
        size_bytes = plans[1].bytes_at(TOKENS)
        whole_blocks_bytes = -(-size_bytes // 4096) * 4096
        reads = _Reads(running, address, Path(disk), rng, whole_blocks_bytes)
        memory = await reads.memory(repeats + WARM)
        return memory, await reads.disk(repeats + WARM), size_bytes


def _named(layouts: tuple[Layout, Layout], name: str) -> tuple[Layout, Layout]:
    """Give the layouts' model another name, so that both layouts may share a broker."""
    first, second = (replace(layout, model=replace(layout.model, name=name)) for layout in layouts)
    return first, second


@dataclass
class _Reads:
    """Reads from a store, from P and from files, by D's TP."""

    running: dict[int, RunningPairs]
    address: str
    folder: Path
    rng: np.random.Generator
    file_bytes: int
    requests: int = 0

    async def memory(self, turns: int) -> Samples:
        """Have a store keep states of P, which evicts them, and give each to every D."""
        samples = Samples()
        async with self._store():
            for number in range(turns * len(TPS)):  # the disk gives each state to one D
                self._report(_chain(number), held=True)
                self.running[1].sessions["P", "layout"].keep(_chain(number).prefix(TOKENS))
                await self._held(_chain(number), {P, "store"})
                self._report(_chain(number), held=False)
                await self._held(_chain(number), {"store"})
            for number in range(turns):
                for tp in TPS:
                    await self._beside(samples, tp)
                    samples.store[tp].append(await self._ask(tp, _chain(number)))
        return _without_warm(samples)

    async def disk(self, turns: int) -> Samples:
        """Have a restarted store give each state once, to the D engines in turns."""
        samples, count = Samples(file={tp: [] for tp in TPS}), turns * len(TPS)
        files = [self._plain_file(number) for number in range(count)]
        async with self._store():
            await self._held(_chain(count - 1), {"store"})
            for number, file in enumerate(files):
                tp = TPS[number % len(TPS)]
                await self._beside(samples, tp)
                samples.store[tp].append(await self._ask(tp, _chain(number)))
                samples.file[tp].append(_read_plainly(file, self.file_bytes))
                file.unlink()
        return _without_warm(samples)

    async def _beside(self, samples: Samples, tp: int) -> None:
        """Read a state of P's own, and the same bytes as one piece."""
        own = _chain(OWN)
        self._report(own, held=True)
        await self._held(own, {P})
        samples.p[tp].append(await self._ask(tp, own))
        self._report(own, held=False)
        self.requests += 1
        reads = self.running[tp].attempt("contiguous", self.requests, self.rng)
        samples.read[tp].append(await _timed(reads))

    def _report(self, chain: PrefixChain, held: bool) -> None:
        session = self.running[1].sessions["P", "layout"]
        layout, _ = self.running[1].layouts["layout"]
        for group, tokens in page_tokens_of(layout).items():
            say = session.hold if held else session.evict
            say(chain.form, group, chain.hashes if tokens else chain.hashes[-1:])

    async def _held(self, chain: PrefixChain, by: set[str]) -> None:
        """Wait until exactly these engines hold the state."""
        session = self.running[1].sessions["P", "layout"]
        async with asyncio.timeout(READY_S):
            while True:
                (holders,) = await session.find([chain])
                if {holder.engine_id for holder in holders if holder.tokens == TOKENS} == by:
                    return
                await asyncio.sleep(0.01)

    async def _ask(self, tp: int, chain: PrefixChain) -> float:
        pairs = self.running[tp]
        session, (_, layout) = pairs.sessions["D", "layout"], pairs.layouts["layout"]
        self.requests += 1
        blocks = pairs.blocks(layout, self.rng)
        prefix = chain.prefix(TOKENS)
        return await _timed(session.request(f"request-{self.requests}", blocks, prefix=prefix))

    @asynccontextmanager
    async def _store(self) -> AsyncIterator[None]:
        """Run the store, with what earlier stores have left on the disk."""
        process = _start_store(self.address, self.folder / "store")
        try:
            await connected(self.address, ENGINES + 1, AGENTS + 1)
            yield
        finally:
            process.send_signal(signal.SIGTERM)  # it writes to its disk what is not there yet
            await asyncio.to_thread(process.wait)

    def _plain_file(self, number: int) -> Path:
        path = self.folder / f"plain{number}"
        with path.open("wb") as file:
            file.write(self.rng.bytes(self.file_bytes))
            os.fsync(file.fileno())
        return path


@cache
def _chain(number: int) -> PrefixChain:
    """Return the chain of a prompt of its own, of which one token is left to compute."""
    first = number * 2 * TOKENS
    return chain_of(range(first, first + TOKENS + 1))


def _start_store(broker: str, disk: Path) -> subprocess.Popen[bytes]:
    with open_log("store") as log:
        command = [*STORE, "--broker", broker, "--disk", f"{disk}", *SIZES]
        return subprocess.Popen(command, stderr=log)


async def _timed(ends: Awaitable[HandoffEnded]) -> float:
    """Return the seconds until a handoff is DONE."""
    begun_s = time.perf_counter()
    must_be_done(await ends)
    return time.perf_counter() - begun_s


def _read_plainly(path: Path, size_bytes: int) -> float:
    """Return the seconds to read a whole file into memory that is mapped already."""
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
