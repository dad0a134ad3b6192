"""An engine that is P and D changes sides, and loses nothing of what it holds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from restow.broker.client import AsyncAdminClient
from restow.broker.core.common.keys import State
from vllm_harness.engine import Options
from vllm_harness.house import (
    END,
    MODEL,
    SOON_S,
    STEPS,
    TELL,
    House,
    both_sides,
    drawn,
    vllm_house,
)

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Turn:
    """The next turn after a reply, and how many of its tokens the engine that replied holds."""

    ids: list[int]
    held_tokens: int


async def replied_by(house: House, p: str, d: str, seed: int) -> Turn:
    """Have P and D answer a prompt; return its next turn when D has told that it has the state."""
    ids = drawn(40, seed)
    said = (await house.hand_over(p, d, f"from {p}, {seed}", ids)).d
    assert said.cached == len(ids) - 1
    assert said.tokens == (await house.alone(d, ids)).tokens
    turn = Turn([*ids, *said.tokens[:-1], END, *drawn(20, 100 + seed)], len(ids) + STEPS - 1)
    await house.told(d, turn.ids, turn.held_tokens, asking=p)
    return turn


async def change_sides(house: House, name: str) -> None:
    """Drain an engine until its handoffs have ended, and take it back."""
    async with AsyncAdminClient(house.broker.address) as admin, asyncio.timeout(SOON_S):
        while await admin.drain_engine(name):  # noqa: ASYNC110 - the broker tells no events
            await asyncio.sleep(0.05)
        await admin.drain_engine(name, draining=False)


async def test_what_an_engine_held_before_it_changed_sides_is_taken_from_it(
    vllm_python: Path, tmp_path: Path
) -> None:
    one = Options(MODEL, prefix_caching=True, extra=TELL)
    wanted = both_sides(one=one, other=replace(one, tp=2, conv_layout="DS"))
    async with vllm_house(vllm_python, tmp_path, wanted) as house:
        turns = [await replied_by(house, "other", "one", 1)]
        # D becomes P, and D again.
        await change_sides(house, "one")
        of_other = await replied_by(house, "one", "other", 2)
        await change_sides(house, "one")
        # Nobody replied when it was drained, and the drain is over: what could move stays.
        stays = await house["one"].ask(drawn(40, 4), STEPS, params={"movable": True})
        assert (len(stays.tokens), stays.stop_reason) == (STEPS, None)
        turns.append(await replied_by(house, "other", "one", 3))
        for turn, name in (*((turn, "other") for turn in turns), (of_other, "one")):
            said = await house[name].ask(turn.ids, STEPS)
            assert (said.error, said.cached) == ("", turn.held_tokens)
            assert said.tokens == (await house.alone(name, turn.ids)).tokens
        assert house.ended == {State.DONE: 6}
