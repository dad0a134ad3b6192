"""T17: states that real engines keep, asked for by their content; broker and holders are killed."""

from __future__ import annotations

import asyncio

import pytest

from chaos.scene import Scene, prompt, scene
from chaos_harness.model import PAGE_TOKENS
from restow.broker.client import (
    AsyncAdminClient,
    BrokerCallError,
    BrokerUnreachableError,
    PrefixChain,
)
from restow.broker.families import ConvLayout
from stamped.kept_states import FORM, prefix_of
from stamped.requests import Prompt

pytestmark = [pytest.mark.sampled, pytest.mark.timeout(180)]
ENDS_S = 60.0
ONE = prompt("one")


async def holders(world: Scene, one: Prompt = ONE) -> set[str]:
    """Return the engines at which the broker finds the state.

    There are none while the broker or D is away.
    """
    prefix = prefix_of(one)
    ends = ((prefix.position_tokens, prefix.end_hash),) if prefix.end_hash else ()
    chain = PrefixChain(FORM, prefix.hashes, ends=ends)
    try:
        async with AsyncAdminClient(world.cluster.address("b")) as client:
            (found,) = await client.find([chain], engine_id="D")
    except (BrokerCallError, BrokerUnreachableError):  # nor is D, before it is back
        return set()
    return {one.engine_id for one in found if one.tokens == prefix.position_tokens}


async def is_held(world: Scene, by: str) -> None:
    """Wait until the broker finds the state at all of these engines, and at no other."""
    async with asyncio.timeout(ENDS_S):
        while await holders(world) != {*by}:  # noqa: ASYNC110 - the broker tells no events
            await asyncio.sleep(0.02)


async def asks(
    world: Scene, name: str, side: str = "D", keeps: bool = False, one: Prompt = ONE
) -> tuple[str, str]:
    """Have an engine demand the state, and return how the demand ends."""
    world.cluster.ask(one, name, side, keeps)
    return await world.ends(name, side, ENDS_S)


async def test_t17_a_state_goes_on_from_engine_to_engine() -> None:
    async with scene((2, 1)) as world:
        world.cluster.start_engine("E", 2, ConvLayout.SD, 2 * PAGE_TOKENS)
        await world.cluster.connected()
        assert await asks(world, "early") == ("CANCELLED", "NOT_HELD")
        world.cluster.compute(ONE)
        await is_held(world, "P")
        assert await asks(world, "first", "D", keeps=True) == ("DONE", "")
        await is_held(world, "PD")
        world.cluster.end_engine("P")
        await is_held(world, "D")
        assert await asks(world, "second", "E") == ("DONE", "")
        world.cluster.evict(None, "D")
        await is_held(world, "")
        assert await asks(world, "third", "E") == ("CANCELLED", "NOT_HELD")
        world.start("P")
        await world.cluster.connected()
        await world.heals()


async def test_t17_a_new_broker_is_told_again() -> None:
    async with scene((1, 2)) as world:
        world.cluster.compute(ONE)
        await is_held(world, "P")
        await world.restart_broker()
        await is_held(world, "P")
        assert await asks(world, "after") == ("DONE", "")
        world.cluster.evict(None, "P")
        await world.heals()


async def test_t17_a_holder_that_is_killed_while_it_gives() -> None:
    async with scene((1, 2)) as world:
        world.cluster.compute(ONE)
        await is_held(world, "P")
        world.cluster.worker("D.0").stop()  # it reads nothing meanwhile
        world.cluster.ask(ONE, "lost", "D")
        await world.cluster.reaches("lost", "READING")
        world.cluster.end_engine("P")
        world.cluster.worker("D.0").go_on()
        state, _reason = await world.ends("lost", "D", ENDS_S)
        assert state == "FAILED"
        world.start("P")
        await world.cluster.connected()
        world.cluster.compute(ONE)
        await is_held(world, "P")
        assert await asks(world, "again") == ("DONE", "")
        world.cluster.evict(None, "P")
        await world.heals()
