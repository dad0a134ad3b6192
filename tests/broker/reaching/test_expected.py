"""Agents that come before their engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import pytest

from agent_harness.waiting import until
from broker.fakes import FakeAgent, broker, model_layout
from restow.broker.client import EngineSession
from restow.broker.client.connection.errors import BrokerCallError
from restow.broker.core.common.keys import EngineKey
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.errors import EngineReplacedError, EngineUnknownError
from restow.broker.server.serve import RunningBroker

KEY = EngineKey("default", "e")


def expected(running: RunningBroker) -> Coroutine[Any, Any, EngineRecord]:
    """Wait until the engine's first life registers."""
    account = running.hub.directory.ledger.tenants.account(KEY.tenant)
    return running.hub.expected.engine(KEY, "1", account, 0)


def session_of(address: str, incarnation: str = "1") -> EngineSession:
    return EngineSession("e", incarnation, model_layout(), address)


async def test_an_agent_is_welcomed_the_moment_its_engine_registers(running: RunningBroker) -> None:
    session = session_of(running.address)
    agent = FakeAgent(session, model_layout(), 0, 8)
    coming = asyncio.create_task(agent.connect())
    await until(lambda: running.hub.expected.waiting == 1)
    assert not coming.done()
    assert not agent.ended.is_set()
    async with session:
        await asyncio.wait_for(coming, 5)
        await agent.drop()


async def test_agents_that_came_first_are_let_in_first() -> None:
    async with broker() as running:
        let_in: list[int] = []

        async def come(number: int) -> None:
            await expected(running)
            let_in.append(number)

        tasks = list[asyncio.Task[None]]()
        for number in range(20):
            tasks.append(asyncio.create_task(come(number)))
            await until(lambda: running.hub.expected.waiting > number)  # noqa: B023 - at once
        async with session_of(running.address):
            await until(lambda: len(let_in) == 20)
    assert let_in == list(range(20))


async def test_an_agent_whose_engine_does_not_come_is_told(running: RunningBroker) -> None:
    running.hub.expected.wait_s = 0.2
    agent = FakeAgent(session_of(running.address), model_layout(), 0, 8)
    with pytest.raises(BrokerCallError, match="call RegisterEngine first") as caught:
        await agent.connect()
    assert caught.value.reason == EngineUnknownError.reason


async def test_an_agent_of_a_life_that_ended_is_told_at_once(running: RunningBroker) -> None:
    async with session_of(running.address, "1"), session_of(running.address, "2"):
        agent = FakeAgent(session_of(running.address, "1"), model_layout(), 0, 8)
        with pytest.raises(BrokerCallError, match="is registered as incarnation 2") as caught:
            await asyncio.wait_for(agent.connect(), 5)
        assert caught.value.reason == EngineReplacedError.reason


async def test_another_life_is_not_the_one_that_is_waited_for(running: RunningBroker) -> None:
    waiting = asyncio.create_task(expected(running))
    await until(lambda: running.hub.expected.waiting == 1)
    async with session_of(running.address, "2"):
        # It was woken by the other's coming, and waits again.
        await until(lambda: running.hub.expected.waiting == 1)
        assert not waiting.done()
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert not running.hub.expected._waiting
    assert not running.hub.expected.waiting


async def test_no_more_wait_than_may(running: RunningBroker) -> None:
    running.hub.expected.max_waiting = 1
    first = asyncio.create_task(expected(running))
    await until(lambda: running.hub.expected.waiting == 1)
    with pytest.raises(EngineUnknownError):
        await asyncio.wait_for(expected(running), 1)
    assert not first.done()
    first.cancel()


async def test_a_broker_that_stops_waits_for_nobody() -> None:
    async with broker() as running:
        waiting = asyncio.create_task(expected(running))
        await until(lambda: running.hub.expected.waiting == 1)
    with pytest.raises(EngineUnknownError):
        await asyncio.wait_for(waiting, 1)
