"""Engines go gently or are killed, and routers give up, at a real broker."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

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
)
from broker.guarded import error_of, reason_of
from restow.broker.client import BlockingSession, EngineSession
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


async def test_p_that_drains_hands_over_what_it_has_and_is_done(
    running: RunningBroker, both: Pair
) -> None:
    free = await both.published("held")
    assert not await both.p.drain(0.05)  # the time limit ends with a handoff open
    drained = asyncio.create_task(both.p.drain())
    await until(lambda: any(one.draining for one in engines(running)))
    refused = await error_of(both.p.publish("new", P_BLOCKS, POSITION))
    assert (refused.status, refused.reason) == (
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


async def test_a_blocking_session_drains(running: RunningBroker, both: Pair) -> None:
    await both.published("held")

    def drains() -> tuple[bool, bool]:
        with BlockingSession("b", "life", model_layout(), running.address) as session:
            asked = session.request("held", D_BLOCKS, timeout_ms=200)
            return session.drain(), asked.done()

    assert await asyncio.to_thread(drains) == (True, True)


async def test_operators_drain_and_forget_engines(running: RunningBroker, both: Pair) -> None:
    async with AsyncAdminClient(running.address) as client:
        await both.published("held")
        await heard(running, "held")
        assert await client.drain_engine("p") == 1
        (p,) = [one for one in await client.engines() if one.engine_id == "p"]
        assert (p.draining, p.open) == (True, 1)
        assert await reason_of(client.forget_engine("p")) == "ENGINE_CONNECTED"
        assert await client.drain_engine("p", False) == 1
        await both.hand_over("after all")
        await die(both.p)
        for agent in both.p_agents:
            await agent.drop()
        await until(lambda: not any(one.agents or one.has_session for one in engines(running)[:1]))
        assert await client.forget_engine("p") == 1
        assert names(running) == {"d"}
        assert await reason_of(client.drain_engine("p")) == "ENGINE_UNKNOWN"


async def test_a_router_gives_up_what_its_client_does_not_wait_for(
    running: RunningBroker, both: Pair
) -> None:
    free = await both.published("left")

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
    await both.published("asked")
    assert (await asked).done
