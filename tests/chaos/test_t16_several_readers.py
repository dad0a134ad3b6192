"""T16: one publication of real engines for several D's of other layouts, one of them killed."""

from __future__ import annotations

import asyncio

import pytest

from chaos.scene import PATIENT, Scene, prompt, scene
from chaos_harness.model import PAGE_TOKENS
from restow.broker.client import AsyncAdminClient
from restow.broker.families import ConvLayout
from restow.v1 import broker_pb2 as pb

pytestmark = [pytest.mark.sampled, pytest.mark.timeout(180)]
ENDS_S = 60.0


async def start_others(world: Scene) -> None:
    """Start E and F: two more D's, each of another layout than P and D."""
    world.cluster.start_engine("E", 2, ConvLayout.SD, 2 * PAGE_TOKENS)
    world.cluster.start_engine("F", 1, ConvLayout.DS, PAGE_TOKENS)
    await world.cluster.connected()


async def reads(world: Scene, name: str, engine_id: str) -> None:
    """Wait until the delivery to an engine is granted."""
    async with (
        asyncio.timeout(ENDS_S),
        AsyncAdminClient(world.cluster.address("b")) as client,
    ):
        while True:
            deliveries = (await client.handoff(name)).deliveries
            if any(
                one.handoff.destination_engine == engine_id
                and one.handoff.state == pb.HANDOFF_STATE_READING
                for one in deliveries
            ):
                return
            await asyncio.sleep(0.02)


async def test_t16_two_readers_have_what_p_wrote_once() -> None:
    async with scene((2, 1)) as world:
        await start_others(world)
        one = prompt("a", readers=2)
        await world.ready(one)  # the first D to ask before that has it for itself
        for side in "DE":
            world.cluster.decode(one, side)
        for side in "PDE":
            assert await world.ends("a", side, ENDS_S) == ("DONE", ""), side
        assert not world.cluster.found.violations
        assert not await world.cluster.finished(ENDS_S)


async def test_t16_one_of_two_readers_is_killed_and_a_third_takes_its_place() -> None:
    async with scene((2, 1), options=PATIENT) as world:
        await start_others(world)
        one = prompt("a", readers=2)
        await world.ready(one)
        world.cluster.worker("P.0").stop()  # no byte is read of it meanwhile
        world.cluster.decode(one)
        await reads(world, "a", "D")
        world.cluster.end_engine("D")
        world.cluster.worker("P.0").go_on()
        for side in "EF":
            world.cluster.decode(one, side)
        for side in "EFP":
            assert await world.ends("a", side, ENDS_S) == ("DONE", ""), side
        assert not world.cluster.found.violations
        world.start("D")
        await world.cluster.connected()
        await world.heals()
