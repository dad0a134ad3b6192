"""Descriptors of reads: their order, what is joined, and page lists that do not fit."""

from __future__ import annotations

import time

import numpy as np
import pytest

from restow.agents.binding.copies import bind_copies
from restow.agents.binding.operands import SRC, in_order, paged
from restow.agents.binding.pages import Blocks, RegionTable, TokenRange, staged_bytes
from restow.agents.binding.reads import Descriptors, Reads
from restow.broker.errors import PageCountError, PageRangeError
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    KvOrder,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Layout
from restow.broker.planner import Program, Strategy, compile_programs, make_plan
from restow.broker.planner.program import GATHER_IN_ORDER, READ_PAGES

BF16, F32 = DType.BFLOAT16, DType.FLOAT32
PAGE = 4
KV = ModelSpec("m", (AttentionSpec(0, 2, 8, BF16), AttentionSpec(1, 2, 8, BF16)))


def program(source: Layout, destination: Layout, strategy: Strategy = Strategy.SLICES) -> Program:
    return compile_programs(make_plan(source, destination), strategy)[0]


def memory(layout: Layout, pages: int, rank: int = 0, gap_bytes: int = 0) -> RegionTable:
    """Return the regions of a rank, laid one behind the other."""
    strides = np.array([r.page_stride_bytes for r in layout.ranks[rank].regions], np.int64)
    sizes = strides * pages + gap_bytes
    return RegionTable(4096 + np.cumsum(sizes) - sizes, strides, np.full(len(strides), pages))


def blocks(*ids: int, state: int = 0) -> Blocks:
    return Blocks({"attention": np.array(ids, np.int64), "state": np.array([state], np.int64)})


def bind(src_ids: tuple[int, ...], dst_ids: tuple[int, ...], tokens: TokenRange) -> Descriptors:
    layout = build_layout(KV, EngineSettings(page_tokens=PAGE))
    made = program(layout, layout)
    tables = memory(layout, 8), memory(layout, 8)
    laid = Reads.of(made.rows(READ_PAGES), made.group_pairs, *tables)
    return laid.bind(blocks(*src_ids), blocks(*dst_ids), tokens)


def test_heads_of_a_page_and_pages_that_follow_are_one_read_in_each_region() -> None:
    read = bind((3, 4, 5), (1, 2, 3), TokenRange(0, 3 * PAGE))
    page = 2 * PAGE * 2 * 8 * 2
    assert read.length_bytes.tolist() == [3 * page, 3 * page]
    assert read.dst_address.tolist() == [4096 + page, 4096 + 8 * page + page]


def test_pages_that_follow_on_one_side_only_stay_apart() -> None:
    assert len(bind((3, 4, 5), (1, 3, 2), TokenRange(0, 3 * PAGE)).length_bytes) == 6
    assert len(bind((3, 5, 4), (1, 2, 3), TokenRange(0, 3 * PAGE)).length_bytes) == 6


def test_a_read_never_goes_from_one_region_into_the_next() -> None:
    # The last page of one region and the first of the next lie side by side, on both sides.
    spec = ModelSpec("m", tuple(Mamba2Spec(i, 2, 2, 2, 1, 4, BF16, BF16) for i in range(3)))
    layout = build_layout(spec, EngineSettings())
    made = program(layout, layout)
    table = memory(layout, 1)
    sizes = table.page_stride_bytes
    assert (np.diff(table.base_address) == sizes[:-1]).all()
    laid = Reads.of(made.rows(READ_PAGES), made.group_pairs, table, table)
    read = laid.bind(blocks(), blocks(), TokenRange(0, 1))
    assert read.length_bytes.tolist() == sizes.tolist()


def test_the_order_is_region_page_place() -> None:
    source = build_layout(KV, EngineSettings(page_tokens=PAGE))
    destination = build_layout(KV, EngineSettings(page_tokens=PAGE, kv_order=KvOrder.NHD))
    made = program(source, destination)
    tables = memory(source, 8), memory(destination, 8)
    laid = Reads.of(made.rows(READ_PAGES), made.group_pairs, *tables)
    read = laid.bind(blocks(6, 2), blocks(1, 2), TokenRange(0, 2 * PAGE))
    assert (np.diff(read.dst_address) > 0).all()


def test_no_tokens_move_only_snapshots() -> None:
    read = bind((1,), (1,), TokenRange(3, 3))
    assert read.length_bytes.tolist() == []
    layout = build_layout(KV, EngineSettings(page_tokens=PAGE))
    made = program(layout, layout, Strategy.PACK)
    assert staged_bytes(made.rows(GATHER_IN_ORDER), made.group_pairs, TokenRange(3, 3)) == 0
    nothing = made.rows(GATHER_IN_ORDER)[:0]
    assert staged_bytes(nothing, made.group_pairs, TokenRange(0, 3)) == 0
    pages = paged(memory(layout, 8), SRC, blocks(1))
    run = in_order(nothing, made.group_pairs, TokenRange(0, 3), 64)
    copies = bind_copies(nothing, made.group_pairs, pages, run, TokenRange(0, 3))
    assert len(copies) == 0


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("page", [8, -1, 2**31 - 1])
def test_a_page_outside_of_the_memory_is_refused(side: str, page: int) -> None:
    wrong, right = (1, page), (1, 2)
    src_ids, dst_ids = (wrong, right) if side == "source" else (right, wrong)
    with pytest.raises(PageRangeError, match=f"{side} page {page}") as caught:
        bind(src_ids, dst_ids, TokenRange(0, 2 * PAGE))
    assert caught.value.status == "OUT_OF_RANGE"
    assert caught.value.subject == {"side": side, "page": str(page), "range": "[0, 8)"}


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(PageCountError, match="do not hold 9"):
        bind((1, 2, 3), (1, 2), TokenRange(0, 9))
    with pytest.raises(PageCountError, match="do not hold 9"):
        bind((1, 2), (1, 2, 3), TokenRange(0, 9))


def test_a_snapshot_needs_exactly_one_block() -> None:
    spec = ModelSpec("m", (Mamba2Spec(0, 2, 2, 2, 1, 4, BF16, BF16),))
    layout = build_layout(spec, EngineSettings())
    made = program(layout, layout)
    table = memory(layout, 4)
    laid = Reads.of(made.rows(READ_PAGES), made.group_pairs, table, table)
    for ids in ([], [1, 2]):
        some = Blocks({"state": np.array(ids, np.int64)})
        with pytest.raises(PageCountError, match="exactly one block"):
            laid.bind(some, some, TokenRange(0, 1))
    with pytest.raises(PageCountError, match="no blocks are given for group state"):
        laid.bind(Blocks({}), Blocks({}), TokenRange(0, 1))


def test_thousands_of_descriptors_are_bound_in_a_moment() -> None:
    # The sizes are Nemotron 3 Nano's, TP 2 to 4, 16,384 tokens: 6,236 descriptors
    # (docs/benchmarks.md).
    layers = [
        AttentionSpec(i, 2, 128, BF16)
        if i in (5, 12, 19, 22, 25, 28)
        else Mamba2Spec(i, 64, 64, 128, 8, 4, BF16, F32)
        for i in range(29)
    ]
    source, destination = (
        build_layout(
            ModelSpec("nano", tuple(layers)), EngineSettings(tp=tp, conv_layout=ConvLayout.DS)
        )
        for tp in (2, 4)
    )
    made = program(source, destination)
    rows = made.rows(READ_PAGES, 0)
    rng = np.random.default_rng(0)
    some, others = (blocks(*(rng.permutation(2000)[:1024]), state=5) for _ in range(2))
    reads = Reads.of(rows, made.group_pairs, memory(source, 2000), memory(destination, 2000))
    times = []
    for _ in range(20):
        began = time.perf_counter()
        read = reads.bind(some, others, TokenRange(0, 16384))
        times.append(time.perf_counter() - began)
    assert 6_100 < len(read.length_bytes) <= 6_236
    assert min(times) < 0.005
