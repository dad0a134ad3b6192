"""The time to plan a pair of layouts, and to bind one handoff's pages to descriptors."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from bench.model_sizes import fifty_two_layers, real_models
from bench.report import Put, Row, compared
from restow.agents.binding.pages import Blocks, RegionTable, TokenRange
from restow.agents.binding.reads import Reads
from restow.broker.families import EngineSettings, ModelSpec, build_layout
from restow.broker.layout import Layout
from restow.broker.planner import Strategy, compile_programs, make_plan
from restow.broker.planner.program import READ_PAGES

SUITE = "planning"
TOKENS = 16_384
"""Nemotron-3-Nano has 6,200 descriptors at this length."""
PAGE_TOKENS = 16
PLAN_GOAL_S = 0.100
BIND_GOAL_S = 0.001
LONG_MODEL = "nemotron3-nano-30b"
LONG_TOKENS = 131_072
LONG_GOAL_S = 0.020


def run(put: Put, repeats: int) -> None:
    """Plan and bind every model, P2 to D4."""
    for name, spec in {**real_models(), "52 layers": fifty_two_layers()}.items():
        layouts = [
            build_layout(spec, EngineSettings(tp=tp, page_tokens=PAGE_TOKENS)) for tp in (2, 4)
        ]
        plan_s = _timed(partial(_plan, *layouts), repeats)
        put(
            compared(
                SUITE,
                f"plan {name}, P2 to D4",
                plan_s,
                "budget of 100 ms",
                [PLAN_GOAL_S],
                goal=1.0,
            )
        )
        put(_bind_row(name, spec, layouts, repeats))
        if name == LONG_MODEL:
            for row in _long_rows(spec, layouts, repeats):
                put(row)


def _plan(source: Layout, destination: Layout) -> None:
    compile_programs(make_plan(source, destination))


def _bind_row(name: str, spec: ModelSpec, layouts: list[Layout], repeats: int) -> Row:
    bind = _binding(layouts, TOKENS)
    return compared(
        SUITE,
        f"bind {name}, P2 to D4, one rank",
        _timed(bind, 10 * repeats),
        "budget of 1 ms",
        [BIND_GOAL_S],
        goal=1.0 if name == LONG_MODEL else None,
        note=f"{TOKENS} tokens, {bind()} descriptors",
    )


def _long_rows(spec: ModelSpec, layouts: list[Layout], repeats: int) -> Iterator[Row]:
    """Bind a very long prompt, and note the most memory that it takes."""
    bind = _binding(layouts, LONG_TOKENS)
    name = f"bind {LONG_MODEL}, P2 to D4, one rank"
    note = f"{LONG_TOKENS} tokens, {bind()} descriptors"
    seconds = _timed(bind, 10 * repeats)
    tracemalloc.start()
    bind()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    note += f", {peak_bytes / 1e6:.1f} MB at most"
    budget = [LONG_GOAL_S]
    yield compared(SUITE, name, seconds, "budget of 20 ms", budget, goal=1.0, note=note)


def _binding(layouts: list[Layout], prompt_tokens: int) -> Callable[[], int]:
    """Return a call that binds one rank's rows from one source and counts the descriptors."""
    source, destination = layouts
    program = compile_programs(make_plan(source, destination), Strategy.SLICES)[0]
    rows = program.rows(READ_PAGES, program.src_ranks[0])
    blocks = -(-prompt_tokens // PAGE_TOKENS)
    rng = np.random.default_rng(0)
    groups = {region.group: region.page_tokens for region in source.ranks[0].regions}
    ids = [
        Blocks(
            {
                group: rng.permutation(4 * blocks)[:blocks] if page_tokens else np.array([3])
                for group, page_tokens in groups.items()
            }
        )
        for _ in range(2)
    ]
    src, dst = (_memory(layout, 4 * blocks) for layout in layouts)
    tokens = TokenRange(0, prompt_tokens)
    reads = Reads.of(rows, program.group_pairs, src, dst)

    def bind() -> int:
        return len(reads.bind(ids[0], ids[1], tokens).src_address)

    return bind


def _memory(layout: Layout, pages: int) -> RegionTable:
    regions = layout.ranks[0].regions
    strides = np.array([region.page_stride_bytes for region in regions], np.int64)
    ends = np.cumsum(strides * pages)
    return RegionTable(ends - strides * pages + (1 << 20), strides, np.full_like(strides, pages))


def _timed(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of each call, after a first call that does not count."""
    call()
    seconds = []
    for _ in range(repeats):
        begun_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun_s)
    return seconds
