"""Pairs of engines, P and D, whose ranks are real agents in processes of their own.

Several pairs share the rank processes and their memory, so that a benchmark can measure them in
turns: two ways to move the same state, or a state beside one contiguous READ of the same bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.processes import logs_folder, module, open_log
from restow.broker.client import AdminClient, EngineSession, Offer
from restow.broker.client.engine.handoff_futures import Delivery, HandoffEnded
from restow.broker.errors import RestowError
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
from restow.broker.layout.json_form import layout_to_json
from restow.broker.planner import Plan

STAGING_BYTES = 384 << 20
RANK = module("bench.rank_process")
CONNECT_S, ANSWER_S, END_S = 60.0, 60.0, 30.0
Blocks = dict[str, list[int]]


@dataclass(frozen=True)
class EnginePair:
    """The layouts of P and D, the broker of both, and how D reads.

    ``host_reads`` is `AgentSettings.host_reads`; None leaves its default. P answers offers with
    ``on_offer``.
    """

    layouts: tuple[Layout, Layout]
    broker: str
    read_threads: int
    host_reads: bool | None = None
    on_offer: Callable[[Offer], None] | None = None


def contiguous(plan: Plan, tokens: int) -> tuple[Layout, Layout]:
    """Return layouts that have the plan's bytes as one run for each pair of ranks."""
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
class RunningPairs:
    """Pairs of engines that run, by the names that the benchmark gave them."""

    name: str
    tokens: int
    prompts: int
    scattered: bool
    sessions: dict[tuple[str, str], EngineSession]
    """By side, "P" or "D", and pair."""
    workers: dict[str, list[subprocess.Popen[str]]]
    """Rank processes, by side."""
    layouts: Mapping[str, tuple[Layout, Layout]]
    written: dict[str, Blocks] = field(default_factory=dict)
    """P's blocks of pairs that hand over the known state."""

    def handoff_id(self, pair: str, number: object) -> str:
        """Return the id of a handoff of a pair."""
        return f"{pair}-{self.name}-{number}"

    def publish(
        self, pair: str, number: object, rng: np.random.Generator, content: bytes = b""
    ) -> None:
        """Have P publish a state and fence it."""
        self.publish_as(pair, self.handoff_id(pair, number), rng, content)

    def publish_as(
        self, pair: str, handoff_id: str, rng: np.random.Generator, content: bytes
    ) -> None:
        """Have P publish and fence a state under an id that the caller chose."""
        blocks = self.written.get(pair) or self.blocks(self.layouts[pair][0], rng)
        self.sessions["P", pair].publish(handoff_id, blocks, self.tokens, content=content)
        for worker in self.workers["P"]:
            _say(worker, {"engine_id": f"P{pair}{self.name}", "fence": handoff_id})

    def request(self, pair: str, number: object, rng: np.random.Generator) -> Delivery:
        """Have D request the state."""
        return self._request(pair, number, self.blocks(self.layouts[pair][1], rng))

    def _request(self, pair: str, number: object, blocks: Blocks, write_mark: int = 0) -> Delivery:
        return self.sessions["D", pair].request(
            self.handoff_id(pair, number),
            blocks,
            position_tokens=self.tokens,
            timeout_ms=30_000,
            write_mark=write_mark,
        )

    async def attempt(self, pair: str, number: object, rng: np.random.Generator) -> HandoffEnded:
        """Hand a state over, and return its end, whichever it is."""
        self.publish(pair, number, rng)
        return await self.request(pair, number, rng)

    async def attempt_in_place(
        self,
        pair: str,
        number: object,
        place: int,
        rng: np.random.Generator,
        write_mark: int = 0,
    ) -> HandoffEnded:
        """Hand a state over to a place of its own at D, as other handoffs are under way."""
        self.publish(pair, number, rng)
        blocks = self.blocks_of_place(self.layouts[pair][1], place)
        return await self._request(pair, number, blocks, write_mark)

    async def hand_over(self, pair: str, number: object, rng: np.random.Generator) -> float:
        """Hand a state over; return the seconds from the grant to the last rank's report."""
        return must_be_done(await self.attempt(pair, number, rng)).transfer_us / 1e6

    async def ask(self, side: str, pair: str, command: Mapping[str, object]) -> list[Any]:
        """Give a command to all ranks of a side at once, and return their answers."""
        for worker in self.workers[side]:
            _say(worker, {"engine_id": f"{side}{pair}{self.name}", **command})
        async with asyncio.timeout(ANSWER_S):
            lines = [await asyncio.to_thread(_line, worker) for worker in self.workers[side]]
        return [json.loads(line) for line in lines]

    async def check_bytes(self, pair: str, places: int = 1) -> None:
        """Hand a known state over to several places at once; the pair keeps to it from now on.

        Raises `RuntimeError` unless every byte arrives.
        """
        rng = np.random.default_rng(places)
        blocks = self.written[pair] = self.blocks(self.layouts[pair][0], rng)
        await self.ask("P", pair, {"write": blocks})
        await self.overwrite(pair, places, wait=True)
        for end in await asyncio.gather(
            *(self.attempt_in_place(pair, f"check-{n}", n, rng) for n in range(places))
        ):
            must_be_done(end)
        await self.check(pair, places)

    async def check(self, pair: str, places: int) -> None:
        """Raise `RuntimeError` unless D's first places hold the known state."""
        if wrong := await self.wrong_bytes(pair, places):
            raise RuntimeError(f"{pair}: {wrong} wrong bytes at D")

    async def overwrite(
        self, pair: str, places: int, late_s: float = 0, mark: int = 0, wait: bool = False
    ) -> None:
        """Have D's ranks write other bytes to the first places, ``late_s`` from now on.

        With a ``mark`` their agents are told when they have; with ``wait`` they have on return.
        """
        told = {"late_s": late_s, "mark": mark, "wait": wait}
        await self.ask("D", pair, {"overwrite": self._places(pair, places), **told})

    async def wrong_bytes(self, pair: str, places: int) -> int:
        """Count bytes that are not the known state's in D's first places, when D has written."""
        return sum(await self.ask("D", pair, {"count_wrong": self._places(pair, places)}))

    def _places(self, pair: str, places: int) -> list[Blocks]:
        return [self.blocks_of_place(self.layouts[pair][1], place) for place in range(places)]

    async def strategies(self, pair: str, number: object) -> list[str]:
        """Return the strategies that a completed handoff used."""
        address = self.sessions["D", pair].address

        def ask() -> list[str]:
            with AdminClient(address) as client:
                return list(client.handoff(self.handoff_id(pair, number)).handoff.strategies)

        return await asyncio.to_thread(ask)

    def blocks(self, layout: Layout, rng: np.random.Generator) -> Blocks:
        """Draw a prompt's blocks from the room of two prompts, in order unless scattered."""
        by_group: Blocks = {}
        for group, page_tokens in page_tokens_of(layout).items():
            count = -(-self.tokens // page_tokens) if page_tokens else 1
            ids = rng.permutation(2 * count)[:count]
            if page_tokens and not self.scattered:
                ids = np.arange(count) + int(rng.integers(2)) * count
            by_group[group] = ids.tolist()
        return by_group

    def blocks_of_place(self, layout: Layout, place: int) -> Blocks:
        """Return the blocks of one of ``prompts`` places, which have no block in common."""
        by_group: Blocks = {}
        for group, page_tokens in page_tokens_of(layout).items():
            count = -(-self.tokens // page_tokens) if page_tokens else 1
            by_group[group] = (place + self.prompts * np.arange(count)).tolist()
        return by_group


def must_be_done(ended: HandoffEnded) -> HandoffEnded:
    """Return a handoff's end; raise `RuntimeError` unless it is DONE."""
    if not ended.done:
        raise RuntimeError(f"{ended.handoff_id}: {ended.reason}: {ended.detail}")
    return ended


async def connected(address: str, engines: int, agents: int) -> None:
    """Wait until a broker knows this many engines and agents."""
    with AdminClient(address, timeout_s=5.0) as admin:
        async with asyncio.timeout(CONNECT_S):
            while True:
                with contextlib.suppress(RestowError):  # a broker that starts does not answer yet
                    status = await asyncio.to_thread(admin.status)
                    if (status.engines, status.agents) == (engines, agents):
                        return
                await asyncio.sleep(0.02)


def page_counts(layout: Layout, tokens: int, prompts: int = 2) -> dict[str, int]:
    """Return the pages of each group that this many prompts need."""
    groups = page_tokens_of(layout).items()
    return {group: prompts * (-(-tokens // size) if size else 1) for group, size in groups}


def page_tokens_of(layout: Layout) -> dict[str, int]:
    """Return the tokens in a page of each group, 0 for snapshots."""
    return {r.group: r.page_tokens or 0 for rank in layout.ranks for r in rank.regions}


@asynccontextmanager
async def running_pairs(
    name: str,
    pairs: Mapping[str, EnginePair],
    tokens: int,
    scattered: bool = True,
    environment: Mapping[str, str] | None = None,
    on_gpu: bool = False,
    prompts: int = 2,
    prefixes: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> AsyncIterator[RunningPairs]:
    """Run all engines and their ranks, with pages for ``prompts`` prompts.

    ``environment`` is added to that of the rank processes. With ``on_gpu`` all memory is on this
    machine's first GPU. ``prefixes`` begin the commands of P's and D's rank processes.
    """
    layouts = {pair: engines.layouts for pair, engines in pairs.items()}
    running = RunningPairs(name, tokens, prompts, scattered, {}, {}, layouts)
    async with AsyncExitStack() as stack:
        for index, side in enumerate("PD"):
            for pair, engines in pairs.items():
                session = EngineSession(
                    f"{side}{pair}{name}",
                    name,
                    engines.layouts[index],
                    engines.broker,
                    publishes=side == "P",
                    asks=side == "D",
                    on_offer=engines.on_offer if side == "P" else None,
                )
                running.sessions[side, pair] = await stack.enter_async_context(session)
            ranks = max(len(engines.layouts[index].ranks) for engines in pairs.values())
            running.workers[side] = [
                stack.enter_context(
                    _rank_process(
                        running, pairs, index, rank, environment or {}, on_gpu, prefixes[index]
                    )
                )
                for rank in range(ranks)
            ]
        for worker in (*running.workers["P"], *running.workers["D"]):
            if (await asyncio.to_thread(_line, worker)).strip() != "ready":
                raise RuntimeError("a rank's process did not start")
        yield running


@contextmanager
def _rank_process(
    running: RunningPairs,
    pairs: Mapping[str, EnginePair],
    index: int,
    position: int,
    environment: Mapping[str, str],
    on_gpu: bool,
    prefix: Sequence[str],
) -> Iterator[subprocess.Popen[str]]:
    agents = []
    for pair, engines in pairs.items():
        layout = engines.layouts[index]
        agents.append(
            {
                "broker": engines.broker,
                "engine_id": f"{'PD'[index]}{pair}{running.name}",
                "incarnation": running.name,
                "layout": layout_to_json(Layout(layout.model, (layout.ranks[position],))),
                "tokens": running.tokens,
                "pages": page_counts(layout, running.tokens, running.prompts),
                "staging_bytes": STAGING_BYTES,
                "read_threads": engines.read_threads,
                "host_reads": engines.host_reads,
            }
        )
    with open_log("ranks") as log:
        process = subprocess.Popen(
            [*prefix, *RANK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **environment},
        )
    try:
        _say(process, {"agents": agents, "on_gpu": on_gpu})
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _say(process: subprocess.Popen[str], message: object) -> None:
    if process.stdin is not None:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()


def _line(process: subprocess.Popen[str]) -> str:
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        log = (logs_folder() / "ranks.log").read_text(errors="replace")
        raise RuntimeError(f"a rank's process has ended, and ranks.log with: {log[-2000:]}")
    return line
