"""T6 and T8: references that are consumed, stale, unknown or out of range; words said twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest

from chaos.scene import Scene, prompt, scene
from restow.broker.client.connection.channel import open_channel
from restow.broker.client.connection.errors import from_rpc_error
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc

pytestmark = [pytest.mark.sampled, pytest.mark.timeout(120)]
PAGES = {"attention": [0, 1], "state": [0]}


def blocks(ids: dict[str, list[int]]) -> list[pb.BlockList]:
    return [
        pb.BlockList(group=group, block_ids=np.array(pages, "<i4").tobytes())
        for group, pages in ids.items()
    ]


def demand(
    name: str,
    ids: dict[str, list[int]] = PAGES,
    timeout_ms: int = 500,
    repeated: bool = False,
) -> pb.Demand:
    return pb.Demand(handoff_id=name, blocks=blocks(ids), timeout_ms=timeout_ms, repeated=repeated)


class Raw:
    """Calls as another client than ours may make them."""

    def __init__(self, channel: grpc.aio.Channel, world: Scene) -> None:
        self._stub = broker_pb2_grpc.BrokerStub(channel)
        self._world = world

    def _ref(self, side: str, incarnation: str) -> pb.EngineRef:
        name = incarnation or self._world.cluster.engines[side].life.name
        return pb.EngineRef(engine_id=side, incarnation=name)

    async def request(self, what: pb.Demand, incarnation: str = "") -> tuple[str, str]:
        """Return the state and the reason; the state is empty where the call was refused."""
        request = pb.RequestRequest(engine=self._ref("D", incarnation), demand=what)
        try:
            answer = await self._stub.Request(request, timeout=60)
        except grpc.aio.AioRpcError as error:
            return "", from_rpc_error(error, "the broker").reason
        state = pb.HandoffState.Name(answer.ended.state).removeprefix("HANDOFF_STATE_")
        return state, answer.ended.reason

    async def publish(self, what: pb.Publication, incarnation: str = "") -> tuple[str, str]:
        """Return the state and the reason; the state is empty where the call was refused."""
        request = pb.PublishRequest(engine=self._ref("P", incarnation), publication=what)
        try:
            answer = await self._stub.Publish(request, timeout=60)
        except grpc.aio.AioRpcError as error:
            return "", from_rpc_error(error, "the broker").reason
        return pb.HandoffState.Name(answer.state).removeprefix("HANDOFF_STATE_"), ""


@contextlib.asynccontextmanager
async def raw(world: Scene) -> AsyncIterator[Raw]:
    async with open_channel(world.cluster.address("p")) as channel:
        yield Raw(channel, world)


async def test_t6_every_bad_reference_is_refused_by_name() -> None:
    async with scene() as world, raw(world) as calls:
        for side in "PD":
            await world.replace(side)
        assert await world.hand_over(prompt("used up")) == ("DONE", "")
        again = await calls.request(demand("used up"))
        assert again == ("", "HANDOFF_CONFLICT")
        assert await calls.request(demand("unknown")) == ("EXPIRED", "NOT_PUBLISHED")
        for life, reason in (("life0", "ENGINE_UNKNOWN"), ("life1", "ENGINE_REPLACED")):
            assert await calls.request(demand("stale"), life) == ("", reason)
            assert await calls.publish(pb.Publication(handoff_id="s"), life) == ("", reason)
        for ids in (
            {"attention": [0, 24], "state": [0]},
            {"attention": [0, -1], "state": [0]},
            {"attention": [0], "state": [1 << 30]},
        ):
            assert await calls.request(demand("far", ids)) == ("", "PAGE_OUT_OF_RANGE")
        assert await calls.request(demand("group", {"nobody": [0]})) == ("", "PAGES_INVALID")
        await world.heals()


async def test_t6_pages_that_do_not_fit_are_an_error_for_who_names_them() -> None:
    """Check that P's state stays for a demand that fits."""
    async with scene() as world, raw(world) as calls:
        few = prompt("few", pages=4)
        world.cluster.prefill(few)
        state, reason = await calls.request(demand("few", {"attention": [0], "state": [0]}, 5000))
        assert (state, reason) == ("FAILED", "PAGE_COUNT")
        world.cluster.decode(few)
        assert await world.ends("few") == ("DONE", "")
        assert await world.ends("few", "P") == ("DONE", "")
        await world.heals()


async def test_t8_words_said_twice_change_nothing() -> None:
    """Check publications and demands before and after the end, on the session and beside it."""
    async with scene() as world, raw(world) as calls:
        await world.ready(prompt("a"))
        said = demand("b", timeout_ms=2000, repeated=True)
        twice = [asyncio.create_task(calls.request(said)) for _ in "12"]
        assert [await one for one in twice] == [("EXPIRED", "NOT_PUBLISHED")] * 2
        world.cluster.decode(prompt("a"))
        assert await world.ends("a") == ("DONE", "")
        publication = pb.Publication(
            handoff_id="a", blocks=blocks(PAGES), position_tokens=32, final=True, repeated=True
        )
        for _ in "12":
            assert await calls.publish(publication) == ("DONE", "")
        assert await calls.request(demand("a")) == ("", "HANDOFF_CONFLICT")
        await world.heals()
        assert sum(world.cluster.found.ends.values()) == len(world.cluster.found.said)
