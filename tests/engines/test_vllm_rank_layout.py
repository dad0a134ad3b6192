"""A rank's layout from tensors as vLLM 0.32 makes them: of which layers, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from restow.agents.engines.common.adapter_errors import CacheUnknownError
from restow.agents.engines.vllm.worker.rank_layout import (
    DraftLayers,
    LayerCache,
    LayerNumbers,
    rank_layout,
)
from restow.agents.memory.regions import registrations
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    KvOrder,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Layout, check_layout

BF16, F32 = DType.BFLOAT16, DType.FLOAT32
MODEL = ModelSpec("m", (Mamba2Spec(0, 4, 8, 16, 2, 4, F32, F32), AttentionSpec(1, 2, 8, BF16)))
BLOCKS, PAGE_TOKENS, PAGES_PER_BLOCK = 6, 4, 3
PADDED = 5120


def state_shapes(tp: int, conv: ConvLayout, extra: int = 0) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the conv state and the SSM state, as `mamba_utils.py` says.

    The conv state is (rows, channels), or the other way round.
    """
    window = (3 + extra, (4 * 8 + 2 * 2 * 16) // tp)
    return (window if conv is ConvLayout.SD else window[::-1], (4 // tp, 8, 16))


def caches(
    tp: int = 2, conv: ConvLayout = ConvLayout.SD, extra: int = 0, order: KvOrder = KvOrder.HND
) -> list[LayerCache]:
    """Return both layers' caches over one allocation, as groups overlay each other in vLLM."""
    heads, content = 2 // tp, 2 * 8
    pages = BLOCKS * PAGES_PER_BLOCK
    buffer = torch.zeros(BLOCKS * PADDED, dtype=torch.int8)
    raw = buffer.view(BLOCKS, 1, 1, PADDED)
    size = pages * heads * PAGE_TOKENS * content
    flat = buffer[: 2 * size].view(torch.bfloat16)
    if order is not KvOrder.NHD:
        kv = flat.view(pages, heads, PAGE_TOKENS, content)
    else:
        kv = flat.view(pages, PAGE_TOKENS, heads, content).transpose(1, 2)
    dtypes = (torch.float32, torch.float32)
    return [
        LayerCache(
            "a.0.mixer",
            0,
            "group.1",
            raw,
            state_shapes=state_shapes(tp, conv, extra),
            state_dtypes=dtypes,
        ),
        LayerCache("a.1.attn", 1, "group.0", kv, PAGES_PER_BLOCK),
    ]


@pytest.mark.parametrize("conv", list(ConvLayout))
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("extra", [0, 2])
def test_pages_lie_as_the_family_says(conv: ConvLayout, tp: int, extra: int) -> None:
    settings = EngineSettings(tp, PAGE_TOKENS, conv_layout=conv, conv_rows_extra=extra)
    found = [
        rank_layout(MODEL, replace(settings, page_tokens=1), rank, caches(tp, conv, extra))
        for rank in range(tp)
    ]
    layout = Layout(MODEL.model(), tuple(pages.layout for pages in found))
    check_layout(layout)
    for rank, expected in zip(layout.ranks, build_layout(MODEL, settings).ranks, strict=True):
        assert rank.shards == expected.shards
        state, tokens = rank.regions
        assert (state.group, state.page_stride_bytes) == ("group.1", PADDED)
        assert state.page_tokens is None
        assert (tokens.group, tokens.pages_per_block) == ("group.0", PAGES_PER_BLOCK)
        assert state.null_block == tokens.null_block == 0
        padding = rank.scratch[-1]
        assert padding.offset_bytes + padding.sizes[0] == PADDED
    for pages in found:
        (region,) = registrations(pages.memory)
        assert region[1] == BLOCKS * PADDED


@pytest.mark.parametrize("order", list(KvOrder))
def test_every_order_of_keys_and_values_is_laid_out_as_its_tensor_lies(order: KvOrder) -> None:
    cache = replace(caches(1, order=order)[1], kv_order=order)
    (found,) = rank_layout(MODEL, EngineSettings(1), 0, [cache]).layout.shards[:1]
    settings = EngineSettings(1, PAGE_TOKENS, kv_order=order)
    shards = {one.field: one for one in build_layout(MODEL, settings).ranks[0].shards}
    assert found == shards["layers.1.k"]


def test_an_order_that_the_strides_deny_is_refused() -> None:
    cache = caches(1, order=KvOrder.NHD)[1]
    refused(MODEL, replace(cache, kv_order=KvOrder.HND), "bytes apart", tp=1)


def refused(model: ModelSpec, cache: LayerCache, words: str, tp: int = 2) -> None:
    with pytest.raises(CacheUnknownError, match=words):
        rank_layout(model, EngineSettings(tp), 0, [cache])


def test_what_does_not_lie_as_the_config_says_is_refused() -> None:
    state, tokens = caches()
    refused(MODEL, replace(state, state_shapes=state_shapes(1, ConvLayout.SD)), "states of")
    refused(MODEL, replace(state, state_shapes=state_shapes(2, ConvLayout.DS)), "states of")
    refused(MODEL, replace(state, state_shapes=state.state_shapes[:1]), "states of")
    refused(MODEL, replace(state, state_dtypes=(torch.bfloat16, torch.float32)), "float32, float32")
    refused(MODEL, replace(state, layer=7), "layer 7 .* keeps recurrent state")
    refused(MODEL, replace(tokens, layer=0), "layer 0 .* keeps keys and values")
    half = tokens.tensor.view(torch.float16)
    refused(MODEL, replace(tokens, tensor=half), "say bfloat16")
    refused(MODEL, replace(tokens, tensor=tokens.tensor[..., :8]), "bytes a page")
    short = state.tensor[..., :1024]
    refused(MODEL, replace(state, tensor=short.contiguous()), "pages follow each other")


def test_heads_outside_of_blocks_are_refused() -> None:
    # This is vLLM's LHBNC: a page is in as many pieces as there are heads.
    _, tokens = caches(1)
    pages = BLOCKS * PAGES_PER_BLOCK
    kv = torch.zeros(2, pages, PAGE_TOKENS, 16, dtype=torch.bfloat16).transpose(0, 1)
    refused(MODEL, replace(tokens, tensor=kv), "heads .* bytes apart", tp=1)


def test_pages_of_several_layers_side_by_side_are_refused() -> None:
    # This is vLLM's BLHNC: the last page of the last layer ends the allocation.
    _, tokens = caches(1)
    pages = BLOCKS * PAGES_PER_BLOCK
    kv = torch.zeros(pages, 2, 2, PAGE_TOKENS, 16, dtype=torch.bfloat16)[:, 1]
    refused(MODEL, replace(tokens, tensor=kv), "out of the allocation", tp=1)


def test_numbers_are_those_of_the_layers() -> None:
    numbers = LayerNumbers.of({"model_type": "nemotron_h", "num_hidden_layers": 52})
    assert [numbers.layer(5, state) for state in (False, True)] == [5, 5]


def test_mixers_of_falcon_h1_are_counted_on_behind_all_layers() -> None:
    # In `falcon_h1.py` a mixer's prefix is ``num_hidden_layers + layer``.
    numbers = LayerNumbers.of({"model_type": "falcon_h1", "num_hidden_layers": 24})
    assert [numbers.layer(number, False) for number in (0, 7, 23)] == [0, 7, 23]
    assert [numbers.layer(24 + layer, True) for layer in (0, 7, 23)] == [0, 7, 23]


def _as_vllm_counts(hybrid: list[int], blocks: int) -> dict[int, int]:
    """Return the layer by the number that `Zamba2Attention` gives its cache.

    The numbers are found in that class's own steps.
    """
    found: dict[int, int] = {}
    for bare in range(blocks):
        number = bare * (len(hybrid) + blocks - 1) // blocks
        for use, layer in enumerate(hybrid):
            if use % blocks == bare:
                found[number] = layer
                number += 1
    return found


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("uses", [1, 2, 7, 9, 13])
def test_attention_of_zamba2_is_counted_block_by_block(uses: int, blocks: int) -> None:
    kinds = ["mamba", "mamba", "hybrid"] * uses + ["mamba"]
    config: dict[str, Any] = {
        "model_type": "zamba2",
        "num_hidden_layers": len(kinds),
        "layers_block_type": kinds,
        "num_mem_blocks": blocks,
    }
    numbers, hybrid = LayerNumbers.of(config), [3 * use + 2 for use in range(uses)]
    wanted = _as_vllm_counts(hybrid, blocks)
    assert {number: numbers.layer(number, False) for number in wanted} == wanted
    assert sorted(wanted.values()) == hybrid
    # `Zamba2Model`: a mixer's prefix is the number of hybrid layers, and its layer.
    assert [numbers.layer(uses + layer, True) for layer in range(len(kinds))] == [
        *range(len(kinds))
    ]


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
    # In Falcon-H1 the cache's number is 6, and the cache is of layer 2.
    assert DraftLayers(LAYERS).layer("model.layers.6.mamba", 6, 2) is None


def test_without_a_draft_all_are_the_models() -> None:
    assert DraftLayers().layer("mtp.layers.0.self_attn.attn", 0, 0) is None
