"""An engine that is to leave hands what it holds to a store, as operators and engines have it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import pytest

from agent_harness.waiting import until
from broker.content.holders import FORM, Holder, heard, holder
from broker.fakes import broker, engine, model_layout
from restow.broker.client import AsyncAdminClient, BlockingSession, EngineSession, Prefix, chain_of
from restow.broker.client.engine import prefix_side as hand_over
from restow.broker.server.serve import RunningBroker

STATES = [chain_of(range(first, first + 32)).prefix(32) for first in range(10)]
"""Ten, each of other tokens."""
P_STATE = {"attention": [1, 2], "state": [3]}
D_STATE = {"attention": [11, 12], "state": [13]}


@contextlib.asynccontextmanager
async def store(running: RunningBroker, room: int = 100) -> AsyncIterator[list[Prefix]]:
    """Run a store with room for ``room`` states; yield the list of states that it keeps."""
    kept: list[Prefix] = []
    asking: set[asyncio.Task[None]] = set()
    sessions: list[EngineSession] = []
    firsts = itertools.count(20, 2)

    async def ask(prefix: Prefix) -> None:
        name, first = prefix.hashes[-1].hex()[:16], next(firsts)
        blocks = {"attention": [first, first + 1], "state": [first]}
        if (await sessions[0].request(name, blocks, prefix=prefix)).done:
            kept.append(prefix)
            tell(sessions[0], prefix)

    def on_keep(prefix: Prefix) -> None:
        if len(asking) < room:
            asking.add(asyncio.create_task(ask(prefix)))

    async with engine(running.address, "store", on_keep=on_keep) as (session, _):
        sessions.append(session)
        yield kept
        await asyncio.gather(*asking)


def tell(session: EngineSession | BlockingSession, prefix: Prefix) -> None:
    session.hold(FORM, "attention", prefix.hashes)
    session.hold(FORM, "state", prefix.hashes[-1:])


@contextlib.asynccontextmanager
async def leaver(running: RunningBroker) -> AsyncIterator[tuple[Holder, EngineSession]]:
    """Run an engine that holds all of ``STATES``."""
    answers: list[Holder] = []
    async with engine(
        running.address,
        "p",
        on_offer=lambda offer: answers[0].hear(offer),
        on_drain=lambda: STATES,
    ) as (session, agents):
        answers.append(Holder(session, agents, P_STATE))
        for one in STATES:
            tell(session, one)
        await heard(running, "p", 2 * len(STATES))
        yield answers[0], session


async def drained(client: AsyncAdminClient) -> None:
    """Wait until the engine may be stopped."""
    async with asyncio.timeout(20):
        while await client.drain_engine("p"):  # noqa: ASYNC110 - the broker tells no events
            await asyncio.sleep(0.01)


async def test_an_operator_has_an_engine_leave_and_a_store_has_what_it_held(
    running: RunningBroker,
) -> None:
    async with (
        leaver(running) as (p, _),
        store(running) as kept,
        AsyncAdminClient(running.address) as client,
    ):
        assert await client.drain_engine("p") == 1
        await drained(client)
        assert sorted(one.hashes for one in kept) == sorted(one.hashes for one in STATES)
        assert len(p.offers) == len(STATES)  # asked to once, however often the operator looks
        async with engine(running.address, "d") as (d, _):
            assert (await d.request("after", D_STATE, prefix=STATES[7])).state == "DONE"


async def test_an_engine_that_leaves_by_itself_hands_over_first(running: RunningBroker) -> None:
    async with leaver(running) as (_, session), store(running) as kept:
        assert await session.drain(20)
        assert len(kept) == len(STATES)


async def test_without_a_store_or_without_room_in_it_an_engine_leaves_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hand_over, "PATIENCE_S", 0.3)
    async with broker() as running, leaver(running) as (p, session):
        assert await session.drain(20)
        assert not p.offers
    async with (
        broker() as running,
        leaver(running) as (p, session),
        store(running, room=5) as kept,
    ):
        assert await session.drain(20)
        assert len(kept) == 5


async def test_an_engine_that_says_nothing_of_leaving_is_waited_for_no_longer(
    running: RunningBroker,
) -> None:
    async with holder(running, "p"), AsyncAdminClient(running.address) as client:
        await client.drain_engine("p")
        record = next(iter(running.hub.directory.members.engines.values()))
        await until(lambda: not record.handing_over)
        assert await client.drain_engine("p") == 0
        assert await client.drain_engine("p", False) == 0


async def test_one_whose_session_breaks_while_it_hands_over_is_not_waited_for(
    running: RunningBroker,
) -> None:
    async with (
        leaver(running) as (p, session),
        store(running),
        AsyncAdminClient(running.address) as client,
    ):
        p.answer = p.be_silent
        assert await client.drain_engine("p") == 1
        if session._stream._runner is not None:
            session._stream._runner.cancel()
        await drained(client)


async def test_one_that_can_not_say_what_it_holds_is_not_waited_for_either(
    running: RunningBroker,
) -> None:
    faults: list[str] = []

    def fail() -> list[Prefix]:
        faults.append("")
        raise KeyError("a fault of the engine's")

    async with (
        engine(running.address, "p", on_drain=fail) as (session, _),
        AsyncAdminClient(running.address) as client,
    ):
        tell(session, STATES[0])
        await heard(running, "p", 2)
        await client.drain_engine("p")
        await until(lambda: bool(faults))
        await drained(client)
        with pytest.raises(KeyError):
            await session.drain(20)


async def test_a_session_for_threads_says_what_to_keep_too(
    running: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over, "PATIENCE_S", 0.3)
    offered: list[str] = []

    def leave(address: str) -> None:
        with BlockingSession(
            *("p", "life", model_layout(1), address),
            on_offer=lambda offer: decline(offer.handoff_id),
            on_drain=lambda: STATES[:1],
        ) as session:
            sessions.append(session)
            tell(session, STATES[0])
            assert session.drain(20)

    def decline(handoff_id: str) -> None:
        offered.append(handoff_id)
        sessions[0].decline_offer(handoff_id)

    sessions: list[BlockingSession] = []
    async with store(running) as kept:
        await asyncio.to_thread(leave, running.address)
        assert len(offered) == 1
        assert not kept
