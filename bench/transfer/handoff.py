"""The time of one handoff of a real model's size, beside one contiguous READ of the same bytes.

The reference is a second pair of engines on the same ranks, whose state is one run of bytes for
each pair of ranks that the plan connects. Both go through broker, streams and agents, so the ratio
shows what the layout costs. Two more references are NIXL without Restow, and memcpy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy as np
import uvloop

from bench.engine_pairs import EnginePair, contiguous, page_counts, running_pairs
from bench.model_sizes import real_models
from bench.processes import running_broker
from bench.report import Put, Row, compared
from bench.transfer.nixl_alone import nixl_alone
from restow.agents.link.settings import AgentSettings
from restow.broker.families import ConvLayout, EngineSettings, build_layout
from restow.broker.planner import make_plan

SUITE = "handoff"
TOKENS = 8192
MODEL = "nemotron3-nano-30b"
PAIRS = ((1, 1), (2, 4), (4, 2))
PAGES = (16, 64, 128)
READ_THREADS = AgentSettings().read_threads


@dataclass(frozen=True)
class Case:
    """A pair of engines.

    Pages lie in random order if ``scattered``, as after hours of serving, and in order otherwise.
    ``read_threads`` share D's reads; the reference is always read by one thread.
    """

    p_tp: int
    d_tp: int
    p_conv: ConvLayout
    d_conv: ConvLayout
    page_tokens: int
    scattered: bool = True
    read_threads: int = READ_THREADS

    @property
    def name(self) -> str:
        """Name the case in its rows."""
        conv = self.p_conv if self.p_conv is self.d_conv else f"{self.p_conv} to {self.d_conv}"
        order = "scattered" if self.scattered else "in order"
        threads = "" if self.read_threads == READ_THREADS else f", {self.read_threads} thread"
        pages = f"pages of {self.page_tokens} {order}"
        return f"P{self.p_tp} to D{self.d_tp}, {conv}, {pages}{threads}"

    @property
    def goal(self) -> float | None:
        """Return the wanted ratio, which is lower where unequal TP makes smaller pieces."""
        if self.p_conv is not self.d_conv or self.read_threads != READ_THREADS:
            return None
        if self.p_tp == self.d_tp:
            return 0.85 if self.page_tokens >= 64 else None
        return 0.70 if self.page_tokens >= 64 else 0.45


def cases() -> Iterator[Case]:
    """Yield all cases: TP sizes, pages, layouts of the conv state, threads."""
    for p_tp, d_tp in PAIRS:
        for page_tokens in PAGES:
            for conv in ConvLayout:
                yield Case(p_tp, d_tp, conv, conv, page_tokens)
        yield Case(p_tp, d_tp, ConvLayout.SD, ConvLayout.DS, 64)
        yield Case(p_tp, d_tp, ConvLayout.DS, ConvLayout.DS, 64, scattered=False)
        if READ_THREADS > 1:
            yield Case(p_tp, d_tp, ConvLayout.DS, ConvLayout.DS, 64, read_threads=1)


def run(put: Put, repeats: int) -> None:
    """Measure every case with engines of its own."""
    with running_broker() as broker:
        for index, case in enumerate(cases()):
            for row in uvloop.run(_measure(case, index, broker.address, repeats)):
                put(row)


async def _measure(case: Case, index: int, broker: str, repeats: int) -> list[Row]:
    spec = real_models()[MODEL]
    layouts = [
        build_layout(spec, EngineSettings(tp=tp, conv_layout=conv, page_tokens=case.page_tokens))
        for tp, conv in ((case.p_tp, case.p_conv), (case.d_tp, case.d_conv))
    ]
    plan = make_plan(layouts[0], layouts[1])
    size_bytes = plan.bytes_at(TOKENS)
    pairs = {
        "layout": EnginePair((layouts[0], layouts[1]), broker, case.read_threads),
        "contiguous": EnginePair(contiguous(plan, TOKENS), broker, 1),
    }
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(
            running_pairs(f"{index}", pairs, TOKENS, case.scattered)
        )
        ours, runs, copies, alone = [], [], [], []
        rng = np.random.default_rng(index)
        nixl = stack.enter_context(nixl_alone(plan, TOKENS, page_counts(plan.source, TOKENS)))
        for pair in pairs:
            await engines.hand_over(pair, "warm", rng)
        if nixl.complete:
            nixl.read(*(engines.blocks(layout, rng) for layout in layouts))
        nixl.rest()
        source, destination = (np.ones(size_bytes, np.uint8) for _ in range(2))
        for repeat in range(repeats):
            ours.append(await engines.hand_over("layout", repeat, rng))
            runs.append(await engines.hand_over("contiguous", repeat, rng))
            if nixl.complete:
                alone.append(nixl.read(*(engines.blocks(layout, rng) for layout in layouts)))
            begun_s = time.perf_counter()
            np.copyto(destination, source)
            copies.append(time.perf_counter() - begun_s)
    rows = [
        compared(
            SUITE,
            case.name,
            ours,
            "contiguous READ",
            runs,
            goal=case.goal,
            size_bytes=size_bytes,
        ),
        compared(SUITE, case.name, ours, "memcpy, one thread", copies, size_bytes=size_bytes),
    ]
    if alone:
        rows.append(compared(SUITE, case.name, ours, "NIXL alone", alone, size_bytes=size_bytes))
    return rows
