"""Quantised KV that the other side would misread is refused when both layouts are known."""

from __future__ import annotations

import itertools

import pytest

from restow.broker.errors import CastUnsupportedError, PlanError, ScalesMismatchError
from restow.broker.families import (
    AttentionSpec,
    BlockScaledMlaSpec,
    EngineSettings,
    MlaSpec,
    ModelSpec,
    ScaleKind,
    Scales,
    build_layout,
)
from restow.broker.families.specs import LayerSpec
from restow.broker.layout import DType, Layout
from restow.broker.planner import make_plan

E4M3, E5M2, INT8 = DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.INT8
BF16 = DType.BFLOAT16
OWN = Scales(ScaleKind.PER_TOKEN_HEAD)
NONE = Scales()


def static(fingerprint: str) -> Scales:
    return Scales(ScaleKind.STATIC, fingerprint)


def layout(spec: LayerSpec, tp: int = 1) -> Layout:
    return build_layout(ModelSpec("m", (spec,)), EngineSettings(tp=tp))


def kv(dtype: DType, scales: Scales) -> LayerSpec:
    return AttentionSpec(0, 4, 8, dtype, scales=scales)


SIDES = (
    *itertools.product((E4M3, E5M2, INT8), (OWN, static("v1"), static("v2"), NONE)),
    (DType.UINT8, NONE),
    (BF16, NONE),
)


@pytest.mark.parametrize(("source", "destination"), list(itertools.product(SIDES, SIDES)))
def test_only_equal_types_with_equal_scales_are_planned(
    source: tuple[DType, Scales], destination: tuple[DType, Scales]
) -> None:
    # Types of the same size are refused too: the bytes would fit, and would be other numbers.
    pair = layout(kv(*source)), layout(kv(*destination), tp=2)
    if source == destination:
        make_plan(*pair)
        return
    with pytest.raises(PlanError) as caught:
        make_plan(*pair)
    assert caught.value.subject["field"] == "layers.0.k"
    wanted = "CAST_UNSUPPORTED" if source[1] == destination[1] else "SCALES_MISMATCH"
    assert caught.value.reason == wanted


@pytest.mark.parametrize(
    ("source", "destination", "message"),
    [
        (
            kv(E4M3, static("v1")),
            kv(E4M3, static("v2")),
            "layers.0.k: P's elements have scales 'static v1', D's have scales 'static v2'",
        ),
        (
            kv(E4M3, OWN),
            kv(E4M3, static("v2")),
            "P's elements have scales 'per token and head', D's have scales 'static v2'",
        ),
        (
            kv(BF16, NONE),
            kv(INT8, OWN),
            "P's elements have no scales, D's have scales 'per token and head'",
        ),
        (
            MlaSpec(0, 576, E4M3, static("v1")),
            MlaSpec(0, 576, E4M3),
            "layers.0.latent: P's elements have scales 'static v1', D's have no scales",
        ),
        (
            BlockScaledMlaSpec(0),
            BlockScaledMlaSpec(0, block_dim=64),
            "scales 'per token and 128 elements', D's have scales 'per token and 64 elements'",
        ),
    ],
)
def test_both_scales_are_named(source: LayerSpec, destination: LayerSpec, message: str) -> None:
    with pytest.raises(ScalesMismatchError) as caught:
        make_plan(layout(source), layout(destination))
    assert message in caught.value.message
    assert "Run both engines with one type of this cache and the same scales" in str(caught.value)
    assert (caught.value.status, caught.value.reason) == ("FAILED_PRECONDITION", "SCALES_MISMATCH")
    assert {"source", "destination"} < set(caught.value.subject)


def test_latents_with_and_without_blocks_are_other_models() -> None:
    with pytest.raises(PlanError, match="P has per_token, dim 512, scales 'per token and 128 elem"):
        make_plan(layout(BlockScaledMlaSpec(0)), layout(MlaSpec(0, 576, BF16)))


def test_without_scales_the_types_are_named() -> None:
    with pytest.raises(CastUnsupportedError) as caught:
        make_plan(layout(kv(BF16, NONE)), layout(kv(E4M3, NONE)))
    assert "run both engines with one type of this cache" in caught.value.message
