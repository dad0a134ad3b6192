"""The rows that moves become: of elements or of bytes, in spans or zeroed; and how many at most."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from restow.broker.errors import TooManyPiecesError
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import (
    DType,
    Field,
    Kind,
    Layout,
    Model,
    RankLayout,
    Region,
    Scratch,
    Shard,
    Span,
    check_layout,
)
from restow.broker.planner import Strategy, compile_programs, make_plan, table
from restow.broker.planner.compile import cleared_rows
from restow.broker.planner.program import (
    CLEAR_PAGES,
    GATHER_IN_ORDER,
    READ_PAGES,
    Column,
    GroupPair,
    PageForm,
)
from restow.broker.planner.ways import SPAN_ALIGN_BYTES, Spans

BF16 = DType.BFLOAT16


@pytest.mark.parametrize(
    ("token_stride", "page_stride", "dtype", "count"),
    [(12, 64, BF16, 3), (13, 64, DType.UINT8, 2), (12, 65, DType.UINT8, 2)],
)
def test_strided_elements_are_bytes_where_tokens_or_pages_begin_askew(
    token_stride: int, page_stride: int, dtype: DType, count: int
) -> None:
    # Three elements lie two apart, and are aligned unless another token or page begins askew.
    source, destination = (
        tokens_of_three(4, token_stride, page_stride),
        tokens_of_three(4, 12, 64),
    )
    for pair in ((source, destination), (destination, source)):
        (program,) = compile_programs(make_plan(*pair), Strategy.PACK)
        assert set(program.rows(GATHER_IN_ORDER)[:, Column.SRC_DTYPE]) == {dtype}
        assert set(program.rows(GATHER_IN_ORDER)[:, Column.COUNT]) == {count}


def tokens_of_three(step: int, token_stride: int, page_stride: int) -> Layout:
    """Return a layout of one rank with a field of three elements a token, four tokens a page."""
    region = Region("r", "g", page_stride, 4)
    shard = Shard("f", (Span(0, 3),), BF16, "r", 0, (step,), token_stride)
    field = Field("f", Kind.PER_TOKEN, ("dim",), (3,))
    layout = Layout(Model("m", (field,)), (RankLayout(0, (region,), (shard,)),))
    check_layout(layout)
    return layout


def test_windows_of_two_sizes_may_share_a_list_of_pages() -> None:
    shards = tuple(
        Shard(name, (), BF16, "r", offset, (), 4) for name, offset in (("near", 0), ("far", 2))
    )
    fields = tuple(
        Field(name, Kind.PER_TOKEN, (), (), window) for name, window in (("near", 2), ("far", 5))
    )
    layout = Layout(Model("m", fields), (RankLayout(0, (Region("r", "g", 16, 4),), shards),))
    check_layout(layout)
    (program,) = compile_programs(make_plan(layout, layout), Strategy.SLICES)
    moved = {
        int(row[Column.SRC_OFFSET_BYTES]): program.group_pairs[row[Column.GROUP_PAIR]].window_tokens
        for row in program.rows(READ_PAGES)
    }
    assert moved == {0: 2, 2: 5}


def three_apart_on_each_of_two_ranks() -> tuple[Layout, Layout]:
    """Return layouts of six elements, of which no two are neighbours on both sides."""

    def layout(ranks: int, step: int) -> Layout:
        size = 6 // ranks
        made = tuple(
            RankLayout(
                rank,
                (Region("r", "g", 64, None),),
                (Shard("f", (Span(rank * size, (rank + 1) * size),), BF16, "r", 0, (step,)),),
            )
            for rank in range(ranks)
        )
        return Layout(Model("m", (Field("f", Kind.SNAPSHOT, ("dim",), (6,)),)), made)

    # Strides that are no multiples of the size make every element a piece.
    return layout(1, 3), layout(2, 5)


@pytest.mark.parametrize(("most", "fits"), [(6, True), (5, False)])
def test_the_pieces_of_all_ranks_together_are_bounded(
    monkeypatch: pytest.MonkeyPatch, most: int, fits: bool
) -> None:
    monkeypatch.setattr(table, "MAX_ROWS", most)
    plan = make_plan(*three_apart_on_each_of_two_ranks())
    if fits:
        assert len(compile_programs(plan, Strategy.PACK)) == 2
        return
    with pytest.raises(TooManyPiecesError, match="the plan falls into more than 5 pieces"):
        compile_programs(plan, Strategy.PACK)


PAIRS = (
    GroupPair(PageForm("state", 0, 1), PageForm("state", 0, 1)),
    GroupPair(PageForm("kv", 4, 1), PageForm("kv", 8, 1)),
)


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    rows = np.zeros((draw(st.integers(0, 12)), len(Column)), np.int64)
    for row in rows:
        row[Column.SRC_RANK] = draw(st.integers(0, 2))
        row[Column.GROUP_PAIR] = draw(st.integers(0, 1))
        row[Column.SRC_REGION] = draw(st.integers(0, 1))
        row[Column.SRC_OFFSET_BYTES] = 4 * draw(st.integers(0, 100))
        row[Column.COUNT] = draw(st.integers(1, 9))
        row[Column.SRC_STEP_BYTES] = draw(st.sampled_from([4, 8]))
        row[Column.SRC_TOKEN_STRIDE_BYTES] = 4 * draw(st.integers(1, 5))
        row[[Column.SRC_DTYPE, Column.DST_DTYPE]] = DType.FLOAT32
    return rows


@settings(max_examples=300, derandomize=True)
@given(tables(), st.none() | st.integers(0, 200))
def test_spans(
    rows: np.ndarray[tuple[int, int], np.dtype[np.int64]], max_gap_bytes: int | None
) -> None:
    spans = Spans.of(rows, PAIRS, max_gap_bytes)
    needed: dict[int, set[int]] = {number: set() for number in range(len(spans.table))}
    runs: dict[int, list[tuple[int, int]]] = {number: [] for number in needed}
    for row, number in zip(rows, spans.span_of, strict=True):
        span = spans.table[number]
        for column in (Column.SRC_RANK, Column.GROUP_PAIR, Column.SRC_REGION):
            assert span[column] == row[column]
        tokens = max(PAIRS[row[Column.GROUP_PAIR]].src.page_tokens, 1)
        last = row[Column.SRC_OFFSET_BYTES] + (tokens - 1) * row[Column.SRC_TOKEN_STRIDE_BYTES]
        last += (row[Column.COUNT] - 1) * row[Column.SRC_STEP_BYTES] + 4
        needed[int(number)] |= {int(row[Column.SRC_OFFSET_BYTES]), int(last)}
        begin = int(row[Column.SRC_OFFSET_BYTES]) // SPAN_ALIGN_BYTES * SPAN_ALIGN_BYTES
        runs[int(number)].append((begin, int(last)))
    pages: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for number, span in enumerate(spans.table):
        begin = int(span[Column.SRC_OFFSET_BYTES])
        end = begin + int(span[Column.COUNT])
        assert begin % SPAN_ALIGN_BYTES == 0
        assert begin == min(needed[number]) // SPAN_ALIGN_BYTES * SPAN_ALIGN_BYTES
        assert end == max(needed[number])
        pages.setdefault(tuple(span[:3]), []).append((begin, end))
    for inside in runs.values():
        reached = min(begin for begin, _ in inside)
        for begin, last in sorted(inside):
            # Wherever the gap is too long the span should have ended, whatever lies in other pages.
            assert max_gap_bytes is None or begin - reached <= max_gap_bytes
            reached = max(reached, last)
    for found in pages.values():
        assert max_gap_bytes is not None or len(found) == 1
        for (_, end), (begin, _) in pairwise(found):
            assert begin - end > (max_gap_bytes or 0)
    extracted = spans.extracted(rows)
    assert len(extracted) == len(rows)
    assert (np.diff(extracted[:, Column.SRC_REGION]) >= 0).all()
    assert (extracted[:, Column.SRC_OFFSET_BYTES] >= 0).all()


MAMBA = Mamba2Spec(0, 8, 16, 16, 2, 4, DType.BFLOAT16, DType.FLOAT32)
MODEL = ModelSpec("m", (MAMBA, AttentionSpec(1, 4, 8, DType.BFLOAT16), replace(MAMBA, layer=2)))
COLUMNS = 8 * 16 + 2 * 2 * 16
STATES = GroupPair(PageForm("state", 0, 1), PageForm("state", 0, 1))


@pytest.mark.parametrize(
    ("conv", "rows_a_layer", "count", "step_bytes"),
    [
        (ConvLayout.SD, 1, 3 * COLUMNS * 2, 1),
        (ConvLayout.DS, 3, COLUMNS, 12),
    ],
)
def test_rows_of_a_conv_layout(
    conv: ConvLayout, rows_a_layer: int, count: int, step_bytes: int
) -> None:
    source = build_layout(MODEL, EngineSettings())
    settings = EngineSettings(conv_layout=conv, conv_rows_extra=3)
    (program,) = compile_programs(make_plan(source, build_layout(MODEL, settings)))
    assert len(program.rows(CLEAR_PAGES)) == 2 * rows_a_layer
    assert set(program.rows(CLEAR_PAGES)[:, Column.COUNT]) == {count}
    assert set(program.rows(CLEAR_PAGES)[:, Column.DST_STEP_BYTES]) == {step_bytes}


def test_what_p_keeps_for_speculation_is_nothing_to_d() -> None:
    source = build_layout(MODEL, EngineSettings(conv_rows_extra=3))
    (program,) = compile_programs(make_plan(source, build_layout(MODEL, EngineSettings())))
    assert not len(program.rows(CLEAR_PAGES))


def test_elements_that_lie_askew_are_cleared_one_by_one() -> None:
    (rank,) = build_layout(MODEL, EngineSettings()).ranks
    askew = Scratch(rank.regions[0].name, DType.BFLOAT16, 1, (5,), (6,))
    rows = cleared_rows(replace(rank, scratch=(askew,)), (STATES,))
    assert rows[:, Column.DST_OFFSET_BYTES].tolist() == [1, 7, 13, 19, 25]
    assert set(rows[:, Column.COUNT]) == {2}
    assert set(rows[:, Column.DST_DTYPE]) == {DType.UINT8}


def test_two_elements_apart_are_no_run_of_bytes() -> None:
    (rank,) = build_layout(MODEL, EngineSettings()).ranks
    apart = Scratch(rank.regions[0].name, DType.BFLOAT16, 2, (2,), (6,))
    (row,) = cleared_rows(replace(rank, scratch=(apart,)), (STATES,))
    assert (row[Column.COUNT], row[Column.DST_STEP_BYTES]) == (2, 6)
    assert row[Column.DST_DTYPE] == DType.BFLOAT16


def test_elements_are_cleared_one_by_one_where_pages_begin_askew() -> None:
    # Page 0 is aligned, and page 1 is not.
    (rank,) = build_layout(MODEL, EngineSettings()).ranks
    state = replace(rank.regions[0], page_stride_bytes=rank.regions[0].page_stride_bytes + 1)
    straight = Scratch(state.name, DType.BFLOAT16, 2, (5,), (6,))
    askew = replace(rank, regions=(state, *rank.regions[1:]), scratch=(straight,))
    rows = cleared_rows(askew, (STATES,))
    assert rows[:, Column.DST_OFFSET_BYTES].tolist() == [2, 8, 14, 20, 26]
    assert set(rows[:, Column.DST_DTYPE]) == {DType.UINT8}


def test_where_no_state_arrives_nothing_is_cleared() -> None:
    (rank,) = build_layout(MODEL, EngineSettings(conv_rows_extra=1)).ranks
    assert len(cleared_rows(rank, (STATES,))) == 2
    assert not len(cleared_rows(rank, ()))
