"""One handoff of a real model's size between processes, beside one contiguous READ of its bytes.

The reference travels the same way: a second pair of engines, on the same ranks, whose state is one
run of bytes for each pair of ranks that the plan connects. So both pay broker, stream and agent,
and the ratio shows what the layout costs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy as np
import uvloop
from bare import ALONE, bare
from control import BROKER, listening
from geometry import geometries
from rows import Row, Yield, compared
from scene import Engines, contiguous, page_counts, scene

from restow.agents.link.settings import AgentSettings
from restow.broker.families import ConvLayout, EngineSettings, build_layout
from restow.broker.planner import make_plan

TOKENS = 8192
GEOMETRY = "nemotron3-nano-30b"
PAIRS = ((1, 1), (2, 4), (4, 2))
PAGES = (16, 64, 128)
READ_THREADS = AgentSettings().read_threads


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
    kinds = {
        "layout": Engines((layouts[0], layouts[1]), broker, case.read_threads),
        "contiguous": Engines(contiguous(plan, TOKENS), broker, 1),
    }
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(scene(f"{index}", kinds, TOKENS, case.scattered))
        ours, runs, copies, alone = [], [], [], []
        rng = np.random.default_rng(index)
        nixl = stack.enter_context(bare(plan, TOKENS, page_counts(plan.source, TOKENS)))
        for kind in kinds:
            await made.hand_over(kind, "warm", rng)
        if nixl.complete:
            nixl.read(*(made.blocks(layout, rng) for layout in layouts))
        nixl.rest()
        source, destination = (np.ones(size_bytes, np.uint8) for _ in range(2))
        for repeat in range(repeats):
            ours.append(await made.hand_over("layout", f"{repeat}", rng))
            runs.append(await made.hand_over("contiguous", f"{repeat}", rng))
            if nixl.complete:
                alone.append(nixl.read(*(made.blocks(layout, rng) for layout in layouts)))
            begun_s = time.perf_counter()
            np.copyto(destination, source)
            copies.append(time.perf_counter() - begun_s)
    rows = [
        compared(
            "data",
            case.name,
            ours,
            "contiguous READ",
            runs,
            goal=case.goal,
            size_bytes=size_bytes,
        ),
        compared("data", case.name, ours, "memcpy, one thread", copies, size_bytes=size_bytes),
    ]
    if alone:
        rows.append(compared("data", case.name, ours, ALONE, alone, size_bytes=size_bytes))
    return rows
