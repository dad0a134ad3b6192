"""What happens to requests on a real vLLM when things do not go their usual way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agent_harness.waiting import until
from restow.broker.core.common.keys import State
from restow.demo.recall.task import Prompt
from vllm_harness.engine import Options
from vllm_harness.pair import MODEL, Pair, deserted, vllm_pair

pytestmark = pytest.mark.timeout(600)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """Run P with TP 1 and D with TP 1; P computes two prompts at once, so that others wait."""
    logs = tmp_path_factory.mktemp("logs")
    prefill = Options(MODEL, engine={"max_num_seqs": 2})
    async with vllm_pair(vllm_python, logs, prefill, Options(MODEL), alone=False) as made:
        yield made


def ended(pair: Pair) -> dict[State, int]:
    return dict(pair.broker.hub.directory.ledger.statistics.by_state)


async def test_routers_that_carry_parameters_work_unchanged(
    pair: Pair, prompts: tuple[Prompt, ...]
) -> None:
    for prompt in prompts[:3]:
        ids = list(prompt.token_ids)
        given = await pair.prefill.ask(ids, 1, {"do_remote_decode": True})
        assert given.params is not None
        answer = await pair.decode.ask(ids, len(prompt.answer_ids), given.params)
        assert answer.tokens == prompt.answer_ids


async def test_a_prompt_of_one_token_is_computed_by_d(pair: Pair) -> None:
    before = ended(pair).get(State.CANCELLED, 0)
    given = await pair.prefill.ask([5], 1, {"do_remote_decode": True})
    answer = await pair.decode.ask([5], 2, given.params)
    assert (answer.finish, len(answer.tokens)) == ("length", 2)
    await until(lambda: ended(pair).get(State.CANCELLED, 0) == before + 1)


async def test_a_handoff_that_never_comes_is_an_error_and_not_a_wrong_answer(
    pair: Pair, prompts: tuple[Prompt, ...]
) -> None:
    params = {"handoff_id": "nowhere", "timeout_ms": 1500}
    answer = await pair.decode.ask(list(prompts[0].token_ids), 6, params)
    assert answer.finish == "error" or answer.error
    assert answer.tokens == ()
    again = await pair.prefill.ask(list(prompts[0].token_ids), 1, {"do_remote_decode": True})
    answer = await pair.decode.ask(list(prompts[0].token_ids), 6, again.params)
    assert answer.tokens == prompts[0].answer_ids


@pytest.mark.parametrize("params", [{"do_remote_prefill": True}, {"handoff_id": 7}])
async def test_parameters_that_are_no_use_are_an_error_on_both_sides(
    pair: Pair, prompts: tuple[Prompt, ...], params: dict[str, Any]
) -> None:
    for engine in (pair.prefill, pair.decode):
        for ids in (list(prompts[0].token_ids), [5]):
            answer = await engine.ask(ids, 6, params)
            assert answer.finish == "error" or answer.error
            assert answer.tokens == ()
        assert (await engine.ask(list(prompts[0].token_ids), 6)).tokens == prompts[0].answer_ids


async def test_a_prompt_of_another_length_is_an_error(
    pair: Pair, prompts: tuple[Prompt, ...]
) -> None:
    # The state stands elsewhere than D goes on from, and an answer from it would look right. The
    # state is still there for a D that asks with the right prompt.
    ids = list(prompts[0].token_ids)
    alone = await pair.decode.ask(ids[:-4], 6)
    given = await pair.prefill.ask(ids[:-4], 1, {"do_remote_decode": True})
    answer = await pair.decode.ask(ids, 6, given.params)
    assert answer.finish == "error" or answer.error
    assert answer.tokens == ()
    answer = await pair.decode.ask(ids[:-4], 6, given.params)
    assert answer.tokens == alone.tokens != ()


async def test_d_that_is_aborted_while_it_waits_frees_p(
    pair: Pair, prompts: tuple[Prompt, ...]
) -> None:
    live = pair.broker.hub.directory.ledger.live
    number = pair.decode.begin(list(prompts[1].token_ids), 6, {"handoff_id": "aborted"})
    await until(lambda: ("default", "aborted") in live)
    pair.decode.abort(number)
    await until(lambda: ("default", "aborted") not in live)
    given = await pair.prefill.ask(list(prompts[1].token_ids), 1, {"handoff_id": "aborted"})
    assert given.finish == "length"
    await until(lambda: not live)


async def test_p_that_is_aborted_leaves_no_garbage(pair: Pair, prompts: tuple[Prompt, ...]) -> None:
    """Check that D is right or has nothing when P's requests are aborted.

    Of every four, one is aborted before it is computed, and two at any time.
    """
    live = pair.broker.hub.directory.ledger.live

    def ids(prompt: Prompt) -> list[int]:
        return list(prompt.token_ids)

    pair.prefill.hold()
    numbers = [
        pair.prefill.begin(ids(one), 1, {"handoff_id": f"aborted {i}"})
        for i, one in enumerate(prompts)
    ]
    await until(lambda: ("default", f"aborted {len(prompts) - 1}") in live)
    for number in numbers[1::4]:
        pair.prefill.abort(number)
    await until(lambda: len(live) == len(prompts) - len(numbers[1::4]))
    pair.prefill.resume()
    for number in reversed(numbers[2::4] + numbers[3::4]):
        pair.prefill.abort(number)
    answers = await asyncio.gather(
        *(
            pair.decode.ask(ids(one), 6, {"handoff_id": f"aborted {i}", "timeout_ms": 3000})
            for i, one in enumerate(prompts)
        )
    )
    right = tuple(prompt.answer_ids for prompt in prompts)
    tokens = tuple(answer.tokens for answer in answers)
    assert tokens[0::4] == right[0::4]
    assert tokens[1::4] == ((),) * len(numbers[1::4])
    assert all(said in ((), due) for said, due in zip(tokens, right, strict=True))
    await until(lambda: not live)
    given = await pair.prefill.ask(ids(prompts[0]), 1, {"do_remote_decode": True})
    answer = await pair.decode.ask(ids(prompts[0]), 6, given.params)
    assert answer.tokens == prompts[0].answer_ids


async def test_a_killed_p_is_an_error(pair: Pair, prompts: tuple[Prompt, ...]) -> None:
    # P had published two states, and not yet begun with another. This is the module's last test.
    ids = [list(prompt.token_ids) for prompt in prompts[2:4]]
    right = [prompt.answer_ids for prompt in prompts[2:4]]
    given = [await pair.prefill.ask(one, 1, {"do_remote_decode": True}) for one in ids]
    assert all(answer.params for answer in given)
    pair.prefill.kill()
    # Until its memory is gone, what D reads of it is right.
    dying = await pair.decode.ask(ids[0], 6, given[0].params)
    assert dying.tokens in ((), right[0])
    await deserted(pair.broker)
    for params in (given[1].params, {"handoff_id": "not begun", "timeout_ms": 3000}):
        answer = await pair.decode.ask(ids[1], 6, params)
        assert answer.finish == "error" or answer.error
        assert answer.tokens == ()
    alone = await pair.decode.ask(ids[1], 6)
    assert alone.tokens == right[1]
