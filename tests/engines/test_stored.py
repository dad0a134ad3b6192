"""What is stored in a narrower type is rounded as a cache of that type would round it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import NemotronHForCausalLM

from restow.broker.families import EngineSettings
from restow.broker.layout import DType
from restow.demo.recall.model import load_model
from restow.demo.recall.task import make_prompts
from restow.demo.transformers.engine import Engine, EngineOptions
from restow.demo.transformers.generation import (
    TORCH_TYPES,
    StoredTypes,
    decode_greedily,
    prefill,
    round_cache,
)
from restow.demo.transformers.model_state import export_state
from restow.demo.transformers.state_io import RankTensors, collect, lay_out

PROMPT = make_prompts(1, seed=7)[0]
MIXED = StoredTypes(kv=DType.FLOAT16, conv=DType.BFLOAT16, ssm=DType.BFLOAT16)
KINDS = {"k": "kv", "v": "kv", "x": "conv", "B": "conv", "C": "conv", "ssm": "ssm"}
STEPS = 6


@pytest.fixture(scope="module")
def model() -> NemotronHForCausalLM:
    torch.set_num_threads(1)
    return load_model()


def alone(model: NemotronHForCausalLM, stored: StoredTypes) -> Engine:
    return Engine(model, EngineOptions("alone", "", EngineSettings(tp=2), (), stored=stored))


def type_of(stored: StoredTypes, field: str) -> torch.dtype:
    kind = KINDS[field.rpartition(".")[2]]
    return TORCH_TYPES[{"kv": stored.kv, "conv": stored.conv, "ssm": stored.ssm}[kind]]


def test_each_kind_of_state_is_rounded_to_its_type(model: NemotronHForCausalLM) -> None:
    computed = export_state(prefill(model, PROMPT.token_ids), model.config)
    stored = alone(model, MIXED).state_at(PROMPT.token_ids, len(PROMPT.token_ids))

    for name, values in computed.items():
        assert stored[name].dtype is torch.float32
        assert torch.equal(stored[name], values.to(type_of(MIXED, name)).float()), name
        assert not torch.equal(stored[name], values), name


def test_rounding_is_to_nearest_and_ties_go_to_even(model: NemotronHForCausalLM) -> None:
    cache = prefill(model, PROMPT.token_ids)
    values = cache.get_recurrent_state(0)
    ulp = 2.0**-7
    below, tie_down, tie_up, above = 1 + 0.49 * ulp, 1 + 0.5 * ulp, 1 + 1.5 * ulp, 1 + 0.51 * ulp
    with torch.inference_mode():
        values.flatten()[:4] = torch.tensor([below, tie_down, tie_up, above])

    round_cache(cache, model.config, StoredTypes(ssm=DType.BFLOAT16))

    assert values.flatten()[:4].tolist() == [1.0, 1.0, 1 + 2 * ulp, 1 + ulp]


def test_state_is_stored_after_every_step(model: NemotronHForCausalLM) -> None:
    whole = alone(model, MIXED).decode_alone(PROMPT.token_ids, STEPS)
    cache = prefill(model, PROMPT.token_ids[:-1], MIXED)
    once = decode_greedily(model, cache, PROMPT.token_ids[-1], STEPS)
    cache = prefill(model, PROMPT.token_ids[:-1], MIXED)
    fed = (PROMPT.token_ids[-1], *whole.token_ids)
    by_hand = []
    for step in range(STEPS):
        by_hand.append(decode_greedily(model, cache, fed[step], steps=1).logits)
        round_cache(cache, model.config, MIXED)

    assert torch.equal(whole.logits, torch.cat(by_hand))
    assert torch.equal(whole.logits[0], once.logits[0])
    assert not torch.equal(whole.logits[1], once.logits[1])


@pytest.mark.parametrize("kind", ["kv", "conv", "ssm"])
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_state_that_was_stored_wide_before_is_rounded_no_second_time(
    model: NemotronHForCausalLM, kind: str, dtype: DType
) -> None:
    engine = alone(model, replace(StoredTypes(), **{kind: dtype}))

    own = engine.decode_alone(PROMPT.token_ids, STEPS)
    wide = engine.decode_alone(PROMPT.token_ids, STEPS, prefilled_as=StoredTypes())

    assert torch.equal(own.logits, wide.logits)


def test_pages_hold_each_field_in_its_type(model: NemotronHForCausalLM) -> None:
    engine = alone(model, MIXED)
    tokens = len(PROMPT.token_ids)
    state = export_state(prefill(model, PROMPT.token_ids), model.config)
    ranks = [
        RankTensors(
            rank,
            {
                region.name: torch.zeros(8 * region.page_stride_bytes, dtype=torch.uint8)
                for region in rank.regions
            },
        )
        for rank in engine.layout.ranks
    ]
    blocks = {"attention": [5, 3, 6, 2], "state": [4]}

    lay_out(state, ranks, blocks)
    held = collect(engine.layout, ranks, blocks, tokens)

    assert held.keys() == state.keys()
    for name, values in state.items():
        assert torch.equal(held[name], values.to(type_of(MIXED, name))), name


def test_types_that_store_no_state_are_refused() -> None:
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        StoredTypes(kv=DType.FLOAT8_E4M3FN)
