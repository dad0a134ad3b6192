"""Engines go gently or are killed, and routers give up, at a real broker."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from agent_harness.waiting import until
from broker.fakes import (
    D_BLOCKS,
    P_BLOCKS,
    POSITION,
    Pair,
    broker,
    engine,
    heard,
    model_layout,
    pair,
)
from restow.broker.client import BlockingSession, BrokerCallError, EngineSession, HandoffEnded
from restow.broker.client.admin import AdminClient, AsyncAdminClient
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.server.serve import RunningBroker


def names(running: RunningBroker) -> set[str]:
    return {key.engine_id for key in running.hub.directory.members.engines}


async def die(session: EngineSession) -> None:
    """End a session as a killed process would: without unregistering."""
    for task in (session._stream._runner, session._keeper):
        assert task is not None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await session._stream.channel.close()


async def test_a_killed_engine_is_forgotten_and_one_with_a_session_is_not() -> None:
    async with (
        broker(engine_idle_s=0.2) as running,
        engine(running.address, "killed", agents=False) as (killed, _),
        engine(running.address, "alive", agents=False),
    ):
        assert names(running) == {"killed", "alive"}
        await die(killed)
        await until(lambda: names(running) == {"alive"})


async def published(both: Pair, name: str) -> asyncio.Future[HandoffEnded]:
    """Publish a state and make it READY; return the future of P's free pages."""
    free = both.p.publish(name, P_BLOCKS, POSITION)
    for agent in both.p_agents:
        await agent.fence(name)
    return free


async def test_p_that_drains_hands_over_what_it_has_and_is_done() -> None:
    async with broker() as running, pair(running.address) as both:
        free = await published(both, "held")
        drained = asyncio.create_task(both.p.drain())
        await until(lambda: any(one.draining for one in engines(running)))
        with pytest.raises(BrokerCallError) as refused:
            await both.p.publish("new", P_BLOCKS, POSITION)
        assert (refused.value.status, refused.value.reason) == (
            "FAILED_PRECONDITION",
            "ENGINE_DRAINING",
        )
        # Who waits for that, or comes later, hears it at once.
        ended = await both.d.request("new", D_BLOCKS)
        assert (ended.state, ended.reason) == ("FAILED", "PUBLICATION_REFUSED")
        assert "ENGINE_DRAINING" in ended.detail
        assert not drained.done()
        assert (await both.d.request("held", D_BLOCKS)).done
        assert await drained
        assert free.done()


def engines(running: RunningBroker) -> list[EngineRecord]:
    return list(running.hub.directory.members.engines.values())


async def test_draining_ends_after_a_while_and_says_whether_all_did() -> None:
    async with broker() as running, pair(running.address) as both:
        await published(both, "held")
        assert not await both.p.drain(0.05)
        assert await both.d.drain()


async def test_an_engine_that_drains_does_so_at_the_next_broker(tmp_path: Path) -> None:
    # The session first repeats what it said before, and the new broker takes it.
    address = f"unix:{tmp_path / 'broker'}"
    async with contextlib.AsyncExitStack() as stack:
        async with broker(address):
            session, _ = await stack.enter_async_context(engine(address, "p", agents=False))
            free = session.publish("held", P_BLOCKS, POSITION)
            drained = asyncio.create_task(session.drain())
        async with broker(address) as running:
            await until(lambda: any(one.draining for one in engines(running)))
            assert len(running.hub.directory.ledger.live) == 1
            session.cancel("held")
            assert await drained
            assert (await free).reason == "CANCELLED"


async def test_a_blocking_session_drains() -> None:
    async with broker() as running, pair(running.address) as both:
        await published(both, "held")

        def drains() -> tuple[bool, bool]:
            with BlockingSession("b", "life", model_layout(), running.address) as session:
                asked = session.request("held", D_BLOCKS, timeout_ms=200)
                return session.drain(), asked.done()

        assert await asyncio.to_thread(drains) == (True, True)


async def test_operators_drain_and_forget_engines() -> None:
    async with (
        broker() as running,
        pair(running.address) as both,
        AsyncAdminClient(running.address) as client,
    ):
        await published(both, "held")
        await heard(running, "held")
        assert await client.drain_engine("p") == 1
        (p,) = [one for one in await client.engines() if one.engine_id == "p"]
        assert (p.draining, p.open) == (True, 1)
        with pytest.raises(BrokerCallError) as refused:
            await client.forget_engine("p")
        assert refused.value.reason == "ENGINE_CONNECTED"
        assert await client.drain_engine("p", False) == 1
        await both.hand_over("after all")
        await die(both.p)
        for agent in both.p_agents:
            await agent.drop()
        await until(lambda: not any(one.agents or one.has_session for one in engines(running)[:1]))
        assert await client.forget_engine("p") == 1
        assert names(running) == {"d"}
        with pytest.raises(BrokerCallError) as unknown:
            await client.drain_engine("p")
        assert unknown.value.reason == "ENGINE_UNKNOWN"


async def test_a_router_gives_up_what_its_client_does_not_wait_for() -> None:
    async with broker() as running, pair(running.address) as both:
        free = await published(both, "left")

        def abandon(name: str) -> str:
            with AdminClient(running.address) as client:
                return client.abandon(name)

        assert await asyncio.to_thread(abandon, "left") == "CANCELLED"
        ended = await free
        assert (ended.state, ended.reason) == ("CANCELLED", "ABANDONED")
        assert await asyncio.to_thread(abandon, "early") == "CANCELLED"
        assert (await both.p.publish("early", P_BLOCKS, POSITION)).reason == "ABANDONED"
        asked = asyncio.ensure_future(both.d.request("asked", D_BLOCKS))
        await both.hand_over("another")
        assert await asyncio.to_thread(abandon, "asked") == "WAITING"
        await published(both, "asked")
        assert (await asked).done
