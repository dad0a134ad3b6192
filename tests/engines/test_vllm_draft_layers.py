"""vLLM's caches of a draft are told from the model's by their names, and numbered behind them.

The names are those that vLLM 0.32 gave (EAGLE and draft model: read off engines on the CPU), or
that its model code makes.
"""

from __future__ import annotations

import pytest

from restow.agents.engines.vllm.worker.draft_layers import DraftLayers

LAYERS = 4


@pytest.mark.parametrize(
    ("name", "number", "layer"),
    [
        ("model.layers.3.self_attn.attn", 3, None),
        ("model.layers.4.self_attn.attn", 4, 4),  # EAGLE, MTP of DeepSeek-V3, GLM, MiMo
        ("draft_model.model.layers.0.self_attn.attn", 0, 4),
        ("draft_model.model.layers.3.self_attn.attn", 3, 7),
        ("mtp.layers.0.self_attn.attn", 0, 4),  # Qwen3-Next, Qwen3.5, EXAONE
        ("model.mtp.layers.0.self_attn.attn", 0, 4),  # MiMo-V2
    ],
)
def test_which_layer_of_a_draft_a_cache_is_of(name: str, number: int, layer: int | None) -> None:
    assert DraftLayers(LAYERS).layer(name, number, number) == layer


def test_mixers_that_vllm_numbers_behind_the_attention_are_no_drafts() -> None:
    """Falcon-H1: the cache's number is 6, and it is of layer 2."""
    assert DraftLayers(LAYERS).layer("model.layers.6.mamba", 6, 2) is None


def test_without_a_draft_all_are_the_models() -> None:
    assert DraftLayers().layer("mtp.layers.0.self_attn.attn", 0, 0) is None
