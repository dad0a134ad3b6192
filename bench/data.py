"""One handoff of a real model's size between processes, beside one contiguous READ of its bytes.

The reference travels the same way: a second pair of engines, on the same ranks, whose state is one
run of bytes for each pair of ranks that the plan connects. So both pay broker, stream and agent,
and the ratio shows what the layout costs.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop
from bare import bare
from control import BROKER, listening
from geometry import geometries
from rows import Row, Yield, compared

from restow.agents.async_agent import AgentSettings
from restow.broker.client import EngineSession
from restow.broker.families import ConvLayout, EngineSettings, build_layout
from restow.broker.layout import (
    DType,
    Field,
    Kind,
    Layout,
    Model,
    RankLayout,
    Region,
    Shard,
    Span,
)
from restow.broker.planner import Plan, make_plan

TOKENS = 8192
GEOMETRY = "nemotron3-nano-30b"
PAIRS = ((1, 1), (2, 4), (4, 2))
PAGES = (16, 64, 128)
STAGING_BYTES = 256 << 20
READ_THREADS = AgentSettings().read_threads
RANK = [sys.executable, str(Path(__file__).with_name("rank.py"))]


@dataclass(frozen=True)
class Case:
    """One pair of engines."""

    p_tp: int
    d_tp: int
    p_conv: ConvLayout
    d_conv: ConvLayout
    page_tokens: int
    scattered: bool = True
    """Pages in random order, as after hours of serving; else in order, as after a start."""
    read_threads: int = READ_THREADS
    """That share out what is read; the reference is always one READ by one thread."""

    @property
    def name(self) -> str:
        conv = self.p_conv if self.p_conv is self.d_conv else f"{self.p_conv} to {self.d_conv}"
        order = "scattered" if self.scattered else "in order"
        threads = "" if self.read_threads == READ_THREADS else f", {self.read_threads} thread"
        pages = f"pages of {self.page_tokens} {order}"
        return f"P{self.p_tp} to D{self.d_tp}, {conv}, {pages}{threads}"

    @property
    def goal(self) -> float | None:
        """The ratio wanted: contiguous pieces at equal TP, smaller ones at unequal."""
        if self.p_conv is not self.d_conv or self.read_threads != READ_THREADS:
            return None
        if self.p_tp == self.d_tp:
            return 0.85 if self.page_tokens >= 64 else None
        return 0.70 if self.page_tokens >= 64 else 0.45


def cases() -> Iterator[Case]:
    for p_tp, d_tp in PAIRS:
        for page_tokens in PAGES:
            for conv in ConvLayout:
                yield Case(p_tp, d_tp, conv, conv, page_tokens)
        yield Case(p_tp, d_tp, ConvLayout.SD, ConvLayout.DS, 64)
        yield Case(p_tp, d_tp, ConvLayout.DS, ConvLayout.DS, 64, scattered=False)
        if READ_THREADS > 1:
            yield Case(p_tp, d_tp, ConvLayout.DS, ConvLayout.DS, 64, read_threads=1)


def run(put: Yield, repeats: int) -> None:
    """Measure every case in a house of its own."""
    with listening(BROKER) as broker:
        for index, case in enumerate(cases()):
            for row in uvloop.run(_measure(case, index, broker, repeats)):
                put(row)


async def _measure(case: Case, index: int, broker: str, repeats: int) -> list[Row]:
    spec = geometries()[GEOMETRY]
    layouts = [
        build_layout(spec, EngineSettings(tp=tp, conv_layout=conv, page_tokens=case.page_tokens))
        for tp, conv in ((case.p_tp, case.p_conv), (case.d_tp, case.d_conv))
    ]
    plan = make_plan(layouts[0], layouts[1])
    size_bytes = plan.bytes_at(TOKENS)
    runs = _contiguous(plan)
    threads = {"layout": case.read_threads, "contiguous": 1}
    async with AsyncExitStack() as stack:
        house = await stack.enter_async_context(_house(f"{index}", broker, layouts, runs, threads))
        ours, contiguous, copies, alone = [], [], [], []
        rng = np.random.default_rng(index)
        nixl = stack.enter_context(bare(plan, TOKENS, house.page_counts))
        await house.hand_over("layout", "warm", rng, case)
        await house.hand_over("contiguous", "warm", rng, case)
        if nixl.complete:
            nixl.read(*(house.blocks("layout", rng, case) for _ in range(2)))
        nixl.rest()
        source, destination = (np.ones(size_bytes, np.uint8) for _ in range(2))
        for repeat in range(repeats):
            ours.append(await house.hand_over("layout", f"{repeat}", rng, case))
            contiguous.append(await house.hand_over("contiguous", f"{repeat}", rng, case))
            if nixl.complete:
                lists = [house.blocks("layout", rng, case) for _ in range(2)]
                alone.append(nixl.read(*lists))
            begun_s = time.perf_counter()
            np.copyto(destination, source)
            copies.append(time.perf_counter() - begun_s)
    rows = [
        compared(
            "data",
            case.name,
            ours,
            "contiguous READ",
            contiguous,
            goal=case.goal,
            size_bytes=size_bytes,
        ),
        compared("data", case.name, ours, "memcpy, one thread", copies, size_bytes=size_bytes),
    ]
    if alone:
        what = "NIXL alone, the same pieces"
        rows.append(compared("data", case.name, ours, what, alone, size_bytes=size_bytes))
    return rows


def _contiguous(plan: Plan) -> list[Layout]:
    """Two layouts between which the same ranks move the same bytes as one run each."""
    sizes: Counter[tuple[int, int]] = Counter()
    for move in plan.moves:
        sizes[move.src_rank, move.dst_rank] += move.bytes * (TOKENS if move.per_token else 1)
    fields = {pair: f"from{pair[0]}to{pair[1]}" for pair in sizes}
    model = Model(
        "contiguous",
        tuple(Field(fields[p], Kind.SNAPSHOT, ("byte",), (size,)) for p, size in sizes.items()),
    )
    layouts = []
    for side, layout in enumerate((plan.source, plan.destination)):
        ranks = []
        for rank in layout.ranks:
            own = [(pair, size) for pair, size in sizes.items() if pair[side] == rank.rank]
            ends = np.cumsum([size for _, size in own]).tolist()
            shards = tuple(
                Shard(fields[pair], (Span(0, size),), DType.UINT8, "run", end - size, (1,))
                for (pair, size), end in zip(own, ends, strict=True)
            )
            region = Region("run", "state", max(ends, default=1), None)
            ranks.append(RankLayout(rank.rank, (region,), shards))
        layouts.append(Layout(model, tuple(ranks)))
    return layouts


@dataclass
class House:
    """Two pairs of engines on one set of rank processes."""

    prefix: str
    sessions: dict[tuple[str, str], EngineSession]
    workers: dict[str, list[subprocess.Popen[str]]]
    page_counts: dict[str, int]

    async def hand_over(self, what: str, name: str, rng: np.random.Generator, case: Case) -> float:
        """One handoff; seconds from grant to the last rank's report."""
        handoff_id = f"{what}-{self.prefix}-{name}"
        blocks = [self.blocks(what, rng, case) for _ in range(2)]
        for worker in self.workers["P"]:
            command = {"engine_id": f"P{what}{self.prefix}", "fence": handoff_id}
            _say(worker, command)
        self.sessions["P", what].publish(handoff_id, blocks[0], TOKENS)
        ended = await self.sessions["D", what].request(handoff_id, blocks[1])
        if not ended.done:
            raise RuntimeError(f"{handoff_id}: {ended.reason}: {ended.detail}")
        return ended.transfer_us / 1e6

    def blocks(self, what: str, rng: np.random.Generator, case: Case) -> dict[str, list[int]]:
        """A prompt's blocks in a pool of twice as many."""
        if what == "contiguous":
            # One of two, as the pages of a layout are drawn from twice as many.
            return {"state": [int(rng.integers(2))]}
        blocks = -(-TOKENS // case.page_tokens)
        ids = rng.permutation(self.page_counts["attention"])[:blocks]
        if not case.scattered:
            ids = np.arange(blocks) + int(rng.integers(2)) * blocks
        return {"attention": ids.tolist(), "state": [1]}


@asynccontextmanager
async def _house(
    prefix: str,
    broker: str,
    layouts: list[Layout],
    runs: list[Layout],
    read_threads: dict[str, int],
) -> AsyncIterator[House]:
    page_tokens = max(region.page_tokens or 0 for region in layouts[0].ranks[0].regions)
    # Twice what a prompt needs, so that its pages lie scattered.
    page_counts = {"attention": 2 * -(-TOKENS // page_tokens), "state": 2}
    async with AsyncExitStack() as stack:
        house = House(prefix, {}, {}, page_counts)
        for side, pair in (("P", (layouts[0], runs[0])), ("D", (layouts[1], runs[1]))):
            for what, layout in zip(("layout", "contiguous"), pair, strict=True):
                session = EngineSession(f"{side}{what}{prefix}", prefix, layout, broker)
                house.sessions[side, what] = await stack.enter_async_context(session)
            house.workers[side] = [
                stack.enter_context(
                    _worker(broker, side, prefix, index, pair, page_counts, read_threads)
                )
                for index in range(len(pair[0].ranks))
            ]
        for worker in (*house.workers["P"], *house.workers["D"]):
            line = await asyncio.to_thread(worker.stdout.readline) if worker.stdout else ""
            if line.strip() != "ready":
                raise RuntimeError("a rank's process did not start")
        yield house


@contextmanager
def _worker(
    broker: str,
    side: str,
    prefix: str,
    index: int,
    pair: tuple[Layout, Layout],
    page_counts: dict[str, int],
    read_threads: dict[str, int],
) -> Iterator[subprocess.Popen[str]]:
    served = [
        {
            "engine_id": f"{side}{what}{prefix}",
            "incarnation": prefix,
            "rank": layout.ranks[index].rank,
            "regions": [
                (r.name, page_counts[r.group], r.page_stride_bytes)
                for r in layout.ranks[index].regions
            ],
            "staging_bytes": STAGING_BYTES,
            "read_threads": read_threads[what],
        }
        for what, layout in zip(("layout", "contiguous"), pair, strict=True)
    ]
    process = subprocess.Popen(RANK, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        _say(process, {"broker": broker, "agents": served})
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        process.wait()


def _say(process: subprocess.Popen[str], message: object) -> None:
    if process.stdin is not None:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
