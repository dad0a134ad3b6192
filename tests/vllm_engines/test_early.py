"""D is asked at once with P, reads P's state while P computes it, and holds no more than fits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent_harness.waiting import until
from restow.broker.server.serve import RunningBroker
from restow.demo.recall.task import Prompt
from vllm_harness.engine import Options
from vllm_harness.long_prompts import long_prompts
from vllm_harness.pair import MODEL, vllm_pair

pytestmark = pytest.mark.timeout(600)
STEPS = 16
ROOM_BLOCKS = 12
"""For fewer prompts than are asked for at once."""
SETTLED_S = 1.0
MANY = 16
SHORT_OF_BLOCKS = {
    "max_num_batched_tokens": 64,
    "long_prefill_token_threshold": 16,
    "enable_chunked_prefill": True,
    "num_gpu_blocks_override": 14,
}
"""P computes four prompts side by side, and has no room for the second block of each."""
STEP_TOKENS = {"max_num_batched_tokens": 32, "enable_chunked_prefill": True}


def read_early(broker: RunningBroker, name: str) -> list[object]:
    """Return the tokens up to which a handoff was read early, by its timeline."""
    handoff = broker.hub.directory.ledger.find("default", name)
    return [detail for _, event, detail in handoff.timeline if event == "read early"]


async def test_leading_tokens_are_read_while_p_computes(vllm_python: Path, tmp_path: Path) -> None:
    prefill, decode = Options(MODEL, engine=STEP_TOKENS), Options(MODEL, 2, conv_layout="DS")
    async with vllm_pair(vllm_python, tmp_path, prefill, decode, early_bytes=0) as pair:
        alone, prompts = pair.alone, long_prompts()[:3]
        assert alone is not None
        expected = [await alone.ask(ids, STEPS) for ids in prompts]
        live = pair.broker.hub.directory.ledger.live
        for number, ids in enumerate(prompts):
            name = f"h{number}"
            answer = asyncio.create_task(pair.decode.ask(ids, STEPS, {"handoff_id": name}))
            await until(lambda name=name: ("default", name) in live)  # type: ignore[misc]
            await pair.prefill.ask(ids, 1, {"handoff_id": name})
            assert (await answer).tokens == expected[number].tokens
            assert read_early(pair.broker, name)


async def test_a_d_that_is_full_waits_without_pages_and_one_that_gives_up_makes_room(
    vllm_python: Path, tmp_path: Path, prompts: tuple[Prompt, ...]
) -> None:
    few = Options(MODEL, engine={"num_gpu_blocks_override": ROOM_BLOCKS})
    async with vllm_pair(vllm_python, tmp_path, Options(MODEL), few, alone=False) as pair:
        live = pair.broker.hub.directory.ledger.live

        def asking() -> set[str]:
            return {name for (_, name), one in live.items() if one.destination is not None}

        pair.prefill.hold()
        ids = {f"h{number}": list(one.token_ids) for number, one in enumerate(prompts)}
        steps = {f"h{number}": len(one.answer_ids) for number, one in enumerate(prompts)}
        given = {name: pair.prefill.begin(ids[name], 1, {"handoff_id": name}) for name in ids}
        taken = {
            name: pair.decode.begin(ids[name], steps[name], {"handoff_id": name}) for name in ids
        }
        await until(lambda: bool(asking()))
        await asyncio.sleep(SETTLED_S)
        first = asking()
        assert 0 < len(first) < len(ids)
        gone = min(first)
        pair.decode.abort(taken.pop(gone))
        await until(lambda: len(asking()) == len(first) and gone not in asking())
        pair.prefill.resume()
        for name, number in taken.items():
            answer = await pair.decode.answer(number)
            assert answer.tokens == prompts[int(name[1:])].answer_ids
        for number in given.values():
            await pair.prefill.answer(number)
        await until(lambda: not live)


async def test_a_p_short_of_blocks_preempts_what_it_published_early_and_all_is_handed_over(
    vllm_python: Path, tmp_path: Path
) -> None:
    prefill = Options(MODEL, engine=SHORT_OF_BLOCKS)
    async with vllm_pair(vllm_python, tmp_path, prefill, Options(MODEL), early_bytes=0) as pair:
        alone = pair.alone
        assert alone is not None
        live, ledger = pair.broker.hub.directory.ledger.live, pair.broker.hub.directory.ledger
        prompts = {f"h{number}": long_prompts()[number % 4] for number in range(MANY)}
        expected = {name: (await alone.ask(ids, STEPS)).tokens for name, ids in prompts.items()}
        asked = {
            name: pair.decode.begin(ids, STEPS, {"handoff_id": name})
            for name, ids in prompts.items()
        }
        await until(lambda: len(live) == MANY)
        given = [pair.prefill.begin(ids, 1, {"handoff_id": name}) for name, ids in prompts.items()]
        for name, number in asked.items():
            assert (await pair.decode.answer(number)).tokens == expected[name]
        for number in given:
            assert not (await pair.prefill.answer(number)).error
        stories = [ledger.find("default", name).timeline for name in prompts]
        assert any(event == "taken back" for story in stories for _, event, _ in story)
