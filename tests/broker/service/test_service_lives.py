"""Lives of brokers and engines: restarts, replacements, and a broker that is not there."""

from __future__ import annotations

import asyncio
import contextlib
from unittest.mock import patch

import grpc
import pytest

from agent_harness.waiting import WAIT_S, until
from broker.fakes import (
    D_BLOCKS,
    P_BLOCKS,
    PAGES,
    POSITION,
    FakeAgent,
    Pair,
    broker,
    heard,
    model_layout,
    pair,
)
from broker.guarded import reason_of
from restow.broker.client import (
    AdminClient,
    BrokerCallError,
    EngineSession,
)
from restow.broker.client.connection.errors import from_rpc_error
from restow.broker.core.common.keys import EngineKey
from restow.broker.errors import HandoffConflictError, ListenError
from restow.broker.server.serve import RunningBroker
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc


async def test_a_session_lives_through_a_restart_of_the_broker() -> None:
    async with broker() as first:
        address = first.address
        p = EngineSession("p", "1", model_layout(2), address)
        d = EngineSession("d", "1", model_layout(1), address)
        await p.start()
        await d.start()
        one = p.publish("h", {"attention": [1, 2]}, 0, final=False)
        two = p.publish(
            "h", {"attention": [3], "state": [4]}, POSITION, first_blocks={"attention": 2}
        )
        asked, dropped = d.request("h", D_BLOCKS), d.request("dropped", D_BLOCKS)
        d.cancel("dropped")
        assert (await dropped).state == "CANCELLED"
    late = d.request("late", D_BLOCKS)
    async with broker(listen=address) as second:
        await until(lambda: len(second.hub.directory.members.engines) == 2)
        agents = [
            await FakeAgent(session, model_layout(tp), rank, PAGES).connect()
            for session, tp in ((p, 2), (d, 1))
            for rank in range(tp)
        ]
        for agent in agents[:2]:
            await agent.fence("h")
        assert (await asked).done
        assert await one == await two == await asked
        d.cancel("late")
        assert (await late).state == "CANCELLED"
        assert second.hub.epoch != first.hub.epoch
        for agent in agents:
            await agent.drop()
        await p.close()
        await d.close()


@pytest.mark.parametrize("late", ["P", "D"])
async def test_an_end_that_one_side_was_told_reaches_the_other_by_the_next_broker(
    late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with broker() as first:
            address, write = first.address, first.hub._write_ended
            monkeypatch.setattr(
                first.hub,
                "_write_ended",
                lambda told: None if (told.demand is None) == (late == "P") else write(told),
            )
            both = await stack.enter_async_context(pair(address))
            freed, asked = both.p.publish("h", P_BLOCKS, POSITION), both.d.request("h", D_BLOCKS)
            for agent in both.p_agents:
                await agent.fence("h")
            assert (await (asked if late == "P" else freed)).done
        async with broker(listen=address):
            for agent in (*both.p_agents, *both.d_agents):
                await until(lambda: both.p.is_open and both.d.is_open)
                await agent.connect()
            ended = await asyncio.wait_for(freed if late == "P" else asked, WAIT_S)
            assert (ended.state, ended.delivered, ended.position_tokens) == ("DONE", 1, POSITION)
            await both.hand_over("another")


async def test_numbers_of_two_lives_of_the_broker_do_not_meet() -> None:
    numbers = []
    for _ in range(2):
        async with broker() as running, pair(running.address) as both:
            await both.hand_over("h")
            numbers.append((await both.d_agents[0].order("execute")).handoff)
    assert numbers[0] != numbers[1]


async def test_a_newer_life_of_an_engine_ends_the_older_ones_session(
    running: RunningBroker, both: Pair
) -> None:
    waiting = both.p.publish("h", P_BLOCKS, POSITION)
    await heard(running, "h")
    async with EngineSession("p", "newer", model_layout(2), running.address):
        assert (await waiting).reason == "ENGINE_LOST"
        assert await reason_of(both.p.publish("i", P_BLOCKS, POSITION)) == "ENGINE_REPLACED"


async def test_an_engine_hears_once_that_it_was_replaced_and_never_of_its_own_closing() -> None:
    heard: list[str] = []
    async with broker() as running:
        layout, address = model_layout(1), running.address

        def session(life: str) -> EngineSession:
            return EngineSession(
                "p", life, layout, address, on_lost=lambda error: heard.append(error.reason)
            )

        async with session("older"):
            async with session("newer"):
                await until(lambda: bool(heard))
                with AdminClient(address) as admin:
                    (told,) = await asyncio.to_thread(admin.engines)
            assert (told.incarnation, list(told.replaced)) == ("newer", ["older"])
            assert 0 <= told.age_s < 60
    assert heard == ["ENGINE_REPLACED"]


async def test_a_session_whose_older_stream_arrives_after_it_goes_on(
    running: RunningBroker, both: Pair
) -> None:
    stub = broker_pb2_grpc.BrokerStub(both.channel)
    late = stub.Session()
    await late.write(pb.SessionRequest(engine=both.p.ref))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in late:
            pass
    assert from_rpc_error(caught.value, running.address).reason == "SESSION_REPLACED"
    await both.hand_over("h")


async def test_two_brokers_do_not_share_an_address(running: RunningBroker) -> None:
    with pytest.raises(ListenError, match=running.address):
        async with broker(listen=running.address):
            pass


async def test_a_session_renews_leases_also_after_it_had_none(
    running: RunningBroker, both: Pair
) -> None:
    await both.hand_over("before")
    for name in ("a", "b"):
        released = await both.published(name, lease_ms=600)
        await until(lambda one=name: renewals(running, one) >= 2)  # type: ignore[misc]
        assert not released.done()
        assert (await both.d.request(name, D_BLOCKS)).done
        assert (await released).done


def renewals(running: RunningBroker, name: str) -> int:
    """Return how often P's lease of a handoff was renewed so far."""
    handoff = running.hub.directory.ledger.live.get(("default", name))
    return sum(event == "renewed" for _, event, _ in handoff.timeline) if handoff else 0


async def test_what_is_fenced_and_given_up_is_forgotten_and_its_id_published_no_more(
    running: RunningBroker, both: Pair
) -> None:
    asked = both.d.request("h", D_BLOCKS)
    await both.p_agents[0].fence("h")
    fences = running.hub.directory.members.engines[EngineKey("default", "p")].unpublished_fences
    await until(lambda: "h" in fences)
    both.p.cancel("h", "preempted")
    ended = await asked
    assert (ended.state, ended.detail) == ("CANCELLED", "engine p cancelled: preempted")
    assert (await both.p_agents[0].order("unfence")).handoff_id == "h"
    with pytest.raises(HandoffConflictError, match="given up"):
        both.p.publish("h", P_BLOCKS, POSITION)
    await both.hand_over("next")


async def test_two_processes_of_an_incarnation_number_their_messages_apart() -> None:
    # An end that the first process waits for must not fit a demand of the second one.
    numbers = []
    for _ in range(2):
        session = EngineSession("d", "1", model_layout(1), "127.0.0.1:1")
        asked = [session.request(name, D_BLOCKS) for name in ("g", "h")]
        numbers.append({one.message_id for one in session._handoffs.everything()})
        for one in asked:
            one.cancel()
    assert len(numbers[0]) == len(numbers[1]) == 2
    assert not numbers[0] & numbers[1]


async def test_a_life_that_is_overtaken_while_it_starts_hears_why(running: RunningBroker) -> None:
    older, newer = (EngineSession("p", life, model_layout(), running.address) for life in "12")
    register = older._stream.prepare

    async def overtaken() -> None:
        await register()
        await newer.start()

    with (
        patch.object(older._stream, "prepare", overtaken),
        pytest.raises(BrokerCallError) as caught,
    ):
        await older.start()
    assert caught.value.reason == "ENGINE_REPLACED"
    await newer.close()


async def test_a_session_comes_back_when_there_is_room_again() -> None:
    # An engine that was let in before tries again when it is refused for lack of room.
    layout, key, other = model_layout(1), EngineKey("default", "p"), EngineKey("default", "other")
    async with broker(tenant_max_engines=1) as running:
        hub, members = running.hub, running.hub.directory.members
        async with EngineSession("p", "1", layout, running.address) as session:
            hub.perform(members.unregister(members.engines[key], hub.now_s()))
            hub.perform(members.register(other, "1", layout, "digest", hub.now_s()))
            refused = hub.directory.ledger.statistics.refused_calls
            # There is a second try only if the first refusal was not for good.
            await until(lambda: refused["QUOTA_EXCEEDED"] >= 2)
            hub.perform(members.unregister(members.engines[other], hub.now_s()))
            await until(lambda: key in hub.engines)
            assert (await session.request("h", D_BLOCKS, timeout_ms=1)).reason == "NOT_PUBLISHED"
