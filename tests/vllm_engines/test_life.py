"""What happens to requests on a real vLLM when things do not go their usual way."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from agent_harness.waiting import until
from restow.broker.core.common.keys import State
from restow.demo.recall.model import load_model
from restow.demo.recall.task import Prompt
from vllm_harness.engine import Answer, Options
from vllm_harness.house import MODEL, House, vllm_house

pytestmark = pytest.mark.timeout(600)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    """Run a P and a D of one rank; P computes two prompts at once, so that others wait."""
    logs = tmp_path_factory.mktemp("logs")
    embeds = {"enable_prompt_embeds": True}
    wanted = {
        "P": Options(MODEL, role="kv_producer", engine={"max_num_seqs": 2, **embeds}),
        "D": Options(MODEL, role="kv_consumer", conv_layout="DS", engine=embeds),
    }
    async with vllm_house(vllm_python, logs, wanted) as house:
        yield house


async def test_routers_that_carry_parameters_work_unchanged(
    pair: House, prompts: tuple[Prompt, ...]
) -> None:
    for prompt in prompts[:3]:
        ids = list(prompt.token_ids)
        given = await pair["P"].ask(ids, 1, {"do_remote_decode": True})
        assert given.params is not None
        answer = await pair["D"].ask(ids, len(prompt.answer_ids), given.params)
        assert answer.tokens == prompt.answer_ids


async def test_engines_without_a_name_have_vllms_own_id(pair: House) -> None:
    names = [key.engine_id for key in pair.broker.hub.directory.members.engines]
    assert [str(uuid.UUID(name)) for name in names] == names
    assert len({*names}) == 2


async def test_prompts_that_come_as_embeddings(
    pair: House, prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    # There are no token ids to cut, and none to compare.
    table = load_model().get_input_embeddings().weight.detach()

    async def hand_over(number: int, prompt: Prompt) -> Answer:
        file = tmp_path / f"{number}.pt"
        torch.save(table[torch.tensor(prompt.token_ids)], file)
        both = {"embeds": str(file)}
        said = await pair.hand_over("P", "D", f"embeds {number}", [], 6, both=both)
        assert said.p.params is not None
        assert said.p.params["remote_num_tokens"] == len(prompt.token_ids) - 1
        return said.d

    before = pair.ended[State.DONE]
    found = await asyncio.gather(*(hand_over(i, one) for i, one in enumerate(prompts)))
    assert [one.tokens for one in found] == [one.answer_ids for one in prompts]
    assert pair.ended[State.DONE] == before + len(prompts)


async def test_a_prompt_of_one_token_is_computed_by_d(pair: House) -> None:
    before = pair.ended[State.CANCELLED]
    given = await pair["P"].ask([5], 1, {"do_remote_decode": True})
    answer = await pair["D"].ask([5], 2, given.params)
    assert (answer.finish, len(answer.tokens)) == ("length", 2)
    await until(lambda: pair.ended[State.CANCELLED] == before + 1)


async def test_a_handoff_that_never_comes_is_an_error_and_not_a_wrong_answer(
    pair: House, prompts: tuple[Prompt, ...]
) -> None:
    params = {"handoff_id": "nowhere", "timeout_ms": 1500}
    answer = await pair["D"].ask(list(prompts[0].token_ids), 6, params)
    assert answer.finish == "error" or answer.error
    assert answer.tokens == ()
    again = await pair["P"].ask(list(prompts[0].token_ids), 1, {"do_remote_decode": True})
    answer = await pair["D"].ask(list(prompts[0].token_ids), 6, again.params)
    assert answer.tokens == prompts[0].answer_ids


@pytest.mark.parametrize("params", [{"do_remote_prefill": True}, {"handoff_id": 7}])
async def test_parameters_that_are_no_use_are_an_error_on_both_sides(
    pair: House, prompts: tuple[Prompt, ...], params: dict[str, Any]
) -> None:
    for engine in (pair["P"], pair["D"]):
        for ids in (list(prompts[0].token_ids), [5]):
            answer = await engine.ask(ids, 6, params)
            assert answer.finish == "error" or answer.error
            assert answer.tokens == ()
        assert (await engine.ask(list(prompts[0].token_ids), 6)).tokens == prompts[0].answer_ids


async def test_a_prompt_of_another_length_is_an_error(
    pair: House, prompts: tuple[Prompt, ...]
) -> None:
    # The state stands elsewhere than D goes on from, and an answer from it would look right. The
    # state is still there for a D that asks with the right prompt.
    ids = list(prompts[0].token_ids)
    alone = await pair["D"].ask(ids[:-4], 6)
    given = await pair["P"].ask(ids[:-4], 1, {"do_remote_decode": True})
    answer = await pair["D"].ask(ids, 6, given.params)
    assert answer.finish == "error" or answer.error
    assert answer.tokens == ()
    answer = await pair["D"].ask(ids[:-4], 6, given.params)
    assert answer.tokens == alone.tokens != ()


async def test_d_that_is_aborted_while_it_waits_frees_p(
    pair: House, prompts: tuple[Prompt, ...]
) -> None:
    live = pair.broker.hub.directory.ledger.live
    number = pair["D"].begin(list(prompts[1].token_ids), 6, {"handoff_id": "aborted"})
    await until(lambda: ("default", "aborted") in live)
    pair["D"].abort(number)
    await until(lambda: ("default", "aborted") not in live)
    given = await pair["P"].ask(list(prompts[1].token_ids), 1, {"handoff_id": "aborted"})
    assert given.finish == "length"
    await until(lambda: not live)


async def test_p_that_is_aborted_leaves_no_garbage(
    pair: House, prompts: tuple[Prompt, ...]
) -> None:
    """Check that D is right or has nothing when P's requests are aborted.

    Of every four, one is aborted before it is computed, and two at any time.
    """
    live = pair.broker.hub.directory.ledger.live

    def ids(prompt: Prompt) -> list[int]:
        return list(prompt.token_ids)

    pair["P"].hold()
    numbers = [
        pair["P"].begin(ids(one), 1, {"handoff_id": f"aborted {i}"})
        for i, one in enumerate(prompts)
    ]
    await until(lambda: ("default", f"aborted {len(prompts) - 1}") in live)
    for number in numbers[1::4]:
        pair["P"].abort(number)
    await until(lambda: len(live) == len(prompts) - len(numbers[1::4]))
    pair["P"].resume()
    for number in reversed(numbers[2::4] + numbers[3::4]):
        pair["P"].abort(number)
    answers = await asyncio.gather(
        *(
            pair["D"].ask(ids(one), 6, {"handoff_id": f"aborted {i}", "timeout_ms": 3000})
            for i, one in enumerate(prompts)
        )
    )
    right = tuple(prompt.answer_ids for prompt in prompts)
    tokens = tuple(answer.tokens for answer in answers)
    assert tokens[0::4] == right[0::4]
    assert tokens[1::4] == ((),) * len(numbers[1::4])
    assert all(said in ((), due) for said, due in zip(tokens, right, strict=True))
    await until(lambda: not live)
    given = await pair["P"].ask(ids(prompts[0]), 1, {"do_remote_decode": True})
    answer = await pair["D"].ask(ids(prompts[0]), 6, given.params)
    assert answer.tokens == prompts[0].answer_ids


async def test_a_killed_p_is_an_error(pair: House, prompts: tuple[Prompt, ...]) -> None:
    # P had published two states, and not yet begun with another. This is the module's last test.
    ids = [list(prompt.token_ids) for prompt in prompts[2:4]]
    right = [prompt.answer_ids for prompt in prompts[2:4]]
    given = [await pair["P"].ask(one, 1, {"do_remote_decode": True}) for one in ids]
    assert all(answer.params for answer in given)
    pair["P"].kill()
    # Until its memory is gone, what D reads of it is right.
    dying = await pair["D"].ask(ids[0], 6, given[0].params)
    assert dying.tokens in ((), right[0])
    await pair.deserted()
    for params in (given[1].params, {"handoff_id": "not begun", "timeout_ms": 3000}):
        answer = await pair["D"].ask(ids[1], 6, params)
        assert answer.finish == "error" or answer.error
        assert answer.tokens == ()
    alone = await pair["D"].ask(ids[1], 6)
    assert alone.tokens == right[1]
