"""Mixer inputs and projections of a layout: what is refused, and that all forms carry them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from restow.broker.errors import LayoutError, LayoutMemoryError, LayoutStrideError
from restow.broker.families import EngineSettings, Mamba2Spec, Mixer, ModelSpec, build_layout
from restow.broker.layout import (
    DType,
    Field,
    Kind,
    Layout,
    RankLayout,
    Region,
    Span,
    check_layout,
)
from restow.broker.layout.difference import differences, summarize
from restow.broker.layout.json_form import layout_from_json, layout_to_json

BF16 = DType.BFLOAT16
SPEC = Mamba2Spec(0, 8, 4, 8, 2, 4, BF16, DType.FLOAT32, Mixer(16, BF16))
MODEL = ModelSpec("m", (SPEC,))
BOTH = build_layout(MODEL, EngineSettings(tp=2, mixer_inputs=True, projections=True))
INPUT = "layers.0.mixer_input"


def with_rank(change: Callable[[RankLayout], RankLayout]) -> Layout:
    return replace(BOTH, ranks=(change(BOTH.ranks[0]), *BOTH.ranks[1:]))


def with_input(**changes: Any) -> Layout:
    return with_rank(lambda rank: replace(rank, inputs=(replace(rank.inputs[0], **changes),)))


def with_weights(number: int = 0, **changes: Any) -> Layout:
    def change(rank: RankLayout) -> RankLayout:
        offered = list(rank.projections)
        offered[number] = replace(offered[number], **changes)
        return replace(rank, projections=tuple(offered))

    return with_rank(change)


def with_model(**changes: Any) -> Layout:
    field = replace(BOTH.model.inputs[0], **changes)
    return replace(BOTH, model=replace(BOTH.model, inputs=(field,)))


def twice(rank: RankLayout) -> RankLayout:
    return replace(rank, projections=rank.projections + rank.projections[:1])


def grouped(rank: RankLayout) -> RankLayout:
    return replace(rank, regions=(rank.regions[0], replace(rank.regions[1], group="state")))


def constant_pages(rank: RankLayout) -> RankLayout:
    return replace(rank, regions=(replace(rank.regions[0], group=""), rank.regions[1]))


def constant_tokens(rank: RankLayout) -> RankLayout:
    return replace(rank, regions=(*rank.regions, Region("t", "", 64, 4)))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (with_model(kind=Kind.PER_TOKEN), f"input {INPUT}: it must be a snapshot"),
        (with_model(axes=("row", "hidden")), f"input {INPUT}: it must be a snapshot with the axes"),
        (with_model(shape=(300, 16)), "is more than 256 taps"),
        (with_model(name="layers.0.ssm"), "field layers.0.ssm is listed more than once"),
        (with_model(shape=(2, 16)), f"input {INPUT}: a rank must keep all of an input"),
        (with_input(field="other"), "rank 0, input other: the model does not list this input"),
        (with_input(box=(Span(0, 3), Span(0, 8))), "must keep all of an input"),
        (with_input(dtype=DType.INT8), "int8 cannot be multiplied"),
        (with_input(strides_bytes=(64, 4)), r"strides \[64, 4\]: a row must have no gaps"),
        (with_input(offset_bytes=1), "must lie at multiples of 2 bytes"),
        (with_input(dtype=DType.FLOAT16), f"field {INPUT}: rank 0 has float16, rank 1 has bf"),
        (
            with_weights(field="nothing"),
            "projection of nothing: the model does not have this field",
        ),
        (with_weights(field="layers.0.ssm"), r"only windows \(snapshots with an axis tap\)"),
        (with_weights(input="nothing"), "the model has no input 'nothing'"),
        (with_weights(box=(Span(0, 8), Span(0, 3))), "the rank has no shard of that box"),
        (with_weights(box=(Span(0, 16), Span(0, 2))), "and all taps"),
        (with_weights(region="nowhere"), "region 'nowhere' is not listed"),
        (with_weights(region="layers.0.mamba"), "not constant"),
        (with_weights(dtype=DType.UINT8), "uint8 cannot be multiplied"),
        (with_weights(strides_bytes=(32,)), "one entry for each axis but tap"),
        (with_weights(strides_bytes=(32, 4)), "and 2 bytes as the last entry"),
        (with_weights(offset_bytes=3), "must lie at multiples of 2 bytes"),
        (with_rank(twice), "it is listed more than once"),
        (with_rank(grouped), "not constant"),
        (with_rank(constant_pages), "a region without a group is constant: it holds only weights"),
        (with_rank(constant_tokens), "a region without a group is constant: it holds only weights"),
    ],
)
def test_what_does_not_fit_is_named(layout: Layout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_layout(layout)


def test_inputs_and_weights_have_bytes_of_their_own() -> None:
    with pytest.raises(LayoutMemoryError, match=r"conv.x .* and layers.0.mixer_input"):
        check_layout(with_input(offset_bytes=0))
    with pytest.raises(LayoutMemoryError, match=r"weights of layers\.0\.conv"):
        check_layout(with_weights(1, offset_bytes=0))
    with pytest.raises(LayoutStrideError, match=r"leave the page of region layers\.0\.in_proj"):
        check_layout(with_weights(2, offset_bytes=1 << 20))
    with pytest.raises(LayoutStrideError, match="folds"):
        check_layout(with_weights(0, strides_bytes=(16, 2)))


def test_a_window_that_nothing_is_rounded_to() -> None:
    def raw(rank: RankLayout) -> RankLayout:
        shards = (replace(rank.shards[0], dtype=DType.INT8), *rank.shards[1:])
        return replace(rank, shards=shards)

    layout = replace(BOTH, ranks=tuple(map(raw, BOTH.ranks)))
    with pytest.raises(LayoutError, match="no number can be converted to the int8 of its shard"):
        check_layout(layout)


def test_inputs_that_the_model_leaves_out_are_as_large_as_their_shards_reach() -> None:
    check_layout(BOTH)
    without = layout_to_json(BOTH)
    del without["model"]["inputs"]
    assert layout_from_json(without) == BOTH


def test_summary_and_difference_mention_them() -> None:
    plain = build_layout(MODEL, EngineSettings(tp=2))
    assert all(
        one.bytes_of_inputs == one.bytes_of_weights == 0 for one in map(summarize, plain.ranks)
    )
    one = summarize(BOTH.ranks[0])
    assert one.bytes_of_inputs == 3 * 16 * 2
    assert one.bytes_of_weights == (16 + 2 * 8) * 16 * 2
    assert one.bytes_per_snapshot == summarize(plain.ranks[0]).bytes_per_snapshot
    said = {(d.subject, d.aspect, d.left, d.right) for d in differences(plain, BOTH)}
    assert (INPUT, "field", "none", "there") in said
    assert ("layers.0.conv.x", "in-projection", "none", "bfloat16") in said


def test_an_empty_group_is_said_outright() -> None:
    data = layout_to_json(BOTH)
    assert data["ranks"][0]["regions"][1]["group"] == ""
    field = Field(INPUT, Kind.SNAPSHOT, ("tap", "hidden"), (3, 16))
    assert BOTH.model.inputs == (field,)
