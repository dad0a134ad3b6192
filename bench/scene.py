"""Engines of several kinds on one set of rank processes, each kind with a broker of its own.

All kinds of one case have the same memory, so that they can be measured in turns: the ways of
travelling between two layouts, and a contiguous READ of the same bytes.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from restow.broker.client import AdminClient, EngineSession, Offer
from restow.broker.client.engine.delivery import Delivery, HandoffEnded
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
from restow.broker.planner import Plan

STAGING_BYTES = 384 << 20
RANK = [sys.executable, str(Path(__file__).with_name("rank.py"))]


@dataclass(frozen=True)
class Engines:
    """A P and a D of one kind: their layouts, their broker, and how D reads."""

    layouts: tuple[Layout, Layout]
    broker: str
    read_threads: int
    host_reads: bool | None = None
    """None: as agents do by themselves."""
    on_offer: Callable[[Offer], None] | None = None
    """What P does with offers."""


def contiguous(plan: Plan, tokens: int) -> tuple[Layout, Layout]:
    """Two layouts between which the same ranks move the same bytes as one run each."""
    sizes: Counter[tuple[int, int]] = Counter()
    entries = plan.entries(tokens)
    for move in plan.moves:
        sizes[move.src_rank, move.dst_rank] += move.bytes * entries[move.field]
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
    return layouts[0], layouts[1]


@dataclass
class Scene:
    """All kinds of engines of one case."""

    name: str
    tokens: int
    scattered: bool
    sessions: dict[tuple[str, str], EngineSession]
    workers: dict[str, list[subprocess.Popen[str]]]
    layouts: Mapping[str, tuple[Layout, Layout]]

    async def hand_over(self, kind: str, name: str, rng: np.random.Generator) -> float:
        """One handoff; seconds from grant to the last rank's report."""
        ended = await self.asked(kind, name, rng)
        if not ended.done:
            raise RuntimeError(f"{ended.handoff_id}: {ended.reason}: {ended.detail}")
        return ended.transfer_us / 1e6

    async def asked(self, kind: str, name: str, rng: np.random.Generator) -> HandoffEnded:
        """One handoff, however it ends."""
        self.publish(kind, name, rng)
        return await self.ask(kind, name, rng)

    def publish(self, kind: str, name: str, rng: np.random.Generator, content: bytes = b"") -> None:
        """P has a state."""
        self.give(kind, f"{kind}-{self.name}-{name}", rng, content)

    def give(self, kind: str, handoff_id: str, rng: np.random.Generator, content: bytes) -> None:
        """P publishes and fences a state under an id."""
        layout = self.layouts[kind][0]
        blocks = self.blocks(layout, rng)
        self.sessions["P", kind].publish(handoff_id, blocks, self.tokens, content=content)
        for worker in self.workers["P"]:
            _say(worker, {"engine_id": f"P{kind}{self.name}", "fence": handoff_id})

    def ask(
        self,
        kind: str,
        name: str,
        rng: np.random.Generator,
        timeout_ms: int = 30_000,
        content: bytes = b"",
    ) -> Delivery:
        """D asks for it."""
        handoff_id, layout = f"{kind}-{self.name}-{name}", self.layouts[kind][1]
        blocks = self.blocks(layout, rng)
        return self.sessions["D", kind].request(
            handoff_id,
            blocks,
            position_tokens=self.tokens,
            timeout_ms=timeout_ms,
            content=content,
        )

    async def strategies(self, kind: str, name: str) -> list[str]:
        """In which ways a handoff that was done went."""
        handoff_id = f"{kind}-{self.name}-{name}"
        address = self.sessions["D", kind].address

        def ask() -> list[str]:
            with AdminClient(address) as client:
                return list(client.handoff(handoff_id).handoff.strategies)

        return await asyncio.to_thread(ask)

    def blocks(self, layout: Layout, rng: np.random.Generator) -> dict[str, list[int]]:
        """A prompt's blocks in a pool of twice as many, in random order or as after a start."""
        found: dict[str, list[int]] = {}
        for group, page_tokens in _groups(layout).items():
            count = -(-self.tokens // page_tokens) if page_tokens else 1
            ids = rng.permutation(2 * count)[:count]
            if page_tokens and not self.scattered:
                ids = np.arange(count) + int(rng.integers(2)) * count
            found[group] = ids.tolist()
        return found


def page_counts(layout: Layout, tokens: int) -> dict[str, int]:
    """By group, twice what a prompt needs, so that its pages lie scattered."""
    return {g: -(-tokens // t) * 2 if t else 2 for g, t in _groups(layout).items()}


def _groups(layout: Layout) -> dict[str, int]:
    return {r.group: r.page_tokens or 0 for rank in layout.ranks for r in rank.regions}


@asynccontextmanager
async def scene(
    name: str,
    kinds: Mapping[str, Engines],
    tokens: int,
    scattered: bool = True,
    environment: Mapping[str, str] | None = None,
    before: tuple[list[str], list[str]] = ([], []),
    on_gpu: bool = False,
) -> AsyncIterator[Scene]:
    """Start everything; ``environment`` is added to that of the rank processes.

    ``before`` stands before the commands that start P's and D's ranks. ``on_gpu`` has all ranks'
    memory on this machine's first GPU.
    """
    layouts = {kind: engines.layouts for kind, engines in kinds.items()}
    made = Scene(name, tokens, scattered, {}, {}, layouts)
    async with AsyncExitStack() as stack:
        for index, side in enumerate("PD"):
            for kind, engines in kinds.items():
                session = EngineSession(
                    f"{side}{kind}{name}",
                    name,
                    engines.layouts[index],
                    engines.broker,
                    publishes=side == "P",
                    asks=side == "D",
                    on_offer=engines.on_offer if side == "P" else None,
                )
                made.sessions[side, kind] = await stack.enter_async_context(session)
            ranks = max(len(engines.layouts[index].ranks) for engines in kinds.values())
            made.workers[side] = [
                stack.enter_context(
                    _worker(made, kinds, index, rank, environment or {}, before[index], on_gpu)
                )
                for rank in range(ranks)
            ]
        for worker in (*made.workers["P"], *made.workers["D"]):
            line = await asyncio.to_thread(worker.stdout.readline) if worker.stdout else ""
            if line.strip() != "ready":
                raise RuntimeError("a rank's process did not start")
        yield made


@contextmanager
def _worker(
    made: Scene,
    kinds: Mapping[str, Engines],
    index: int,
    position: int,
    environment: Mapping[str, str],
    before: list[str],
    on_gpu: bool,
) -> Iterator[subprocess.Popen[str]]:
    served = []
    for kind, engines in kinds.items():
        layout = engines.layouts[index]
        pages = page_counts(layout, made.tokens)
        rank = layout.ranks[position]
        served.append(
            {
                "broker": engines.broker,
                "engine_id": f"{'PD'[index]}{kind}{made.name}",
                "incarnation": made.name,
                "rank": rank.rank,
                "regions": [(r.name, pages[r.group], r.page_stride_bytes) for r in rank.regions],
                "staging_bytes": STAGING_BYTES,
                "read_threads": engines.read_threads,
                "host_reads": engines.host_reads,
                "model": asdict(layout.model.identity),
            }
        )
    process = subprocess.Popen(
        [*before, *RANK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        _say(process, {"agents": served, "on_gpu": on_gpu})
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        process.wait()


def _say(process: subprocess.Popen[str], message: object) -> None:
    if process.stdin is not None:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
