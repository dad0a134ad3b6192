"""What keeps one layout from being planned to another: types that round, scales, blocks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from restow.broker.errors import (
    BlockTokensMismatchError,
    CastUnsupportedError,
    NarrowingError,
    PlanError,
    ScalesMismatchError,
)
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
from restow.broker.planner import check_exact, make_plan

FLOATS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
PAIRS = list(itertools.product(FLOATS, FLOATS))


def survives(values: torch.Tensor, other: DType) -> bool:
    """Return whether torch gives the same numbers back through another type."""
    back = values.to(getattr(torch, other.label)).to(values.dtype)
    return bool(torch.equal(back, values))


@pytest.mark.parametrize(("source", "destination"), PAIRS)
def test_a_type_holds_another_iff_every_value_survives(source: DType, destination: DType) -> None:
    if source is DType.FLOAT32:
        bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32).view(np.int32)
    else:
        bits = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
    values = torch.from_numpy(bits.copy()).view(getattr(torch, source.label))
    values = values[~values.isnan()]
    assert destination.holds(source) == survives(values, destination)


@pytest.mark.parametrize(("source", "destination"), PAIRS)
def test_a_plan_is_refused_that_would_round(source: DType, destination: DType) -> None:
    layouts = (
        build_layout(ModelSpec("m", (AttentionSpec(0, 2, 4, dtype),)), EngineSettings())
        for dtype in (source, destination)
    )
    plan = make_plan(*layouts)
    if destination.holds(source):
        check_exact(plan)
        return
    with pytest.raises(NarrowingError) as caught:
        check_exact(plan)
    assert caught.value.subject["field"] == "layers.0.k"
    assert caught.value.reason == "NARROWING_NOT_ALLOWED"


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


WINDOW = AttentionSpec(0, 2, 4, DType.BFLOAT16, window_tokens=31)


def window_layout(block_tokens: int, whole_blocks: bool = False, window_tokens: int = 31) -> Layout:
    """Return a window_layout with blocks of two pages each."""
    spec = replace(WINDOW, window_tokens=window_tokens)
    settings = EngineSettings(
        page_tokens=block_tokens // 2, pages_per_block=2, whole_blocks=whole_blocks
    )
    return build_layout(ModelSpec("m", (spec,)), settings)


@pytest.mark.parametrize(("ours", "theirs"), [(16, 16), (32, 16), (48, 16)])
def test_blocks_that_divide_ps_are_filled_from_their_beginning(ours: int, theirs: int) -> None:
    plan = make_plan(window_layout(ours), window_layout(theirs, whole_blocks=True))
    token_bytes = plan.bytes
    for tokens, first in ((57, 16), (63, 32), (64, 32), (20, 0)):
        assert plan.bytes_at(tokens) == (tokens - first) * token_bytes
    in_part = make_plan(window_layout(ours), window_layout(theirs))
    assert in_part.bytes_at(57) == 31 * token_bytes


@pytest.mark.parametrize(("ours", "theirs"), [(16, 32), (16, 24), (24, 16)])
def test_blocks_whose_beginning_p_may_lack_are_refused(ours: int, theirs: int) -> None:
    with pytest.raises(BlockTokensMismatchError) as caught:
        make_plan(window_layout(ours), window_layout(theirs, whole_blocks=True))
    assert caught.value.status == "FAILED_PRECONDITION"
    assert caught.value.reason == "BLOCK_TOKENS_MISMATCH"
    assert caught.value.subject == {
        "field": "layers.0.k",
        "source": str(ours),
        "destination": str(theirs),
    }
    # One that keeps none takes them, and so does one of a model without windows.
    make_plan(window_layout(ours), window_layout(theirs))
    make_plan(window_layout(ours, window_tokens=0), window_layout(theirs, True, window_tokens=0))


def test_only_what_d_keeps_counts() -> None:
    make_plan(window_layout(16, whole_blocks=True), window_layout(32))
