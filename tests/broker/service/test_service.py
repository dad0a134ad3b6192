"""The broker over gRPC: whole handoffs, and refusals that name what is wrong."""

from __future__ import annotations

import asyncio

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from agent_harness.waiting import until
from broker.fakes import (
    D_BLOCKS,
    P_BLOCKS,
    POSITION,
    Pair,
    answer_at_once,
    broker,
    model_layout,
    pair,
    silent,
)
from restow.broker.client import AdminClient, BlockingSession
from restow.broker.client.connection.channel import open_channel
from restow.broker.client.connection.errors import SessionClosedError
from restow.broker.planner import Strategy
from restow.broker.rpc import wire
from restow.broker.server.serve import SERVICES, RunningBroker
from restow.v1 import agent_link_pb2 as link
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc

# -- the normal path ------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [Strategy.SLICES, Strategy.PACK])
async def test_a_whole_handoff(strategy: Strategy) -> None:
    async with broker(strategy=strategy) as running, pair(running.address, 2, 2) as both:
        await both.hand_over("h")
        first = both.d_agents[0]
        assert [one.WhichOneof("body") for one in first.orders[:2]] == ["welcome", "program"]
        execute = await first.order("execute")
        assert execute.handoff_id == "h"
        assert 0 < execute.grant_ms <= 10_000
        staged = [source.staged_address for source in execute.sources]
        assert any(staged) == (strategy is Strategy.PACK)
        peers = {one.peer.agent_name for one in first.orders if one.HasField("peer")}
        assert peers == {source.agent_name for source in execute.sources}
        if strategy is Strategy.PACK:
            assert (await both.p_agents[0].order("unstage")).handoff == execute.handoff


async def test_many_handoffs_at_once_all_end(running: RunningBroker, both: Pair) -> None:
    await asyncio.gather(*(both.hand_over(f"h{index}") for index in range(200)))
    status = await asyncio.to_thread(AdminClient(running.address).status)
    assert status.handoffs_live == 0
    assert [(one.state, one.count) for one in status.ended] == [(pb.HANDOFF_STATE_DONE, 200)]


async def test_publication_in_chunks_and_demand_first(both: Pair) -> None:
    asked = both.d.request("h", D_BLOCKS)
    one = both.p.publish("h", {"attention": [1, 2]}, 0, final=False)
    two = both.p.publish(
        "h", {"attention": [3], "state": [4]}, POSITION, first_blocks={"attention": 2}
    )
    for agent in both.p_agents:
        await agent.fence("h")
    assert {(await end).state for end in (asked, one, two)} == {"DONE"}


async def test_calls_outside_of_a_session(running: RunningBroker, both: Pair) -> None:
    async with open_channel(running.address) as channel:
        stub = broker_pb2_grpc.BrokerStub(channel)
        publication = pb.Publication(
            handoff_id="h",
            blocks=wire.block_lists(P_BLOCKS),
            position_tokens=POSITION,
            final=True,
        )
        request = pb.PublishRequest(engine=both.p.ref, publication=publication)
        assert (await stub.Publish(request)).state == pb.HANDOFF_STATE_WAITING
        for agent in both.p_agents:
            await agent.fence("h")
        demand = pb.Demand(handoff_id="h", blocks=wire.block_lists(D_BLOCKS))
        asked = pb.RequestRequest(engine=both.d.ref, demand=demand)
        for _ in range(2):
            assert (await stub.Request(asked)).ended.state == pb.HANDOFF_STATE_DONE
            asked.demand.repeated = True
        cancel = pb.CancelRequest(engine=both.p.ref, cancellation=pb.Cancellation(handoff_id="h"))
        assert (await stub.Cancel(cancel)).state == pb.HANDOFF_STATE_DONE


async def test_a_blocking_session_from_a_thread(running: RunningBroker) -> None:

    def decode() -> tuple[str, str]:
        with BlockingSession("d", "1", model_layout(1), running.address) as session:
            lost = session.request("never", D_BLOCKS)
            session.cancel("never", "changed its mind")
            state = lost.result(10).state
            pending = session.request("pending", D_BLOCKS)
        with pytest.raises(SessionClosedError):
            session.request("late", D_BLOCKS)
        return state, pending.result(0).reason

    assert await asyncio.to_thread(decode) == ("CANCELLED", "CANCELLED")


async def test_health_and_reflection(running: RunningBroker) -> None:
    async with open_channel(running.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for service in ("", *SERVICES):
            answer = await check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        async for reply in stub.ServerReflectionInfo(iter([question])):
            listed = {one.name for one in reply.list_services_response.service}
            assert set(SERVICES) <= listed


async def test_an_operator_sees_what_is_in_quarantine() -> None:
    async with (
        broker(grant_s=0.2, settle_grace_s=0.1) as running,
        pair(running.address) as both,
    ):
        both.d_agents[0].answers = lambda order: (
            silent(order) if order.HasField("execute") else answer_at_once(order)
        )
        await both.published("h")
        asked = asyncio.ensure_future(both.d.request("h", D_BLOCKS, timeout_ms=500))
        order = await both.d_agents[0].order("execute")
        admin = AdminClient(running.address)
        await until(lambda: not running.hub.directory.ledger.live)
        assert (await asyncio.to_thread(admin.status)).handoffs_quarantined == 1
        assert not asked.done()
        await both.d_agents[0].say(*answer_at_once(link.AgentOrder(execute=order)))
        assert (await asked).state == "FAILED"
        assert (await asyncio.to_thread(admin.status)).handoffs_quarantined == 0
