"""Context parallelism as vLLM has it: which rank holds which heads and tokens, and what is refused.

The numbers are those of vLLM 0.32 (`distributed/parallel_state.py`, `config/parallel.py`,
`config/model.py`, `v1/core/kv_cache_coordinator.py`), written down as it computes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from restow.broker.errors import LayoutFormError, TpSizeError
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
from restow.broker.layout import DType, Layout, Span, check_layout

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
