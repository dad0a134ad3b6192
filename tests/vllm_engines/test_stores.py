"""A store between vLLM engines: what one computed stays when it has left, for any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from restow.broker.core.common.keys import State
from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.closeness import assert_alike
from vllm_harness.engine import Options
from vllm_harness.finders import END, STEPS, TELL, drawn, finders
from vllm_harness.hybrid_checkpoints import HYBRIDS
from vllm_harness.pair import MODEL
from vllm_harness.stores import store
from vllm_harness.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("kind", ["recall", "llama"])
async def test_the_next_turn_is_found_when_the_engine_has_left(
    vllm_python: Path, tmp_path: Path, kind: str
) -> None:
    # The store comes after the reply: it has only what the engine hands over when it leaves.
    if kind == "recall":
        one = Options(MODEL, 1, prefix_caching=True, extra=TELL)
        other, ids = replace(one, tp=2, conv_layout="DS"), drawn(40)
        held = 40 + STEPS - 1  # the last token that was said is not computed
    else:
        model = tiny_model(kind, tmp_path / "model")
        one = Options(model, 1, prefix_caching=True, extra=TELL, engine={"block_size": 32})
        other, ids = replace(one, tp=2, engine={"block_size": 64}), drawn(150)
        held = 160
    async with finders(vllm_python, tmp_path, one, other) as found:
        first = await found.one.ask(ids, STEPS)
        turn = [*ids, *first.tokens[:-1], END, *drawn(20, 13)]
        await found.told("one", turn, held)
        async with store(found.broker.address, "one"):
            await found.leave()
            await found.told("store", turn, held)
            back = await found.other.ask(turn, STEPS)
            assert back.tokens == (await found.alone.ask(turn, STEPS)).tokens
            assert back.cached == held
    assert set(found.ended) == {State.DONE}  # the store takes this reply, too


async def test_a_gated_delta_nets_shared_prompt_and_its_replies(
    vllm_python: Path, tmp_path: Path
) -> None:
    """Check that a store that is there from the start keeps at once a prompt that several share.

    An engine of one rank goes on from a reply of an engine of two. Then it has the keys of the
    shared prompt, and no state there: when another prompt begins with it, the state comes from the
    store.
    """
    model = write_checkpoint(HYBRIDS["qwen3_next"].make, tmp_path / "model")
    engine = {"max_model_len": 1024, "dtype": "bfloat16", "skip_tokenizer_init": False}
    one = Options(model, 2, prefix_caching=True, extra=TELL, engine=engine)
    shared = drawn(780)
    async with (
        finders(vllm_python, tmp_path, one, replace(one, tp=1)) as found,
        store(found.broker.address, "one"),
    ):
        for number in range(3):
            ids = shared + drawn(30, number)
            said = await found.one.ask(ids, STEPS, logprobs=2)
            assert said.cached == (768 if number else 0)
        await found.told("store", shared, 768)
        turn, held = [*ids, *said.tokens[:-1], END, *drawn(10, 13)], len(ids) + STEPS - 1
        await found.told("store", turn, held)
        await found.leave()
        prompts = [turn, shared + drawn(5, 14), shared + drawn(5, 15)]
        answers = [await found.other.ask(one, STEPS, logprobs=2) for one in prompts]
        right = [await found.alone.ask(one, STEPS, logprobs=2) for one in prompts]
        assert assert_alike(answers, right) > STEPS
        assert [one.cached for one in answers] == [held, 768, 768]
        assert set(found.ended) == {State.DONE}
