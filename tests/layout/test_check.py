"""What `check_layout` refuses, and that each refusal names field, axis, ranks and range."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from restow.broker.errors import (
    LayoutError,
    LayoutFormError,
    LayoutHoleError,
    LayoutMemoryError,
    LayoutOverlapError,
    LayoutStrideError,
    RanksDisagreeError,
)
from restow.broker.families import (
    AttentionSpec,
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
    Region,
    Scratch,
    Shard,
    Span,
    check_layout,
)

MODEL = ModelSpec(
    "m",
    (
        Mamba2Spec(0, 8, 2, 4, 2, 4, DType.BFLOAT16, DType.FLOAT32),
        AttentionSpec(1, 4, 4, DType.BFLOAT16),
    ),
)
GOOD = build_layout(MODEL, EngineSettings(tp=4, page_align_bytes=32))
KEPT = build_layout(MODEL, EngineSettings(tp=4, page_align_bytes=32, whole_blocks=True))
SIZE = GOOD.ranks[0].regions[0].page_stride_bytes
X, B, C, SSM, K, V = range(6)
"""Where the shards of a rank are in its list."""


def with_shard(rank: int, index: int, **changes: Any) -> Layout:
    """Return the good layout with one shard changed."""
    shards = list(GOOD.ranks[rank].shards)
    shards[index] = replace(shards[index], **changes)
    return with_rank(rank, shards=tuple(shards))


def with_rank(index: int, **changes: Any) -> Layout:
    ranks = list(GOOD.ranks)
    ranks[index] = replace(ranks[index], **changes)
    return replace(GOOD, ranks=tuple(ranks))


def with_region(rank: int, index: int, **changes: Any) -> Layout:
    regions = list(GOOD.ranks[rank].regions)
    regions[index] = replace(regions[index], **changes)
    return with_rank(rank, regions=tuple(regions))


def without_shard(rank: int, index: int) -> Layout:
    shards = GOOD.ranks[rank].shards
    return with_rank(rank, shards=shards[:index] + shards[index + 1 :])


def with_field(index: int, **changes: Any) -> Layout:
    fields = list(GOOD.model.fields)
    fields[index] = replace(fields[index], **changes)
    return replace(GOOD, model=replace(GOOD.model, fields=tuple(fields)))


def shard(rank: int, index: int) -> Shard:
    return GOOD.ranks[rank].shards[index]


def with_scratch(**changes: Any) -> Layout:
    """Return the good layout with two bytes of scratch, changed, behind the state of rank 1."""
    good = Scratch("layers.0.mamba", DType.BFLOAT16, SIZE - 2, (1, 1), (2, 2))
    return with_rank(1, scratch=(replace(good, **changes),))


REFUSED: dict[str, tuple[Layout, type[LayoutError], dict[str, str]]] = {
    "hole": (
        without_shard(2, SSM),
        LayoutHoleError,
        {"field": "layers.0.ssm", "axis": "head", "ranks": "0,1,3", "range": "[4, 6)"},
    ),
    "hole in the second axis": (
        with_shard(1, X, box=(Span(4, 8), Span(0, 2))),
        LayoutHoleError,
        {"field": "layers.0.conv.x", "axis": "channel", "range": "[4, 8)"},
    ),
    "nobody holds a field": (
        replace(
            GOOD,
            model=replace(
                GOOD.model,
                fields=(*GOOD.model.fields, Field("more", Kind.SNAPSHOT, ("dim",), (8,))),
            ),
        ),
        LayoutHoleError,
        {"field": "more", "axis": "dim", "ranks": "0,1,2,3", "range": "[0, 8)"},
    ),
    "overlap that is no replica": (
        with_shard(1, X, box=(Span(3, 7), Span(0, 3))),
        LayoutOverlapError,
        {"field": "layers.0.conv.x", "axis": "channel", "ranks": "0,1", "range": "[3, 4) x [0, 3)"},
    ),
    "a box twice on a rank": (
        with_rank(
            0,
            shards=(*GOOD.ranks[0].shards, replace(shard(0, SSM), region="more")),
            regions=(*GOOD.ranks[0].regions, Region("more", "state", 4096, None)),
        ),
        LayoutOverlapError,
        {"field": "layers.0.ssm", "ranks": "0", "range": "[0, 2) x [0, 2) x [0, 4)"},
    ),
    "shared memory": (
        with_shard(3, C, offset_bytes=shard(3, B).offset_bytes + 2),
        LayoutMemoryError,
        {"field": "layers.0.conv.C", "other_field": "layers.0.conv.B", "ranks": "3"},
    ),
    "negative stride": (
        with_shard(0, SSM, strides_bytes=(32, -16, 4)),
        LayoutStrideError,
        {"field": "layers.0.ssm", "axis": "dim", "ranks": "0"},
    ),
    "zero stride": (
        with_shard(0, SSM, strides_bytes=(32, 16, 0)),
        LayoutStrideError,
        {"field": "layers.0.ssm", "axis": "state", "ranks": "0"},
    ),
    "folding stride": (
        with_shard(1, SSM, strides_bytes=(32, 8, 4)),
        LayoutStrideError,
        {"field": "layers.0.ssm", "axis": "dim", "ranks": "1"},
    ),
    "folding token stride": (
        with_shard(1, K, token_stride_bytes=6),
        LayoutStrideError,
        {"field": "layers.1.k", "axis": "token", "ranks": "1"},
    ),
    "stride that leaves the page": (
        with_shard(1, SSM, strides_bytes=(3200, 16, 4)),
        LayoutStrideError,
        {"field": "layers.0.ssm", "axis": "head", "ranks": "1", "region": "layers.0.mamba"},
    ),
    "offset before the page": (
        with_shard(1, X, offset_bytes=-2),
        LayoutStrideError,
        {"field": "layers.0.conv.x", "ranks": "1"},
    ),
    "box out of the shape": (
        with_shard(3, X, box=(Span(13, 17), Span(0, 3))),
        LayoutFormError,
        {"field": "layers.0.conv.x", "axis": "channel", "ranks": "3", "range": "[13, 17)"},
    ),
    "box of other axes": (
        with_shard(3, X, box=(Span(12, 16),)),
        LayoutFormError,
        {"field": "layers.0.conv.x", "ranks": "3"},
    ),
    "dtypes disagree": (
        with_shard(2, K, dtype=DType.FLOAT16),
        RanksDisagreeError,
        {"field": "layers.1.k", "ranks": "0,2"},
    ),
    "page tokens disagree": (
        with_region(3, 1, page_tokens=8),
        RanksDisagreeError,
        {"group": "attention", "region": "layers.1.kv", "ranks": "0,3"},
    ),
    "pages of a block disagree": (
        with_region(3, 1, pages_per_block=2),
        RanksDisagreeError,
        {"group": "attention", "ranks": "0,3"},
    ),
    "null blocks disagree": (
        with_region(3, 1, null_block=0),
        RanksDisagreeError,
        {"group": "attention", "ranks": "0,3"},
    ),
    "whole blocks disagree": (
        with_region(3, 1, whole_blocks=True),
        RanksDisagreeError,
        {"group": "attention", "ranks": "0,3"},
    ),
    "whole blocks of snapshots": (
        with_region(0, 0, whole_blocks=True),
        LayoutFormError,
        {"ranks": "0", "region": "layers.0.mamba"},
    ),
    "whole blocks of several windows": (
        replace(KEPT, model=with_field(K, window_tokens=9).model),
        LayoutFormError,
        {"group": "attention", "field": "layers.1.v"},
    ),
    "a null block that is no id": (
        with_region(0, 1, null_block=-1),
        LayoutFormError,
        {"ranks": "0", "region": "layers.1.kv"},
    ),
    "a null block of weights": (
        with_region(0, 0, group="", null_block=0),
        LayoutFormError,
        {"ranks": "0", "region": "layers.0.mamba"},
    ),
    "unknown region": (
        with_shard(1, X, region="nowhere"),
        LayoutFormError,
        {"field": "layers.0.conv.x", "region": "nowhere", "ranks": "1"},
    ),
    "unknown field": (
        with_shard(1, X, field="layers.9.conv.x"),
        LayoutFormError,
        {"field": "layers.9.conv.x", "ranks": "1"},
    ),
    "field twice": (
        replace(GOOD, model=replace(GOOD.model, fields=(GOOD.model.fields * 2))),
        LayoutFormError,
        {"field": "layers.0.conv.x"},
    ),
    "rank twice": (with_rank(1, rank=0), LayoutFormError, {"ranks": "0"}),
    "region twice": (
        with_rank(2, regions=GOOD.ranks[2].regions * 2),
        LayoutFormError,
        {"ranks": "2", "region": "layers.0.mamba"},
    ),
    "axis twice": (
        with_field(0, axes=("tap", "tap")),
        LayoutFormError,
        {"field": "layers.0.conv.x", "axis": "tap"},
    ),
    "axes and shape": (with_field(0, axes=("tap",)), LayoutFormError, {"field": "layers.0.conv.x"}),
    "empty axis": (
        with_field(0, shape=(0, 3)),
        LayoutFormError,
        {"field": "layers.0.conv.x", "axis": "channel"},
    ),
    "token stride of a snapshot": (
        with_shard(0, X, token_stride_bytes=8),
        LayoutFormError,
        {"field": "layers.0.conv.x", "axis": "token", "ranks": "0"},
    ),
    "no token stride": (
        with_shard(0, K, token_stride_bytes=None),
        LayoutFormError,
        {"field": "layers.1.k", "axis": "token", "ranks": "0"},
    ),
    "snapshot in a region of tokens": (
        with_shard(0, X, region="layers.1.kv"),
        LayoutFormError,
        {"field": "layers.0.conv.x", "ranks": "0", "region": "layers.1.kv"},
    ),
    "snapshot in a block of many pages": (
        with_region(0, 0, pages_per_block=2),
        LayoutFormError,
        {"ranks": "0", "region": "layers.0.mamba"},
    ),
    "pages of more tokens than are counted": (
        with_region(0, 1, page_tokens=2**31),
        LayoutFormError,
        {"ranks": "0", "region": "layers.1.kv"},
    ),
    "window of more tokens than are counted": (
        with_field(K, window_tokens=2**31),
        LayoutFormError,
        {"field": "layers.1.k"},
    ),
    "page of no bytes": (
        with_region(0, 0, page_stride_bytes=0),
        LayoutFormError,
        {"ranks": "0", "region": "layers.0.mamba"},
    ),
    "scratch memory nowhere": (
        with_scratch(region="nowhere"),
        LayoutFormError,
        {"region": "nowhere", "ranks": "1"},
    ),
    "scratch memory among tokens": (
        with_scratch(region="layers.1.kv"),
        LayoutFormError,
        {"region": "layers.1.kv", "ranks": "1"},
    ),
    "scratch memory of no size": (
        with_scratch(sizes=(1, 0)),
        LayoutFormError,
        {"region": "layers.0.mamba", "ranks": "1"},
    ),
    "scratch memory with a stride too few": (
        with_scratch(strides_bytes=(2,)),
        LayoutFormError,
        {"region": "layers.0.mamba", "ranks": "1"},
    ),
    "scratch memory behind the page": (
        with_scratch(offset_bytes=SIZE - 1),
        LayoutStrideError,
        {"region": "layers.0.mamba", "ranks": "1"},
    ),
    "scratch memory that folds": (
        with_scratch(offset_bytes=0, sizes=(2, 2), strides_bytes=(2, 2)),
        LayoutStrideError,
        {"ranks": "1"},
    ),
    "scratch memory over state": (
        with_scratch(offset_bytes=SIZE - 26),
        LayoutMemoryError,
        {"region": "layers.0.mamba", "ranks": "1"},
    ),
    "negative rank": (with_rank(0, rank=-1), LayoutFormError, {"ranks": "-1"}),
    "no ranks": (replace(GOOD, ranks=()), LayoutFormError, {}),
    "no fields": (replace(GOOD, model=Model("m", ())), LayoutFormError, {}),
}


def test_the_good_layout_is_good() -> None:
    check_layout(GOOD)
    check_layout(with_scratch())


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    layout, error, subject = REFUSED[name]
    with pytest.raises(error) as caught:
        check_layout(layout)
    assert type(caught.value) is error
    assert caught.value.status == "INVALID_ARGUMENT"
    assert subject.items() <= caught.value.subject.items()
    for value in subject.values():
        if value:
            assert value in caught.value.message or "," in value


def test_reasons_are_unique_and_stable() -> None:
    assert {error.__name__: error.reason for _, error, _ in REFUSED.values()} == {
        "LayoutFormError": "LAYOUT_MALFORMED",
        "LayoutHoleError": "LAYOUT_HOLE",
        "LayoutMemoryError": "LAYOUT_MEMORY_SHARED",
        "LayoutOverlapError": "LAYOUT_OVERLAP",
        "LayoutStrideError": "LAYOUT_STRIDE",
        "RanksDisagreeError": "LAYOUT_RANKS_DISAGREE",
    }
