"""Prefixes by content, between real engines that no router brings together.

What one engine has cached, at its tensor parallelism and in blocks of its own size, another one
loads; the second turn of a conversation goes on from where the first one's reply ended.
"""

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
from vllm_harness.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
async def test_attention_and_windows_in_blocks_of_other_sizes_at_another_tp(
    vllm_python: Path, tmp_path: Path, kind: str
) -> None:
    model = tiny_model(kind, tmp_path / "model")
    wide = Options(model, 1, prefix_caching=True, extra=TELL, engine={"block_size": 32})
    split = replace(wide, tp=2, engine={"block_size": 32 if kind == "gemma3_text" else 64})
    ids = drawn(150)
    async with finders(vllm_python, tmp_path, wide, split) as found:
        first = await found.one.ask(ids, STEPS)
        await found.told("one", ids, 128)
        longer = ids[:140] + drawn(70, 12)
        answer = await found.other.ask(longer, STEPS)
        assert answer.tokens == (await found.alone.ask(longer, STEPS)).tokens
        assert answer.cached == 128
        assert found.ended == {State.DONE: 1}
        # The second turn, asked of the first engine: the other one has said more of it since.
        turn = longer + list(answer.tokens) + drawn(20, 13)
        await found.told("other", turn, 192)
        back = await found.one.ask(turn, STEPS)
        assert back.tokens == (await found.alone.ask(turn, STEPS)).tokens
        assert back.cached == 192
        assert found.ended == {State.DONE: 2}
        assert first.cached == 0


@pytest.mark.parametrize(("first_tp", "second_tp"), [(1, 2), (2, 1)])
async def test_a_gated_delta_net_at_another_tp(
    vllm_python: Path, tmp_path: Path, first_tp: int, second_tp: int
) -> None:
    model = write_checkpoint(HYBRIDS["qwen3_next"].make, tmp_path / "model")
    engine = {"max_model_len": 1024, "dtype": "bfloat16", "skip_tokenizer_init": False}
    one = Options(model, first_tp, prefix_caching=True, extra=TELL, engine=engine)
    ids = drawn(800)
    async with finders(vllm_python, tmp_path, one, replace(one, tp=second_tp)) as found:
        first = await found.one.ask(ids, STEPS, logprobs=2)
        await found.told("one", ids, 768)  # of blocks of 256 tokens or 384
        # Few tokens after what is found: of an older state less is left in what is said.
        prompts = [ids[:785], ids[:775] + drawn(10, 12)]
        answers = [await found.other.ask(one, STEPS, logprobs=2) for one in prompts]
        right = [await found.alone.ask(one, STEPS, logprobs=2) for one in prompts]
        assert assert_alike(answers, right) > STEPS
        print("not computed:", first.cached, [one.cached for one in answers])
        assert [one.cached for one in answers] == [768, 768]
        assert found.ended[State.DONE] >= 1
        # Where a reply ended: at a token of its own, in no block that vLLM has a name for.
        turn = prompts[1] + list(answers[1].tokens[:-1]) + [END] + drawn(10, 13)
        said = len(prompts[1]) + STEPS - 1
        await found.told("other", turn, said)
        done = found.ended[State.DONE]
        back = await found.one.ask(turn, STEPS, logprobs=2)
        assert back.cached == said
        assert found.ended[State.DONE] == done + 1
        assert assert_alike([back], [await found.alone.ask(turn, STEPS, logprobs=2)])


async def test_a_conversation_goes_on_where_the_reply_ended(
    vllm_python: Path, tmp_path: Path
) -> None:
    """Check that the recall model in float32 says the same tokens.

    With prefix caching its prompts must fit into one block (docs/vllm.md, fault 1), so nothing but
    the end of a reply is ever found.
    """
    one = Options(MODEL, 1, prefix_caching=True, extra=TELL)
    other = replace(one, tp=2, conv_layout="DS")
    async with finders(vllm_python, tmp_path, one, other) as found:
        said, turns = drawn(40), [found.one, found.other, found.one, found.other]
        for number, engine in enumerate(turns):
            before = len(said)
            answer = await engine.ask(said, 9)
            assert answer.tokens == (await found.alone.ask(said, 9)).tokens
            # The last token that was said is not computed; the prompt has another in its place.
            assert answer.cached == (0 if not number else before - 6)
            said = [*said, *answer.tokens[:-1], END, *drawn(5, number)]
            name = "one" if engine is found.one else "other"
            await found.told(name, said, before + 8)
        assert found.ended == {State.DONE: 3}


async def test_without_the_setting_nothing_is_said(vllm_python: Path, tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "model")
    off = Options(model, 1, prefix_caching=True, engine={"block_size": 32})
    async with finders(vllm_python, tmp_path, off, off) as found:
        ids = drawn(150)
        await found.one.ask(ids, STEPS)
        answer = await found.other.ask(ids, STEPS)
        assert answer.cached == 0
        prefixes = found.broker.hub.directory.prefixes
        assert (prefixes.asked, prefixes.holders) == (0, {})
