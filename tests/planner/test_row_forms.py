"""The rows that moves become: of elements or of bytes, by window, and how many there may be."""

from __future__ import annotations

import pytest

from restow.broker.errors import TooManyPiecesError
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
    check_layout,
)
from restow.broker.planner import Strategy, compile_programs, make_plan, table
from restow.broker.planner.program import GATHER_IN_ORDER, READ_PAGES, Column

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
