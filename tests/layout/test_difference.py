"""What is said of two layouts that differ."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from laws.strategies import Case, any_cases
from restow.broker.families import (
    AttentionSpec,
    EngineSettings,
    ModelSpec,
    ScaleKind,
    Scales,
    build_layout,
)
from restow.broker.layout import DType
from restow.broker.layout.difference import Difference, differences

SPEC = AttentionSpec(0, 2, 4, DType.BFLOAT16)
ONE = build_layout(ModelSpec("m", (SPEC,)), EngineSettings())


@given(any_cases())
def test_layouts_are_equal_iff_nothing_is_said(case: Case) -> None:
    left, right = case.layouts
    assert bool(differences(left, right)) == (left != right)
    assert differences(left, left) == []


@given(any_cases())
def test_the_other_way_round_the_same_is_said(case: Case) -> None:
    left, right = case.layouts
    turned = [replace(one, left=one.right, right=one.left) for one in differences(right, left)]
    assert set(turned) == set(differences(left, right))


def test_fields_that_one_side_lacks() -> None:
    other = build_layout(ModelSpec("n", (SPEC, replace(SPEC, layer=1))), EngineSettings())
    assert differences(ONE, other) == [
        Difference("model", "name", "m", "n"),
        Difference("layers.1.k", "field", "none", "there"),
        Difference("layers.1.v", "field", "none", "there"),
    ]


def test_what_no_aspect_tells_is_not_passed_over() -> None:
    rank = ONE.ranks[0]
    moved = tuple(replace(shard, offset_bytes=shard.offset_bytes + 4) for shard in rank.shards)
    other = replace(ONE, ranks=(replace(rank, shards=moved),))
    (found,) = differences(ONE, other)
    assert found.subject == "pages"


def test_scales_are_an_aspect() -> None:
    scales = (Scales(ScaleKind.STATIC, "v1"), Scales(ScaleKind.PER_TOKEN_HEAD))
    static, own = (
        build_layout(
            ModelSpec("m", (AttentionSpec(0, 2, 4, DType.INT8, scales=one),)), EngineSettings()
        )
        for one in scales
    )
    assert Difference("layers.0.k", "scales", "none", "static v1") in differences(ONE, static)
    found = differences(static, own)
    assert Difference("layers.0.v", "scales", "static v1", "per token and head") in found
    assert Difference("layers.0.v_scale", "field", "none", "there") in found


def test_whole_blocks_are_an_aspect() -> None:
    other = build_layout(ModelSpec("m", (SPEC,)), EngineSettings(page_tokens=16, whole_blocks=True))
    aspect = "first block of a window"
    assert Difference("layers.0.k", aspect, "in part", "whole") in differences(ONE, other)


def test_a_window_is_an_aspect() -> None:
    other = build_layout(
        ModelSpec("m", (replace(SPEC, window_tokens=8),)), EngineSettings(page_tokens=16)
    )
    assert Difference("layers.0.k", "window", "all tokens", "8 tokens") in differences(ONE, other)
