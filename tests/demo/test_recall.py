"""The recall model answers from its state, and its state survives export, storing and import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, NemotronHForCausalLM

from broker.fakes import model_layout
from restow.broker.errors import RequestError
from restow.broker.families import EngineSettings
from restow.broker.layout import DType
from restow.demo.recall.model import checkpoint_folder, load_model, whole_answer_accuracy
from restow.demo.recall.task import Prompt, decode, make_prompts
from restow.demo.recall.train import make_tokenizer
from restow.demo.transformers.engine import Engine, EngineOptions
from restow.demo.transformers.generation import (
    AS_COMPUTED,
    TORCH_TYPES,
    Decoded,
    StoredTypes,
    decode_greedily,
    generate_greedily,
    prefill,
    round_cache,
)
from restow.demo.transformers.model_state import export_state, import_state
from restow.demo.transformers.ranks import BlockPool, OutOfBlocksError, take_from_each
from restow.demo.transformers.state_io import RankTensors, collect, lay_out

PROMPTS = make_prompts(16, seed=7)
PROMPT = PROMPTS[0]
STEPS = 6

State = dict[str, Tensor]
Fault = Callable[[NemotronHForCausalLM, int], State]


@pytest.fixture(scope="module")
def model() -> NemotronHForCausalLM:
    """Return the packaged model; no test changes it.

    Tensors this small lose more to waiting than they gain from a second thread.
    """
    torch.set_num_threads(1)
    return load_model()


@pytest.fixture(scope="module")
def moved(model: NemotronHForCausalLM) -> list[Decoded]:
    """Return the replies that are decoded from exported and imported state."""
    return [
        continue_from(model, prompt, state_before_last_token(model, index))
        for index, prompt in enumerate(PROMPTS)
    ]


def state_before_last_token(model: NemotronHForCausalLM, index: int) -> State:
    """Return what a prefill engine hands over: everything up to N-1 of N prompt tokens."""
    return export_state(prefill(model, PROMPTS[index].token_ids[:-1]), model.config)


def continue_from(model: NemotronHForCausalLM, prompt: Prompt, state: State) -> Decoded:
    """Decode the last prompt token and the reply from an imported ``state``."""
    cache = import_state(state, len(prompt.token_ids) - 1, model.config)
    return decode_greedily(model, cache, prompt.token_ids[-1], len(prompt.answer_ids))


def ssm_one_token_ahead(model: NemotronHForCausalLM, index: int) -> State:
    """Replace h(N-1) by h(N): the last prompt token then counts twice."""
    state = state_before_last_token(model, index)
    ahead = export_state(prefill(model, PROMPTS[index].token_ids), model.config)
    return state | {name: ahead[name] for name in state if name.endswith(".ssm")}


def mamba_one_token_ahead(model: NemotronHForCausalLM, index: int) -> State:
    """Replace conv and SSM state by those after N tokens, as a hand-over too late would."""
    state = state_before_last_token(model, index)
    ahead = export_state(prefill(model, PROMPTS[index].token_ids), model.config)
    return ahead | {name: state[name] for name in state if name.endswith((".k", ".v"))}


def b_and_c_swapped(model: NemotronHForCausalLM, index: int) -> State:
    """Put the conv state of B where C belongs, and the other way round."""
    swap = {".B": ".C", ".C": ".B"}
    return {
        name[:-2] + swap.get(name[-2:], name[-2:]): tensor
        for name, tensor in state_before_last_token(model, index).items()
    }


def ssm_of_another_prompt(model: NemotronHForCausalLM, index: int) -> State:
    """Replace the SSM states by those of the next prompt."""
    state = state_before_last_token(model, index)
    other = state_before_last_token(model, (index + 1) % len(PROMPTS))
    return state | {name: other[name] for name in state if name.endswith(".ssm")}


def replies_with(model: NemotronHForCausalLM, fault: Fault) -> list[Decoded]:
    """Return the replies that are decoded from state with ``fault``."""
    return [
        continue_from(model, prompt, fault(model, index)) for index, prompt in enumerate(PROMPTS)
    ]


def test_prompts_repeat_for_one_seed_and_differ_for_another() -> None:
    assert make_prompts(4, seed=1) == make_prompts(4, seed=1) != make_prompts(4, seed=2)


def test_prompt_text_reads_as_its_tokens() -> None:
    assert all(decode(prompt.token_ids) == prompt.text for prompt in PROMPTS)


def test_prompt_lengths_vary() -> None:
    assert len({len(prompt.token_ids) for prompt in PROMPTS}) > 3


def test_model_recalls_whole_answers(model: NemotronHForCausalLM) -> None:
    assert whole_answer_accuracy(model, make_prompts(64, seed=11)) >= 0.95


def test_imported_state_gives_bit_equal_logits(
    model: NemotronHForCausalLM, moved: list[Decoded]
) -> None:
    for prompt, reply in zip(PROMPTS, moved, strict=True):
        untouched = prefill(model, prompt.token_ids[:-1])
        expected = decode_greedily(model, untouched, prompt.token_ids[-1], steps=1)
        assert torch.equal(reply.first_logits, expected.first_logits), prompt.text


def test_imported_state_gives_the_tokens_of_generate(
    model: NemotronHForCausalLM, moved: list[Decoded]
) -> None:
    for prompt, reply in zip(PROMPTS, moved, strict=True):
        (expected,) = generate_greedily(model, [prompt.token_ids], len(prompt.answer_ids))
        assert reply.token_ids == expected, prompt.text


def test_decoding_leaves_an_exported_state_alone(model: NemotronHForCausalLM) -> None:
    cache = prefill(model, PROMPTS[0].token_ids[:-1])
    state = export_state(cache, model.config)
    before = {name: tensor.clone() for name, tensor in state.items()}
    decode_greedily(model, cache, PROMPTS[0].token_ids[-1], steps=3)
    assert all(torch.equal(before[name], state[name]) for name in state)


def test_import_refuses_a_wrong_number_of_tokens(model: NemotronHForCausalLM) -> None:
    state = state_before_last_token(model, index=0)
    with pytest.raises(ValueError, match="keys"):
        import_state(state, len(PROMPTS[0].token_ids), model.config)


@pytest.mark.parametrize(
    "fault", [ssm_one_token_ahead, mamba_one_token_ahead, b_and_c_swapped, ssm_of_another_prompt]
)
def test_fault_changes_the_first_logits_of_every_prompt(
    model: NemotronHForCausalLM, moved: list[Decoded], fault: Fault
) -> None:
    for prompt, right, wrong in zip(PROMPTS, moved, replies_with(model, fault), strict=True):
        assert not torch.equal(right.first_logits, wrong.first_logits), prompt.text


# The other two faults are too slight for greedy tokens of this model: only logits show them.
@pytest.mark.parametrize("fault", [mamba_one_token_ahead, ssm_of_another_prompt])
def test_gross_fault_changes_most_replies(
    model: NemotronHForCausalLM, moved: list[Decoded], fault: Fault
) -> None:
    replies = zip(moved, replies_with(model, fault), strict=True)
    changed = sum(right.token_ids != wrong.token_ids for right, wrong in replies)
    assert changed > len(PROMPTS) // 2


@pytest.mark.parametrize("group_count", [1, 2])
def test_the_packaged_tokenizers_have_the_tasks_words(group_count: int) -> None:
    folder = checkpoint_folder(group_count)
    packaged = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert packaged.get_vocab() == make_tokenizer().get_vocab()
    for prompt in PROMPTS:
        assert tuple(packaged(prompt.text)["input_ids"]) == prompt.token_ids
        assert packaged.decode(prompt.answer_ids) == decode(prompt.answer_ids)


def alone(model: NemotronHForCausalLM, stored: StoredTypes = AS_COMPUTED) -> Engine:
    return Engine(model, EngineOptions("alone", "", EngineSettings(tp=2), (), stored=stored))


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_short_prompt_is_taken_once(model: NemotronHForCausalLM, tokens: int) -> None:
    # A recurrent state that took the only token twice would answer otherwise.
    prompt = PROMPT.token_ids[:tokens]
    (expected,) = generate_greedily(model, [prompt], STEPS)
    assert alone(model).decode_alone(prompt, STEPS).token_ids == expected


def test_of_one_token_nothing_is_handed_over(model: NemotronHForCausalLM) -> None:
    engine, prompt = alone(model), PROMPT.token_ids[:1]
    for act in (engine.prefill, engine.ask):
        with pytest.raises(RequestError, match="D computes it"):
            act("h", prompt)


def test_who_finds_too_few_blocks_of_one_group_takes_none_of_another() -> None:
    regions = {region.group: region for region in model_layout().ranks[0].regions}
    pools = {
        group: BlockPool(region, tokens=64, requests=1, seed=1) for group, region in regions.items()
    }
    first = take_from_each(pools, 64)
    for last in pools:
        for group in pools:
            if group != last:
                pools[group].give_back(first[group])
        with pytest.raises(OutOfBlocksError):
            take_from_each(pools, 64)
        for group in pools:
            if group != last:
                pools[group].take(64)


MIXED = StoredTypes(kv=DType.FLOAT16, conv=DType.BFLOAT16, ssm=DType.BFLOAT16)
KINDS = {"k": "kv", "v": "kv", "x": "conv", "B": "conv", "C": "conv", "ssm": "ssm"}


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
