"""Hostile sizes cost `check_layout` neither memory nor time, and large good layouts little."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest

from layout.test_check import X, with_rank, with_shard
from restow.broker.errors import LayoutError, LayoutFormError, LayoutStrideError
from restow.broker.families import EngineSettings, Mamba2Spec, ModelSpec, build_layout
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
from restow.broker.layout.values import MAX_GROUPS, MAX_RANKS, MAX_SHARDS
from restow.broker.rpc import wire
from restow.v1 import layout_pb2


def one_field(
    shape: tuple[int, ...],
    boxes: list[tuple[Span, ...]],
    strides: tuple[int, ...],
    page: int = 1 << 36,
    page_tokens: int | None = None,
) -> Layout:
    """Return a layout with a rank for each box, with the same strides in a region of its own."""
    kind = Kind.SNAPSHOT if page_tokens is None else Kind.PER_TOKEN
    axes = tuple(f"axis{index}" for index in range(len(shape)))
    token_stride = None if page_tokens is None else 1
    return Layout(
        Model("m", (Field("f", kind, axes, shape),)),
        tuple(
            RankLayout(
                rank,
                (Region("r", "g", page, page_tokens),),
                (Shard("f", box, DType.UINT8, "r", 0, strides, token_stride),),
            )
            for rank, box in enumerate(boxes)
        ),
    )


HUGE = 10**30
HOSTILE: dict[str, Callable[[], Layout]] = {
    "huge shape": lambda: one_field((HUGE,), [(Span(0, HUGE),)], (1,)),
    "huge hole": lambda: one_field((1 << 40,), [(Span(0, 4),)], (1,)),
    "huge stride": lambda: one_field((2,), [(Span(0, 2),)], (HUGE,)),
    "huge stride of one element": lambda: one_field((1,), [(Span(0, 1),)], (HUGE,)),
    "huge page": lambda: one_field((1,), [(Span(0, 1),)], (1,), page=HUGE),
    "huge pages of tokens": lambda: one_field((1,), [(Span(0, 1),)], (1,), page_tokens=HUGE),
    "many pieces": lambda: one_field((1 << 30, 2), [(Span(0, 1 << 30), Span(0, 2))], (3, 1)),
    "many axes": lambda: one_field((1,) * 10_000, [(Span(0, 1),) * 10_000], (1,) * 10_000),
    "many ranks": lambda: one_field((5000,), [(Span(r, r + 1),) for r in range(5000)], (1,)),
    "a hole among many boxes": lambda: one_field(
        (1000, 1000), [(Span(r, r + 1), Span(r, r + 1)) for r in range(1000)], (1, 1)
    ),
    "many boxes of one rank": lambda: _many_boxes(5000),
    "many regions": lambda: with_rank(
        0, regions=tuple(Region(f"r{i}", "g", 1, None) for i in range(MAX_SHARDS + 1))
    ),
    "many groups": lambda: with_rank(
        0, regions=tuple(Region(f"r{i}", f"g{i}", 1 << 20, None) for i in range(MAX_GROUPS + 1))
    ),
    "huge rank": lambda: with_rank(0, rank=HUGE),
    "huge offset": lambda: with_shard(0, X, offset_bytes=HUGE),
    "huge box": lambda: with_shard(0, X, box=(Span(0, HUGE), Span(0, 3))),
}


def _many_boxes(count: int) -> Layout:
    shards = tuple(
        Shard("f", (Span(i, i + 1),), DType.UINT8, "r", i, (1,), None) for i in range(count)
    )
    field = Field("f", Kind.SNAPSHOT, ("dim",), (count,))
    rank = RankLayout(0, (Region("r", "g", count, None),), shards)
    return Layout(Model("m", (field,)), (rank,))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_sizes_cost_neither_memory_nor_time(name: str) -> None:
    layout = HOSTILE[name]()
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(LayoutError):
            check_layout(layout)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 20
    assert peak_bytes < 400e6


def test_many_good_ranks_are_checked_quickly() -> None:
    # The layout has 1,024 ranks of a model with 32 groups: replicas and slices.
    spec = Mamba2Spec(0, 1024, 1, 2, 32, 4, DType.BFLOAT16, DType.FLOAT32)
    layout = build_layout(ModelSpec("m", (spec,)), EngineSettings(tp=1024))
    began = time.process_time()
    check_layout(layout)
    assert time.process_time() - began < 5


def test_fields_without_axes_and_ranks_without_shards() -> None:
    check_layout(one_field((), [()], ()))
    empty = RankLayout(7, (), ())
    good = one_field((2,), [(Span(0, 2),)], (1,))
    check_layout(replace(good, ranks=(*good.ranks, empty)))


def test_a_field_without_axes_outside_of_its_page() -> None:
    layout = one_field((), [()], (), page=4)
    (rank,) = layout.ranks
    shard = replace(rank.shards[0], offset_bytes=4)
    with pytest.raises(LayoutStrideError):
        check_layout(replace(layout, ranks=(replace(rank, shards=(shard,)),)))


def _message(**more: int) -> layout_pb2.Layout:
    """Return a message with more of some parts than Restow looks at."""
    message = wire.layout_to_proto(one_field((2,), [(Span(0, 2),)], (1,)))
    for name, count in more.items():
        owner, _, part = name.partition("_")
        owners = {"layout": message, "model": message.model, "rank": message.ranks[0]}
        parts = getattr(owners[owner], part)
        first = parts.add() if not parts else parts[0]
        parts.extend([first] * count)
    return message


@pytest.mark.parametrize(
    "more",
    [
        {"layout_ranks": MAX_RANKS},
        {"model_fields": MAX_SHARDS},
        {"model_inputs": MAX_SHARDS},
        {"rank_regions": MAX_SHARDS},
        {"rank_shards": MAX_SHARDS},
        {"rank_scratch": MAX_SHARDS},
        {"rank_inputs": MAX_SHARDS},
        {"rank_projections": MAX_SHARDS},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_message_of_too_many_parts_is_refused_before_anything_is_made_of_them(
    more: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_value", None)
    with pytest.raises(LayoutFormError, match=r"are allowed$"):
        wire.layout_from_proto(_message(**more))


def test_a_box_of_too_many_ranges_is_refused_before_anything_is_made_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = _message()
    message.ranks[0].shards[0].box.extend([layout_pb2.Span(stop=1)] * 1000)
    monkeypatch.setattr(wire, "Span", None)
    with pytest.raises(LayoutFormError, match=r"1001 ranges; at most 16"):
        wire.layout_from_proto(message)
