"""D is asked at once with P, reads P's state while P computes it, and holds no more than fits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent_harness.waiting import until
from restow.demo.recall.task import Prompt
from vllm_harness.engine import Options
from vllm_harness.house import MODEL, House, long_prompts, vllm_house

pytestmark = pytest.mark.timeout(600)
STEPS = 16
SETTLED_S = 1.0
MANY = 16
SHORT_OF_BLOCKS = {
    "max_num_batched_tokens": 64,
    "long_prefill_token_threshold": 16,
    "enable_chunked_prefill": True,
    "num_gpu_blocks_override": 14,
}
"""P computes four prompts side by side, and has no room for the second block of each."""
FULL_SOON = {"num_gpu_blocks_override": 12}
"""Room for fewer prompts than are asked for at once."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def house(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[House]:
    wanted = {
        "P": Options(MODEL, role="kv_producer", engine=SHORT_OF_BLOCKS),
        "D": Options(MODEL, 2, role="kv_consumer", conv_layout="DS"),
        "small D": Options(MODEL, role="kv_consumer", engine=FULL_SOON),
    }
    logs = tmp_path_factory.mktemp("logs")
    async with vllm_house(vllm_python, logs, wanted, early_bytes=0) as made:
        yield made


def events(house: House, name: str) -> list[str]:
    """Return what has happened to a handoff, by its timeline."""
    timeline = house.broker.hub.directory.ledger.find("default", name).timeline
    return [event for _, event, _ in timeline]


async def test_leading_tokens_are_read_while_p_computes(house: House) -> None:
    live = house.broker.hub.directory.ledger.live
    for number, ids in enumerate(long_prompts()[:4]):
        name = f"read early {number}"
        answer = asyncio.create_task(house["D"].ask(ids, STEPS, {"handoff_id": name}))
        await until(lambda name=name: ("default", name) in live)  # type: ignore[misc]
        await house["P"].ask(ids, 1, {"handoff_id": name})
        assert (await answer).tokens == (await house.alone("D", ids, STEPS)).tokens
        # The first handoff may wait for the plan.
        assert number == 0 or "read early" in events(house, name)


async def test_a_d_that_is_full_waits_without_pages_and_one_that_gives_up_makes_room(
    house: House, prompts: tuple[Prompt, ...]
) -> None:
    live = house.broker.hub.directory.ledger.live
    p, d = house["P"], house["small D"]

    def asking() -> set[str]:
        return {name for (_, name), one in live.items() if one.destination is not None}

    p.hold()
    asked = {f"h{number}": prompt for number, prompt in enumerate(prompts)}
    given = [p.begin([*one.token_ids], 1, {"handoff_id": name}) for name, one in asked.items()]
    taken = {
        name: d.begin([*one.token_ids], len(one.answer_ids), {"handoff_id": name})
        for name, one in asked.items()
    }
    await until(lambda: bool(asking()))
    await asyncio.sleep(SETTLED_S)
    first = asking()
    assert 0 < len(first) < len(asked)
    gone = min(first)
    d.abort(taken.pop(gone))
    await until(lambda: len(asking()) == len(first) and gone not in asking())
    p.resume()
    for name, number in taken.items():
        assert (await d.answer(number)).tokens == asked[name].answer_ids
    for number in given:
        await p.answer(number)
    await until(lambda: not live)


async def test_a_p_short_of_blocks_preempts_what_it_published_early_and_all_is_handed_over(
    house: House,
) -> None:
    live, (p, d) = house.broker.hub.directory.ledger.live, (house["P"], house["D"])
    asked = {f"many {number}": long_prompts()[number % 4] for number in range(MANY)}
    taken = {name: d.begin(ids, STEPS, {"handoff_id": name}) for name, ids in asked.items()}
    await until(lambda: len(live) == MANY)
    given = [p.begin(ids, 1, {"handoff_id": name}) for name, ids in asked.items()]
    found = {name: await d.answer(number) for name, number in taken.items()}
    for number in given:
        assert not (await p.answer(number)).error
    for name, ids in asked.items():
        assert found[name].tokens == (await house.alone("D", ids, STEPS)).tokens
    assert any("taken back" in events(house, name) for name in asked)
