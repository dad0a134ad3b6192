"""T7: P or D alone is replaced, again and again; the first request is served each time."""

from __future__ import annotations

import pytest

from chaos.scene import prompt, scene

pytestmark = [pytest.mark.sampled, pytest.mark.timeout(240)]
ROUNDS = 20


async def test_t7_the_first_request_of_every_life_is_served() -> None:
    # Nothing is known of the earlier life: its agent has another name, and its memory is gone.
    async with scene() as world:
        for number in range(ROUNDS):
            await world.replace("PD"[number % 2])
            assert await world.hand_over(prompt(f"{number}")) == ("DONE", "")
        await world.heals()


async def test_t7_a_state_of_the_life_before_is_refused() -> None:
    async with scene() as world:
        await world.ready(prompt("a"))
        await world.replace("P")
        world.cluster.decode(prompt("a", timeout_ms=2000))
        state, reason = await world.ends("a")
        assert state in ("FAILED", "EXPIRED", "REFUSED")
        assert reason
        await world.heals()
