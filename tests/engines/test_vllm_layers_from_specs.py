"""Layers that vLLM's own words make, and how they meet those that a model's config makes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from restow.agents.engines.common.adapter_errors import CacheUnknownError, EngineUnsupportedError
from restow.agents.engines.vllm.worker.layers_from_specs import (
    RankHeads,
    StateShapes,
    attention_layer,
    check_agreement,
    engine_model,
    group_windows,
    latent_layer,
    state_layer,
)
from restow.broker.errors import TpSizeError
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    GdnSpec,
    KdaSpec,
    LayerSpec,
    LinearAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    MlaSpec,
    ModelSpec,
    RecurrentSpec,
    ShortConvSpec,
    build_layout,
)
from restow.broker.layout import DType, Layout

BF16, F32 = DType.BFLOAT16, DType.FLOAT32
FAMILIES: list[tuple[RecurrentSpec, str, tuple[tuple[int, ...], ...]]] = [
    # The family, vLLM's word for it, and what `MambaStateShapeCalculator` says at TP 1 under SD.
    (Mamba1Spec(3, 128, 16, 4, BF16, F32), "MAMBA1", ((3, 128), (128, 16))),
    (Mamba2Spec(3, 16, 8, 32, 4, 4, BF16, F32), "MAMBA2", ((3, 384), (16, 8, 32))),
    (Mamba2Spec(3, 16, 8, 32, 1, 4, BF16, F32), "MAMBA2", ((3, 192), (16, 8, 32))),
    (GdnSpec(3, 4, 8, 64, 32, 4, BF16, F32), "GDN_ATTN", ((3, 768), (8, 32, 64))),
    (KdaSpec(3, 16, 32, 4, BF16, F32), "GDN_ATTN", ((3, 1536), (16, 32, 32))),
    (ShortConvSpec(3, 64, 3, BF16), "SHORT_CONV", ((2, 64),)),
    (LinearAttentionSpec(3, 16, 32, F32), "LINEAR", ((16, 32, 32),)),
]


def said(kind: str, shapes: tuple[tuple[int, ...], ...], **more: object) -> StateShapes:
    types = {"SHORT_CONV": (BF16,), "LINEAR": (F32,)}.get(kind, (BF16, F32))
    return StateShapes(kind, shapes, types, ConvLayout.SD, **more)  # type: ignore[arg-type]


def shards(spec: RecurrentSpec, tp: int) -> object:
    """Return the place of every shard on each rank, or "none" where the layer has no such TP."""
    try:
        layout = build_layout(ModelSpec("m", (spec,)), EngineSettings(tp))
    except TpSizeError:
        return "none"
    return layout.model.fields, [rank.shards for rank in layout.ranks]


@pytest.mark.parametrize("conv_layout", ConvLayout)
@pytest.mark.parametrize(("family", "kind", "shapes"), FAMILIES)
def test_states_lie_as_the_family_says(
    family: RecurrentSpec, kind: str, shapes: tuple[tuple[int, ...], ...], conv_layout: ConvLayout
) -> None:
    # States lie alike whatever is known of the model, so one side may know the family, the other
    # not.
    if kind != "LINEAR" and conv_layout is ConvLayout.DS:
        shapes = (shapes[0][::-1], *shapes[1:])
    spec = state_layer("x", 3, replace(said(kind, shapes), conv_layout=conv_layout))
    check_agreement("x", family, spec)
    for tp in (1, 2, 4, 8, 16):
        found = shards(spec, tp)
        regions = {f"layers.3.{one.recurrence().kind}" for one in (family, spec)}
        expected = shards(family, tp)
        for region in regions:  # GDN and KDA call theirs otherwise; fields are alike
            found, expected = (with_region(one, region) for one in (found, expected))
        assert found == expected


def with_region(laid: object, region: str) -> object:
    """Return the same layout with regions of one name."""
    if not isinstance(laid, tuple):
        return laid
    fields, ranks = laid
    return fields, [
        tuple(replace(one, region="r") if one.region == region else one for one in rank)
        for rank in ranks
    ]


def test_rows_for_speculative_tokens_are_no_taps() -> None:
    _, kind, shapes = FAMILIES[1]
    more = ((shapes[0][0] + 2, shapes[0][1]), *shapes[1:])
    assert state_layer("x", 3, said(kind, more, extra_rows=2)) == FAMILIES[1][0]
    # Mamba1 has none, whatever the engine speculates.
    assert state_layer("x", 3, said("MAMBA1", FAMILIES[0][2], extra_rows=2)) == FAMILIES[0][0]


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (said("RWKV", ((3, 64),)), "kind RWKV are not known; known are MAMBA1"),
        (said("MAMBA2", ((3, 384), (16, 8, 32), (16, 8))), "3 states .* the 2 of kind"),
        (said("MAMBA2", ((3, 384), (16, 8, 32)), replicated=True), "every rank has whole"),
        (said("MAMBA2", ((3, 128), (16, 8, 32))), "none of kind MAMBA2"),
        (said("MAMBA2", ((3, 391), (16, 8, 32))), "none of kind MAMBA2"),
        (said("GDN_ATTN", ((3, 256), (8, 32, 64))), "none of kind GDN_ATTN"),
        (said("MAMBA1", ((3, 64), (128, 16))), "none of kind MAMBA1"),
        (said("LINEAR", ((16, 32, 16),)), "none of kind LINEAR"),
    ],
)
def test_states_of_which_too_little_is_said_are_refused(states: StateShapes, words: str) -> None:
    with pytest.raises(EngineUnsupportedError, match=f"layers.3.mixer: .*{words}"):
        state_layer("layers.3.mixer", 3, states)


@pytest.mark.parametrize(
    ("rank", "model", "tp"), [(8, 8, 1), (4, 8, 2), (1, 8, 8), (1, 2, 8), (1, 1, 4)]
)
def test_heads_are_those_of_the_model(rank: int, model: int, tp: int) -> None:
    spec = attention_layer("x", 3, RankHeads(rank, model, tp), (64, 64), BF16, 128)
    assert spec == AttentionSpec(3, model, 64, BF16, 128)


@pytest.mark.parametrize(
    ("heads", "dims", "words"),
    [
        (RankHeads(4, 16, 2), (64, 64), "a rank of TP 2 4 KV heads, .* has 16 in all"),
        (RankHeads(4, 8, 1), (64, 64), "a rank of TP 1 4 KV heads, .* has 8 in all"),
        (RankHeads(2, 1, 2), (64, 64), "a rank of TP 2 2 KV heads, .* has 1 in all"),
        (RankHeads(4, 8, 2), (192, 128), "keys of 192 and values of 128"),
    ],
)
def test_heads_of_which_too_little_is_said_are_refused(
    heads: RankHeads, dims: tuple[int, int], words: str
) -> None:
    with pytest.raises(EngineUnsupportedError, match=f"a.3.attn: .*{words}"):
        attention_layer("a.3.attn", 3, heads, dims, BF16, 0)


@pytest.mark.parametrize(
    ("known", "found", "words"),
    [
        (AttentionSpec(0, 8, 64, BF16), AttentionSpec(0, 4, 64, BF16), "KV heads 8, .* 4"),
        (AttentionSpec(0, 8, 64, BF16), AttentionSpec(0, 8, 128, BF16), "a head of 64, .* 128"),
        (AttentionSpec(0, 8, 64, BF16, 512), AttentionSpec(0, 8, 64, BF16), "a window of 512,.* 0"),
        (
            AttentionSpec(0, 8, 64, BF16),
            AttentionSpec(0, 8, 64, F32),
            "KV of type bfloat16,.* float",
        ),
        (MlaSpec(0, 576, BF16), MlaSpec(0, 512, BF16), "a latent of 576, .* 512"),
        (MlaSpec(0, 576, BF16), AttentionSpec(0, 8, 64, BF16), "a latent of 576, .* None"),
        (FAMILIES[1][0], FAMILIES[2][0], r"conv.B \[4, 32\] of 4 .*\[1, 32\] of 1 "),
        (FAMILIES[1][0], FAMILIES[3][0], "conv.x .* None"),
        (FAMILIES[5][0], ShortConvSpec(3, 64, 4, BF16), "taps 2, .* 3"),
        (FAMILIES[5][0], ShortConvSpec(3, 64, 3, BF16, True), r"conv.x .*cut.* .*whole"),
    ],
)
def test_config_and_spec_that_differ_are_refused_with_both_numbers(
    known: LayerSpec, found: LayerSpec, words: str
) -> None:
    with pytest.raises(CacheUnknownError, match=f"a.0.attn: the model's config says {words}"):
        check_agreement("a.0.attn", known, found)
    check_agreement("a.0.attn", known, known)


def test_the_engines_model_is_what_its_ranks_hold() -> None:
    # Stages hold different layers; a layer that has keys and a state has its keys first, as in
    # families.
    keys, states = AttentionSpec(2, 2, 8, BF16), replace(FAMILIES[1][0], layer=2)
    latent = latent_layer(10, 576, BF16)
    ranks = [(states, keys), (states, keys), (latent,), (latent,)]
    assert engine_model("m", ranks) == ModelSpec("m", (keys, states, latent))
    with pytest.raises(CacheUnknownError, match="layer 10: ranks hold"):
        engine_model("m", [*ranks, (replace(latent, latent_dim=512),)])


def test_windows_are_those_of_the_groups_layers() -> None:
    def layout(*windows: int) -> Layout:
        layers = tuple(AttentionSpec(i, 2, 8, BF16, one) for i, one in enumerate(windows))
        return build_layout(ModelSpec("m", layers), EngineSettings(2))

    assert group_windows(layout(0, 32, 32)) == {"attention": 0, "window.32": 32}
    mixed = layout(0, 32)
    one_group = tuple(
        replace(rank, regions=tuple(replace(one, group="group.0") for one in rank.regions))
        for rank in mixed.ranks
    )
    with pytest.raises(CacheUnknownError, match=r"group.0 holds layers with windows of \[0, 32\]"):
        group_windows(replace(mixed, ranks=one_group))
