"""Which heads, groups, layers and tokens a rank holds, as in vLLM 0.32, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restow.broker.errors import LayoutFormError, StageError, TpSizeError
from restow.broker.families import (
    AttentionSpec,
    EngineSettings,
    IndexerSpec,
    LayerSpec,
    Mamba2Spec,
    MlaSpec,
    ModelSpec,
    build_layout,
)
from restow.broker.families.build import stage_layers
from restow.broker.families.settings import rank_slice, rank_span
from restow.broker.layout import DType, Layout, Span, check_layout

SPEC = Mamba2Spec(0, 8, 2, 4, 2, 4, DType.BFLOAT16, DType.FLOAT32)


@given(st.integers(1, 12), st.integers(1, 12))
def test_a_rank_holds_the_head_that_vllm_gives_it(count: int, times: int) -> None:
    """Check that rank r of T holds head r * Kv // T and those up to the next rank's."""
    for tp, heads in ((count * times, count), (count, count * times)):
        for rank in range(tp):
            span = rank_span(heads, tp, rank, "head")
            assert span.start == rank * heads // tp
            assert span.stop == max((rank + 1) * heads // tp, span.start + 1)


@given(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 6))
def test_a_replicated_group_is_rank_over_t_over_g(groups: int, times: int) -> None:
    tp = groups * times
    spans = [rank_span(groups, tp, rank, "group") for rank in range(tp)]
    assert spans == [Span(rank // (tp // groups), rank // (tp // groups) + 1) for rank in range(tp)]


def test_one_group_is_everybodys() -> None:
    assert {rank_span(1, 8, rank, "group") for rank in range(8)} == {Span(0, 1)}


@given(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
def test_a_rank_holds_the_groups_that_its_heads_use(groups: int, each: int, tp: int) -> None:
    heads = groups * each
    if heads % tp or (groups % tp and tp % groups):
        return
    for rank in range(tp):
        mine = rank_slice(heads, tp, rank, "Mamba head")
        used = {head // each for head in range(mine.start, mine.stop)}
        held = rank_span(groups, tp, rank, "group")
        assert used == set(range(held.start, held.stop))


@pytest.mark.parametrize(("count", "tp"), [(8, 3), (3, 8), (4, 6), (6, 4)])
def test_neither_cut_nor_replicated(count: int, tp: int) -> None:
    with pytest.raises(TpSizeError, match="one must divide the other") as caught:
        rank_span(count, tp, 0, "head")
    assert caught.value.subject["axis"] == "head"
    assert caught.value.reason == "TP_SIZE_NOT_ALLOWED"


def test_heads_of_a_recurrence_are_never_replicated() -> None:
    with pytest.raises(TpSizeError, match="does not divide"):
        rank_slice(8, 16, 0, "Mamba head")


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": 0},
        {"tp": 1025},
        {"page_tokens": 0},
        {"pages_per_block": 0},
        {"conv_rows_extra": -1},
        {"page_align_bytes": 0},
    ],
)
def test_settings_that_mean_nothing(changes: dict[str, Any]) -> None:
    with pytest.raises(LayoutFormError, match=next(iter(changes))):
        build_layout(ModelSpec("m", (SPEC,)), replace(EngineSettings(), **changes))


@pytest.mark.parametrize(
    ("depth", "pp", "sizes"),
    [
        (10, 1, [10]),
        (10, 4, [2, 3, 3, 2]),
        (52, 8, [6, 6, 6, 7, 7, 7, 7, 6]),
        (7, 2, [4, 3]),
        (5, 5, [1] * 5),
    ],
)
def test_stages_are_cut_as_vllm_cuts_them(depth: int, pp: int, sizes: list[int]) -> None:
    assert [span.size for span in stage_layers(depth, pp)] == sizes


@given(st.integers(1, 60), st.integers(1, 60))
def test_every_layer_is_in_one_stage(depth: int, pp: int) -> None:
    if pp > depth:
        with pytest.raises(StageError):
            stage_layers(depth, pp)
        return
    spans = stage_layers(depth, pp)
    assert [layer for span in spans for layer in range(span.start, span.stop)] == [*range(depth)]
    assert len(spans) == pp
    assert all(span.size for span in spans)


@pytest.mark.parametrize("counts", [(3, 3), (3, 3, 3), (7, 0, 1), (9, -1, 0), (8,)])
def test_stages_that_do_not_add_up_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(StageError) as caught:
        stage_layers(8, 3, counts)
    assert caught.value.reason == "STAGES_NOT_ALLOWED"
    assert "8 layers" in str(caught.value)


def test_layers_without_state_count_in_the_cut() -> None:
    # Layer 1 of four has no state: the second stage is layers 2 and 3.
    layers = tuple(AttentionSpec(i, 2, 4, DType.BFLOAT16) for i in (0, 2, 3))
    layout = build_layout(ModelSpec("m", layers, layer_count=4), EngineSettings(tp=2, pp=2))
    check_layout(layout)
    names = [[region.name for region in rank.regions] for rank in layout.ranks]
    assert names == [["layers.0.kv"]] * 2 + [["layers.2.kv", "layers.3.kv"]] * 2
    assert [rank.rank for rank in layout.ranks] == [0, 1, 2, 3]


HEADS = AttentionSpec(0, 2, 4, DType.BFLOAT16)
LATENT = MlaSpec(0, 8, DType.BFLOAT16)
WINDOW = AttentionSpec(0, 1, 4, DType.BFLOAT16, window_tokens=6)
STATE = Mamba2Spec(1, 8, 2, 2, 1, 4, DType.BFLOAT16, DType.BFLOAT16)


def built(*layers: LayerSpec, **settings: Any) -> Layout:
    layout = build_layout(ModelSpec("m", layers), EngineSettings(**settings))
    check_layout(layout)
    return layout


def vllm_parts(tp: int, pcp: int, dcp: int, pp: int = 1) -> list[int]:
    """Return the place of each rank in its DCP group (`initialize_model_parallel`)."""
    ranks = np.arange(pp * pcp * tp).reshape(1, 1, pp, pcp, tp)
    if dcp > 1:
        ranks = ranks.transpose(0, 1, 2, 4, 3)
    places = {rank: i for group in ranks.reshape(-1, dcp).tolist() for i, rank in enumerate(group)}
    return [places[rank] for rank in range(pp * pcp * tp)]


@pytest.mark.parametrize(
    ("tp", "pcp", "dcp", "pp"),
    [
        (8, 1, 8, 1),
        (8, 1, 2, 1),
        (4, 1, 4, 2),
        (1, 4, 4, 1),
        (4, 2, 2, 1),
        (4, 2, 8, 1),
        (4, 2, 1, 2),
    ],
)
def test_ranks_hold_the_parts_that_they_have_in_vllm(tp: int, pcp: int, dcp: int, pp: int) -> None:
    second = MlaSpec(1, 8, DType.BFLOAT16)
    layout = built(LATENT, second, tp=tp, pcp=pcp, dcp=dcp, pp=pp, interleave_tokens=4)
    assert [rank.rank for rank in layout.ranks] == list(range(tp * pcp * pp))
    parts = [rank.regions[0].context_part for rank in layout.ranks]
    assert parts == vllm_parts(tp, pcp, dcp, pp)
    for region in (region for rank in layout.ranks for region in rank.regions):
        cut = region.context_parts, region.interleave_tokens
        assert cut == ((dcp, 4) if dcp > 1 else (1, 1))


def test_heads_that_ranks_would_all_hold_are_shared_out_by_tokens() -> None:
    layout = built(HEADS, tp=8, dcp=4)
    held = [(rank.shards[0].box[0], rank.regions[0].context_part) for rank in layout.ranks]
    assert held == [(Span(head, head + 1), part) for head in range(2) for part in range(4)]
    layout = built(HEADS, tp=8, dcp=2)
    assert [rank.regions[0].context_part for rank in layout.ranks] == [0, 1] * 4


def test_states_and_indexers() -> None:
    """Check that recurrent states are cut by TP alone, and an indexer's keys as the latents."""
    layout = built(HEADS, STATE, tp=8, dcp=4)
    for rank in layout.ranks:
        attention, state = rank.regions
        assert (attention.context_parts, state.context_parts) == (4, 1)
    layout = built(LATENT, IndexerSpec(0), tp=2, dcp=2)
    assert {one.context_parts for rank in layout.ranks for one in rank.regions} == {2}


@pytest.mark.parametrize(
    ("layers", "settings", "words"),
    [
        ([LATENT], {"tp": 4, "dcp": 3}, "it must divide tp"),
        ([LATENT], {"tp": 2, "dcp": 4}, "it must divide tp"),
        ([LATENT], {"tp": 4, "pcp": 2, "dcp": 4}, "be 1, pcp or tp \\* pcp"),
        ([LATENT], {"tp": 2, "dcp": 0}, "dcp is 0"),
        ([LATENT], {"tp": 2, "dcp": 2, "interleave_tokens": 3}, "must divide the 16 tokens"),
        ([LATENT], {"tp": 2, "dcp": 2, "interleave_tokens": 32}, "must divide the 16 tokens"),
        ([WINDOW], {"tp": 2, "dcp": 2}, "has a window"),
        ([WINDOW], {"pcp": 2}, "has a window"),
        ([LATENT, STATE], {"pcp": 2, "dcp": 2}, "has a recurrent state"),
        ([LATENT], {"tp": 1024, "pcp": 2}, "tp \\* pcp \\* pp is 2048"),
    ],
)
def test_what_vllm_refuses(layers: list[LayerSpec], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutFormError, match=words):
        built(*layers, **settings)


@pytest.mark.parametrize(("tp", "dcp"), [(2, 2), (4, 4), (8, 8)])
def test_more_parts_than_ranks_hold_a_head(tp: int, dcp: int) -> None:
    with pytest.raises(TpSizeError, match="share out the tokens of a head"):
        built(HEADS, tp=tp, dcp=dcp)


def test_blocks_of_several_pages_are_interleaved_by_the_block() -> None:
    # The NIXL connector of vLLM sets blocks of 64 in pages of 16.
    built(LATENT, tp=2, dcp=2, interleave_tokens=64, pages_per_block=4)
