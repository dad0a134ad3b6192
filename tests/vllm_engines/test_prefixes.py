"""Prefixes by content, between real engines that no router brings together, and a store.

What one engine has cached, at its tensor parallelism and in blocks of its own size, another one
loads; the second turn of a conversation goes on from where the first one's reply ended. A store
keeps what an engine hands over that leaves.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from restow.broker.core.common.keys import State
from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.closeness import assert_alike
from vllm_harness.engine import Options
from vllm_harness.house import END, MODEL, STEPS, TELL, House, both_sides, drawn, store, vllm_house
from vllm_harness.hybrid_checkpoints import HYBRIDS
from vllm_harness.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(900)


async def check_that_a_store_keeps_what_an_engine_had(
    house: House, prompt_tokens: int, held_tokens: int
) -> None:
    """Check that the other engine goes on from a reply of `one`, when that engine has left.

    The store comes after the reply: it has only what the engine hands over when it leaves.
    """
    ids, before = drawn(prompt_tokens, 21), house.ended
    first = await house["one"].ask(ids, STEPS)
    turn = [*ids, *first.tokens[:-1], END, *drawn(20, 23)]
    await house.told("one", turn, held_tokens)
    async with store(house.broker.address, "one"):
        await house.leave("one")
        await house.told("store", turn, held_tokens)
        back = await house["other"].ask(turn, STEPS)
        assert back.tokens == (await house.alone("other", turn)).tokens
        assert back.cached == held_tokens
        # The store may be taking this reply, too, when it is closed.
        assert set(house.ended - before) == {State.DONE}


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
async def test_attention_and_windows_in_blocks_of_other_sizes_at_another_tp(
    vllm_python: Path, tmp_path: Path, kind: str
) -> None:
    model = tiny_model(kind, tmp_path / "model")
    wide = Options(model, prefix_caching=True, extra=TELL, engine={"block_size": 32})
    split = replace(wide, tp=2, engine={"block_size": 32 if kind == "gemma3_text" else 64})
    ids = drawn(150)
    async with vllm_house(vllm_python, tmp_path, both_sides(one=wide, other=split)) as house:
        first = await house["one"].ask(ids, STEPS)
        assert first.cached == 0
        await house.told("one", ids, 128)
        longer = ids[:140] + drawn(70, 12)
        answer = await house["other"].ask(longer, STEPS)
        assert answer.cached == 128
        assert house.ended == {State.DONE: 1}
        # The second turn, asked of the first engine: the other one has said more of it since.
        turn = longer + list(answer.tokens) + drawn(20, 13)
        await house.told("other", turn, 192)
        back = await house["one"].ask(turn, STEPS)
        assert back.cached == 192
        assert house.ended == {State.DONE: 2}
        for asked, said in ((longer, answer), (turn, back)):
            assert said.tokens == (await house.alone("one", asked)).tokens
        if kind == "llama":
            await check_that_a_store_keeps_what_an_engine_had(house, 150, 160)


async def test_a_conversation_goes_on_where_the_reply_ended(
    vllm_python: Path, tmp_path: Path
) -> None:
    """Check that the recall model in float32 says the same tokens.

    With prefix caching its prompts must fit into one block (docs/vllm.md, fault 1), so nothing but
    the end of a reply is ever found.
    """
    one = Options(MODEL, prefix_caching=True, extra=TELL)
    wanted = both_sides(one=one, other=replace(one, tp=2, conv_layout="DS"))
    async with vllm_house(vllm_python, tmp_path, wanted) as house:
        said = drawn(40)
        for number, name in enumerate(("one", "other", "one", "other")):
            before = len(said)
            answer = await house[name].ask(said, 9)
            assert answer.tokens == (await house.alone("one", said, 9)).tokens
            # The last token that was said is not computed; the prompt has another in its place.
            assert answer.cached == (0 if not number else before - 6)
            said = [*said, *answer.tokens[:-1], END, *drawn(5, number)]
            await house.told(name, said, before + 8)
        assert house.ended == {State.DONE: 3}
        await check_that_a_store_keeps_what_an_engine_had(house, 40, 40 + STEPS - 1)


@pytest.mark.parametrize(("first_tp", "second_tp"), [(1, 2), (2, 1)])
async def test_a_gated_delta_net_at_another_tp(
    vllm_python: Path, tmp_path: Path, first_tp: int, second_tp: int
) -> None:
    model = write_checkpoint(HYBRIDS["qwen3_next"].make, tmp_path / "model")
    engine = {"max_model_len": 1024, "dtype": "bfloat16", "skip_tokenizer_init": False}
    one = Options(model, first_tp, prefix_caching=True, extra=TELL, engine=engine)
    wanted = both_sides(one=one, other=replace(one, tp=second_tp))
    ids = drawn(800)
    async with vllm_house(vllm_python, tmp_path, wanted) as house:
        first = await house["one"].ask(ids, STEPS, logprobs=2)
        await house.told("one", ids, 768)  # of blocks of 256 tokens or 384
        # Few tokens after what is found: of an older state less is left in what is said.
        prompts = [ids[:785], ids[:775] + drawn(10, 12)]
        answers = [await house["other"].ask(one, STEPS, logprobs=2) for one in prompts]
        print("not computed:", first.cached, [one.cached for one in answers])
        assert [one.cached for one in answers] == [768, 768]
        # Where a reply ended: at a token of its own, in no block that vLLM has a name for.
        turn = prompts[1] + list(answers[1].tokens[:-1]) + [END] + drawn(10, 13)
        said = len(prompts[1]) + STEPS - 1
        await house.told("other", turn, said)
        done = house.ended[State.DONE]
        assert done >= 1
        back = await house["one"].ask(turn, STEPS, logprobs=2)
        assert back.cached == said
        assert house.ended[State.DONE] == done + 1
        right = [await house.alone("one", one, logprobs=2) for one in (*prompts, turn)]
        assert assert_alike([*answers, back], right) > STEPS
        if first_tp == 2:
            await check_a_shared_prompt_and_its_replies(house)


async def check_a_shared_prompt_and_its_replies(house: House) -> None:
    """Check that a store keeps at once a prompt that several share.

    An engine of one rank goes on from a reply of an engine of two. Then it has the keys of the
    shared prompt, and no state there: when another prompt begins with it, the state comes from the
    store.
    """
    shared, before = drawn(780, 31), house.ended
    async with store(house.broker.address, "one"):
        for number in range(3):
            ids = shared + drawn(30, 40 + number)
            said = await house["one"].ask(ids, STEPS, logprobs=2)
            assert said.cached == (768 if number else 0)
        await house.told("store", shared, 768)
        turn, held = [*ids, *said.tokens[:-1], END, *drawn(10, 43)], len(ids) + STEPS - 1
        await house.told("store", turn, held)
        await house.leave("one")
        prompts = [turn, shared + drawn(5, 44), shared + drawn(5, 45)]
        answers = [await house["other"].ask(one, STEPS, logprobs=2) for one in prompts]
        right = [await house.alone("other", one, logprobs=2) for one in prompts]
        assert assert_alike(answers, right) > STEPS
        assert [one.cached for one in answers] == [held, 768, 768]
        assert set(house.ended - before) == {State.DONE}
