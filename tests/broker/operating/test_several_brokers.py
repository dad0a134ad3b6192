"""The operator's clients with several addresses: they ask the leader, whom a standby names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from broker.fakes import broker, engine, pair
from broker.guarded import error_of
from forked.ports import free_port
from restow.broker.client import (
    AdminClient,
    AsyncAdminClient,
    BrokerCallError,
    BrokerUnreachableError,
    chain_of,
)
from restow.broker.errors import NotLeaderError
from restow.broker.layout.values import ModelIdentity
from restow.broker.server.base.standing import LEADER_WAIT_S, Standing
from restow.broker.server.serve import RunningBroker

T = TypeVar("T")


class Standby(Standing):
    """Another broker leads."""

    def __init__(self, leader: str) -> None:
        self._leader = leader
        self.asked = 0

    def check(self) -> None:
        self.asked += 1
        raise NotLeaderError("another broker leads", leader=self._leader)

    async def lead(self, unreached: str = "", within_s: float = LEADER_WAIT_S) -> None:
        self.check()


class Busy(Standing):
    """It does not answer in time."""

    asked = 0

    async def lead(self, unreached: str = "", within_s: float = LEADER_WAIT_S) -> None:
        self.asked += 1
        await asyncio.Event().wait()


@asynccontextmanager
async def two() -> AsyncIterator[tuple[RunningBroker, RunningBroker, str]]:
    """Run a standby and its leader; yield both, and a dead address with the standby's."""
    async with broker() as standby, broker() as leader:
        standby.hub.standing = Standby(leader.address)
        yield standby, leader, f"127.0.0.1:{free_port()},{standby.address}"


async def ask(addresses: str, question: Callable[[AdminClient], T], **more: Any) -> T:
    """Ask as an operator does, beside the loop of the brokers."""

    def look() -> T:
        with AdminClient(addresses, **more) as client:
            return question(client)

    return await asyncio.to_thread(look)


async def test_every_call_is_answered_by_the_leader_and_the_next_one_goes_there_at_once() -> None:
    async with two() as (standby, leader, addresses), pair(leader.address, 2, 1) as both:
        await both.hand_over("one")

        def look(client: AdminClient) -> None:
            assert [one.engine_id for one in client.engines()] == ["d", "p"]
            assert client.status().agents == 3
            assert client.handoff("one").handoff.handoff_id == "one"
            assert client.drain_engine("p") == 0
            with pytest.raises(BrokerCallError, match="two") as caught:
                client.handoff("two")
            assert caught.value.reason == "HANDOFF_UNKNOWN"
            assert client.audit().handoffs == 1
            assert client.set_draining(False) == 0

        await ask(addresses, look)
        assert standby.hub.standing.asked == 1  # type: ignore[attr-defined]
        async with AsyncAdminClient(addresses) as client:
            assert (await client.handoff("one")).handoff.handoff_id == "one"
            assert await client.abandon("never-published") == "CANCELLED"


async def test_a_standby_tells_of_the_brokers_itself() -> None:
    async with two() as (standby, _, _):
        await ask(standby.address, AdminClient.brokers)
        assert standby.hub.standing.asked == 0  # type: ignore[attr-defined]


async def test_a_search_follows_the_leader() -> None:
    async with two() as (standby, leader, _), engine(leader.address, "p", 1):
        model = ModelIdentity("m", "v1")
        async with AsyncAdminClient(standby.address) as client:
            for _ in range(2):
                assert await client.find([chain_of(range(64))], model=model) == [[]]
        assert standby.hub.standing.asked == 1  # type: ignore[attr-defined]


async def test_brokers_that_name_each_other_end_with_their_refusal() -> None:
    async with two() as (first, second, _):
        second.hub.standing = Standby(first.address)
        async with AsyncAdminClient(first.address) as client:
            caught = await error_of(
                client.find([chain_of(range(64))], model=ModelIdentity("m", "v1"))
            )
        assert caught.reason == "NOT_LEADER"


async def test_a_broker_that_was_waited_for_in_vain_is_not_the_first_that_is_asked_again() -> None:
    async with broker() as first, broker() as second:
        first.hub.standing = busy = Busy()
        async with AsyncAdminClient(f"{first.address},{second.address}") as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.find([chain_of(range(64))], model=ModelIdentity("m", "v1"))
            assert await client.find([chain_of(range(64))], model=ModelIdentity("m", "v1")) == [[]]
        assert busy.asked == 1


async def test_where_nobody_answers_all_are_named() -> None:
    addresses = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    for question in (AdminClient.engines, AdminClient.brokers):
        with pytest.raises(BrokerUnreachableError) as caught:
            await ask(addresses, question)
        assert all(one in caught.value.message for one in addresses.split(","))
