"""Publications for several readers over gRPC, as new clients and old ones say them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from agent_harness.waiting import until
from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, FakeAgent, broker, engine
from restow.broker.client import BrokerCallError, Credentials, EngineSession
from restow.broker.client.connection.channel import open_channel
from restow.broker.server.serve import RunningBroker
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc

Side = tuple[EngineSession, list[FakeAgent]]


@contextlib.asynccontextmanager
async def several() -> AsyncIterator[tuple[RunningBroker, Side, Side, Side, Side]]:
    """Run a broker, a P of two ranks, and D's of one, two and one ranks."""
    async with (
        broker() as running,
        engine(running.address, "p", 2) as p,
        engine(running.address, "d") as d,
        engine(running.address, "e", 2) as e,
        engine(running.address, "f") as f,
    ):
        yield running, p, d, e, f


async def fence(p: Side, name: str) -> None:
    for agent in p[1]:
        await agent.fence(name)


async def test_two_readers_of_one_publication() -> None:
    async with several() as (_, p, d, e, f):
        released = p[0].publish("h", P_BLOCKS, POSITION, readers=2)
        await fence(p, "h")
        assert (await d[0].request("h", D_BLOCKS)).done
        assert not released.done()
        assert (await e[0].request("h", D_BLOCKS)).done
        ended = await released
        assert (ended.state, ended.delivered) == ("DONE", 2)
        with pytest.raises(BrokerCallError, match="2 of 2 readers have it") as caught:
            await f[0].request("h", D_BLOCKS)
        assert caught.value.reason == "HANDOFF_OWNED"


async def test_readers_that_ask_before_p_and_decline() -> None:
    async with several() as (_, p, d, e, f):
        asked = [one[0].request("h", D_BLOCKS, readers=3) for one in (d, e)]
        declined = f[0].decline("h", readers=3)
        assert (await declined).reason == "DECLINED"
        released = p[0].publish("h", P_BLOCKS, POSITION, readers=3)
        await fence(p, "h")
        assert all(one.done for one in await asyncio.gather(*asked))
        ended = await released
        assert (ended.state, ended.delivered) == ("DONE", 2)


async def test_calls_beside_sessions_and_odd_numbers_of_readers() -> None:
    async with several() as (running, p, d, e, _f), contextlib.AsyncExitStack() as stack:
        p[0].publish("h", P_BLOCKS, POSITION, readers=2)
        await fence(p, "h")
        channel = await stack.enter_async_context(open_channel(running.address, Credentials()))
        stub = broker_pb2_grpc.BrokerStub(channel)
        blocks = [
            pb.BlockList(group=group, block_ids=b"".join(i.to_bytes(4, "little") for i in ids))
            for group, ids in D_BLOCKS.items()
        ]
        demand = pb.Demand(handoff_id="h", blocks=blocks)
        answer = await stub.Request(pb.RequestRequest(engine=d[0].ref, demand=demand))
        assert answer.ended.state == pb.HANDOFF_STATE_DONE
        again = await stub.Cancel(
            pb.CancelRequest(engine=d[0].ref, cancellation=pb.Cancellation(handoff_id="h"))
        )
        assert again.state == pb.HANDOFF_STATE_DONE
        for readers in (-1, 65):
            with pytest.raises(BrokerCallError, match="readers is"):
                await p[0].publish("odd", P_BLOCKS, POSITION, readers=readers)
            with pytest.raises(BrokerCallError, match="readers is"):
                await e[0].request("odd", D_BLOCKS, readers=readers)
            with pytest.raises(BrokerCallError, match="readers is"):
                await e[0].decline("odd", readers=readers)
        p[0].cancel("h")
        await until(lambda: not running.hub.directory.ledger.by_number)
