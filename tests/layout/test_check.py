"""What check_layout refuses, and that each refusal names field, axis, ranks and range."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from restow.broker.core.common.keys import EngineKey
from restow.broker.core.engines.account import Account, Total
from restow.broker.core.engines.engine import EngineRecord
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
    RankLayout,
    Region,
    Scratch,
    Shard,
    Span,
    check_layout,
    digest,
)
from restow.broker.layout.difference import differences
from restow.broker.layout.json_form import layout_to_json
from restow.broker.rpc.wire import layout_to_proto

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


REFUSED: dict[type[LayoutError], dict[str, tuple[Layout, str]]] = {
    LayoutHoleError: {
        "hole": (without_shard(2, SSM), "field layers.0.ssm; axis head; ranks 0,1,3; range [4, 6)"),
        "hole in the second axis": (
            with_shard(1, X, box=(Span(4, 8), Span(0, 2))),
            "field layers.0.conv.x; axis channel; range [4, 8)",
        ),
        "nobody holds a field": (
            replace(
                GOOD,
                model=replace(
                    GOOD.model,
                    fields=(*GOOD.model.fields, Field("more", Kind.SNAPSHOT, ("dim",), (8,))),
                ),
            ),
            "field more; axis dim; ranks 0,1,2,3; range [0, 8)",
        ),
    },
    LayoutOverlapError: {
        "overlap that is no replica": (
            with_shard(1, X, box=(Span(3, 7), Span(0, 3))),
            "field layers.0.conv.x; axis channel; ranks 0,1; range [3, 4) x [0, 3)",
        ),
        "a box twice on a rank": (
            with_rank(
                0,
                shards=(*GOOD.ranks[0].shards, replace(shard(0, SSM), region="more")),
                regions=(*GOOD.ranks[0].regions, Region("more", "state", 4096, None)),
            ),
            "field layers.0.ssm; ranks 0; range [0, 2) x [0, 2) x [0, 4)",
        ),
    },
    LayoutMemoryError: {
        "shared memory": (
            with_shard(3, C, offset_bytes=shard(3, B).offset_bytes + 2),
            "field layers.0.conv.C; other_field layers.0.conv.B; ranks 3",
        ),
        "scratch memory over state": (
            with_scratch(offset_bytes=SIZE - 26),
            "region layers.0.mamba; ranks 1",
        ),
    },
    LayoutStrideError: {
        "negative stride": (
            with_shard(0, SSM, strides_bytes=(32, -16, 4)),
            "field layers.0.ssm; axis dim; ranks 0",
        ),
        "zero stride": (
            with_shard(0, SSM, strides_bytes=(32, 16, 0)),
            "field layers.0.ssm; axis state; ranks 0",
        ),
        "folding stride": (
            with_shard(1, SSM, strides_bytes=(32, 8, 4)),
            "field layers.0.ssm; axis dim; ranks 1",
        ),
        "folding token stride": (
            with_shard(1, K, token_stride_bytes=6),
            "field layers.1.k; axis token; ranks 1",
        ),
        "stride that leaves the page": (
            with_shard(1, SSM, strides_bytes=(3200, 16, 4)),
            "field layers.0.ssm; axis head; ranks 1; region layers.0.mamba",
        ),
        "offset before the page": (
            with_shard(1, X, offset_bytes=-2),
            "field layers.0.conv.x; ranks 1",
        ),
        "scratch memory behind the page": (
            with_scratch(offset_bytes=SIZE - 1),
            "region layers.0.mamba; ranks 1",
        ),
        "scratch memory that folds": (
            with_scratch(offset_bytes=0, sizes=(2, 2), strides_bytes=(2, 2)),
            "ranks 1",
        ),
    },
    LayoutFormError: {
        "box out of the shape": (
            with_shard(3, X, box=(Span(13, 17), Span(0, 3))),
            "field layers.0.conv.x; axis channel; ranks 3; range [13, 17)",
        ),
        "box of other axes": (
            with_shard(3, X, box=(Span(12, 16),)),
            "field layers.0.conv.x; ranks 3",
        ),
        "whole blocks of snapshots": (
            with_region(0, 0, whole_blocks=True),
            "ranks 0; region layers.0.mamba",
        ),
        "whole blocks of several windows": (
            replace(KEPT, model=with_field(K, window_tokens=9).model),
            "group attention; field layers.1.v",
        ),
        "a null block that is no id": (
            with_region(0, 1, null_block=-1),
            "ranks 0; region layers.1.kv",
        ),
        "a null block of weights": (
            with_region(0, 0, group="", null_block=0),
            "ranks 0; region layers.0.mamba",
        ),
        "unknown region": (
            with_shard(1, X, region="nowhere"),
            "field layers.0.conv.x; region nowhere; ranks 1",
        ),
        "unknown field": (
            with_shard(1, X, field="layers.9.conv.x"),
            "field layers.9.conv.x; ranks 1",
        ),
        "field twice": (
            replace(GOOD, model=replace(GOOD.model, fields=GOOD.model.fields * 2)),
            "field layers.0.conv.x",
        ),
        "rank twice": (with_rank(1, rank=0), "ranks 0"),
        "region twice": (
            with_rank(2, regions=GOOD.ranks[2].regions * 2),
            "ranks 2; region layers.0.mamba",
        ),
        "axis twice": (with_field(0, axes=("tap", "tap")), "field layers.0.conv.x; axis tap"),
        "axes and shape": (with_field(0, axes=("tap",)), "field layers.0.conv.x"),
        "empty axis": (with_field(0, shape=(0, 3)), "field layers.0.conv.x; axis channel"),
        "token stride of a snapshot": (
            with_shard(0, X, token_stride_bytes=8),
            "field layers.0.conv.x; axis token; ranks 0",
        ),
        "no token stride": (
            with_shard(0, K, token_stride_bytes=None),
            "field layers.1.k; axis token; ranks 0",
        ),
        "snapshot in a region of tokens": (
            with_shard(0, X, region="layers.1.kv"),
            "field layers.0.conv.x; ranks 0; region layers.1.kv",
        ),
        "snapshot in a block of many pages": (
            with_region(0, 0, pages_per_block=2),
            "ranks 0; region layers.0.mamba",
        ),
        "pages of more tokens than are counted": (
            with_region(0, 1, page_tokens=2**31),
            "ranks 0; region layers.1.kv",
        ),
        "window of more tokens than are counted": (
            with_field(K, window_tokens=2**31),
            "field layers.1.k",
        ),
        "page of no bytes": (
            with_region(0, 0, page_stride_bytes=0),
            "ranks 0; region layers.0.mamba",
        ),
        "scratch memory nowhere": (with_scratch(region="nowhere"), "region nowhere; ranks 1"),
        "scratch memory among tokens": (
            with_scratch(region="layers.1.kv"),
            "region layers.1.kv; ranks 1",
        ),
        "scratch memory of no size": (with_scratch(sizes=(1, 0)), "region layers.0.mamba; ranks 1"),
        "scratch memory with a stride too few": (
            with_scratch(strides_bytes=(2,)),
            "region layers.0.mamba; ranks 1",
        ),
        "negative rank": (with_rank(0, rank=-1), "ranks -1"),
        "no ranks": (replace(GOOD, ranks=()), ""),
        "no fields": (replace(GOOD, model=Model("m", ())), ""),
    },
    RanksDisagreeError: {
        "dtypes disagree": (with_shard(2, K, dtype=DType.FLOAT16), "field layers.1.k; ranks 0,2"),
        "page tokens disagree": (
            with_region(3, 1, page_tokens=8),
            "group attention; region layers.1.kv; ranks 0,3",
        ),
        "pages of a block disagree": (
            with_region(3, 1, pages_per_block=2),
            "group attention; ranks 0,3",
        ),
        "null blocks disagree": (with_region(3, 1, null_block=0), "group attention; ranks 0,3"),
        "whole blocks disagree": (
            with_region(3, 1, whole_blocks=True),
            "group attention; ranks 0,3",
        ),
    },
}
"""By error: a layout, and what its refusal names."""


def test_the_good_layout_is_good() -> None:
    check_layout(GOOD)
    check_layout(with_scratch())


@pytest.mark.parametrize(
    ("error", "name"), [(error, name) for error, cases in REFUSED.items() for name in cases]
)
def test_refused(error: type[LayoutError], name: str) -> None:
    layout, words = REFUSED[error][name]
    subject = dict(word.split(" ", 1) for word in words.split("; ") if word)
    with pytest.raises(error) as caught:
        check_layout(layout)
    assert type(caught.value) is error
    assert caught.value.status == "INVALID_ARGUMENT"
    assert subject.items() <= caught.value.subject.items()
    for value in subject.values():
        assert value in caught.value.message or "," in value


def test_reasons_are_unique_and_stable() -> None:
    assert {error.__name__: error.reason for error in REFUSED} == {
        "LayoutFormError": "LAYOUT_MALFORMED",
        "LayoutHoleError": "LAYOUT_HOLE",
        "LayoutMemoryError": "LAYOUT_MEMORY_SHARED",
        "LayoutOverlapError": "LAYOUT_OVERLAP",
        "LayoutStrideError": "LAYOUT_STRIDE",
        "RanksDisagreeError": "LAYOUT_RANKS_DISAGREE",
    }


FIELD = Field("layers.0.latent", Kind.PER_TOKEN, ("dim",), (8,))


def shared_out(*parts: int, of: int = 0, run: int = 2) -> Layout:
    """Return a layout of one latent, of which rank ``i`` holds the tokens of part ``parts[i]``."""
    shard = Shard(FIELD.name, (Span(0, 8),), DType.BFLOAT16, "kv", 0, (2,), 16)
    count = of or len(parts)
    ranks = (
        RankLayout(
            number,
            (
                Region(
                    *("kv", "attention", 64, 4),
                    context_parts=count,
                    context_part=part,
                    interleave_tokens=run if count > 1 else 1,
                ),
            ),
            (shard,),
        )
        for number, part in enumerate(parts)
    )
    return Layout(Model("m", (FIELD,)), tuple(ranks))


@pytest.mark.parametrize("parts", [(0,), (0, 1), (1, 0), (2, 0, 1), (0, 1, 0, 1), (0, 1, 1)])
def test_every_part_is_held(parts: tuple[int, ...]) -> None:
    check_layout(shared_out(*parts, of=max(parts) + 1))


def test_a_part_that_no_rank_holds() -> None:
    with pytest.raises(LayoutHoleError, match="no rank holds part 1 of the tokens") as error:
        check_layout(shared_out(0, 2, 2, of=3))
    assert error.value.subject["axis"] == "token"


def changed(layout: Layout, rank: int, **values: Any) -> Layout:
    """Return the layout with other values of a rank's region."""
    ranks = list(layout.ranks)
    region = replace(ranks[rank].regions[0], **values)
    shards = tuple(replace(one, region=region.name) for one in ranks[rank].shards)
    ranks[rank] = replace(ranks[rank], regions=(region,), shards=shards)
    return replace(layout, ranks=tuple(ranks))


def test_ranks_that_cut_tokens_in_different_ways() -> None:
    # In one group the ranks disagree; in two groups some tokens are held twice, some maybe never.
    with pytest.raises(RanksDisagreeError, match="interleave_tokens"):
        check_layout(changed(shared_out(0, 1), 1, interleave_tokens=1))
    with pytest.raises(LayoutOverlapError, match="2 parts by 2 and 2 parts by 1"):
        check_layout(changed(shared_out(0, 1), 1, interleave_tokens=1, group="other"))
    whole = {"context_parts": 1, "context_part": 0, "interleave_tokens": 1}
    with pytest.raises(LayoutOverlapError, match="1 parts by 1"):
        check_layout(changed(shared_out(0, 1), 1, group="other", **whole))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"context_part": 2}, "context_part is 2 of 2"),
        ({"context_part": -1}, "context_part is -1 of 2"),
        ({"context_parts": 0}, "context_part is 1 of 0"),
        ({"context_parts": 1025}, "there are 1 to 1024"),
        ({"interleave_tokens": 3}, "it must divide the 4 tokens"),
        ({"interleave_tokens": 0}, "interleave_tokens is 0"),
        ({"context_parts": 1, "context_part": 0}, "there is only a single part"),
        ({"page_tokens": None}, "only tokens can be divided among ranks"),
    ],
)
def test_numbers_that_make_no_sense(values: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutFormError, match=words):
        check_layout(changed(shared_out(0, 1), 1, **values))


def test_layouts_that_share_nothing_out_are_told_as_ever() -> None:
    """Check that the digest and the message are those from before there were parts."""
    layout = shared_out(0, 0, of=1)
    assert digest(layout) == ("82a459cde980c10d6091e13e1bb142b7e06fe8f8e196673079fe59f21a33f2ab")
    told = layout_to_proto(layout).ranks[0].regions[0].SerializeToString()
    assert told == b"\n\x02kv\x12\tattention\x18@ \x04(\x01"
    assert "context_parts" not in json.dumps(layout_to_json(layout))


def test_what_differs_is_said() -> None:
    (found,) = differences(shared_out(0, 1), shared_out(0, 1, run=1))
    assert (found.aspect, found.left, found.right) == (
        "tokens",
        "in 2 parts, 2 in turn",
        "in 2 parts, 1 in turn",
    )


def test_lists_of_block_ids_reach_as_far_as_all_parts_together() -> None:
    record = EngineRecord.of(
        EngineKey("", "e"), "i", shared_out(0, 1, 2), "d", 0.0, Account("", None, Total(0))
    )
    assert record.block_tokens == {"attention": 12}
    assert record.state_bytes(0, 10) == 10 * 16


def test_a_rank_holds_a_box_once() -> None:
    layout = shared_out(0, 1)
    rank = layout.ranks[0]
    other = replace(rank.regions[0], name="more", context_part=1)
    both = replace(
        rank,
        regions=(*rank.regions, other),
        shards=(*rank.shards, replace(rank.shards[0], region="more")),
    )
    with pytest.raises(LayoutError, match="twice"):
        check_layout(replace(layout, ranks=(both, layout.ranks[1])))
