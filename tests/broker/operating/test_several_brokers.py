"""The operator's clients with several addresses: lists are joined, who knows a thing is found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
from restow.broker.server.fleet.one_of_several import not_owner
from restow.broker.server.fleet.standing import OWN_S, Alone

from agent_harness.waiting import until
from broker.fakes import P_BLOCKS, POSITION, broker, engine, pair
from forked.ports import free_port
from restow.broker.client import (
    AdminClient,
    AsyncAdminClient,
    BrokerCallError,
    BrokerUnreachableError,
    chain_of,
)
from restow.broker.errors import AddressInvalidError
from restow.broker.layout.values import ModelIdentity, Pool
from restow.broker.server.serve import RunningBroker

T = TypeVar("T")


class Elsewhere(Alone):
    """Every pool is another broker's."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.asked = 0

    async def own(self, pool: Pool, unreached: str = "", within_s: float = OWN_S) -> None:
        self.asked += 1
        raise not_owner(pool, "here:1", self._owner)


class Busy(Alone):
    """It does not answer in time."""

    asked = 0

    async def own(self, pool: Pool, unreached: str = "", within_s: float = OWN_S) -> None:
        self.asked += 1
        await asyncio.Event().wait()


@asynccontextmanager
async def two() -> AsyncIterator[tuple[RunningBroker, RunningBroker, str]]:
    """Brokers that know nothing of each other, and an address where nobody listens."""
    async with broker() as first, broker() as second:
        yield first, second, f"{first.address},127.0.0.1:{free_port()},{second.address}"


async def ask(addresses: str, question: Callable[[AdminClient], T], **more: Any) -> T:
    """As an operator does, beside the loop of the brokers."""

    def look() -> T:
        with AdminClient(addresses, **more) as client:
            return question(client)

    return await asyncio.to_thread(look)


async def test_lists_are_joined_and_say_who_told_what_and_who_did_not_answer() -> None:
    async with two() as (first, second, all_three):  # noqa: SIM117 - both pairs end first
        async with pair(first.address) as one, pair(second.address, 1, 1) as other:
            await one.hand_over("older")
            await other.hand_over("newer")
            other.p.publish("under-way", P_BLOCKS, POSITION)
            await until(lambda: bool(second.hub.directory.ledger.by_number))

            def look(client: AdminClient) -> None:
                engines = [(one.engine_id, one.broker) for one in client.engines()]
                wanted = [(name, at.address) for name in "dp" for at in (first, second)]
                assert engines == wanted
                assert list(client.unanswered) == [all_three.split(",")[1]]
                agents = [(one.engine_id, one.broker) for one in client.agents()]
                assert agents.count(("p", first.address)) == 2
                assert agents.count(("p", second.address)) == 1
                listed = client.handoffs().handoffs
                told = {one.handoff_id: one.broker for one in listed}
                assert next(iter(told)) == "under-way"
                assert told["older"] == first.address
                assert told["newer"] == told["under-way"] == second.address
                assert client.handoffs(limit=2).left_out == 1
                (tenant,) = client.tenants().tenants
                assert (tenant.engines, tenant.handoffs_live) == (4, 1)
                status = client.status(traffic=True)
                assert (status.engines, status.agents, status.handoffs_live) == (4, 5, 1)
                assert sum(one.done for one in status.steps) == 2
                assert status.pairs[0].traffic.done == 2
                assert client.audit().handoffs == 3
                assert client.costs().hosts is not None

            await ask(all_three, look)


async def test_who_knows_a_thing_is_found_and_what_nobody_knows_is_not_found() -> None:
    async with two() as (_, second, all_three), pair(second.address) as other:
        await other.hand_over("one")

        def look(client: AdminClient) -> None:
            assert client.handoff("one").handoff.handoff_id == "one"
            assert client.layout("p").model.name == "m"
            assert client.drain_engine("p") == 0
            assert client.drain_engine("p", draining=False) == 0
            with pytest.raises(BrokerCallError, match="no answer of 127") as caught:
                client.handoff("two")
            assert (caught.value.status, caught.value.reason) == ("NOT_FOUND", "HANDOFF_UNKNOWN")
            assert caught.value.subject["handoff"] == "two"
            with pytest.raises(AddressInvalidError, match="about one broker"):
                client.set_draining(True)

        await ask(all_three, look)
        async with AsyncAdminClient(all_three) as client:
            assert (await client.handoff("one")).handoff.handoff_id == "one"
            with pytest.raises(BrokerCallError, match="two"):
                await client.handoff("two")


async def test_a_handoff_is_abandoned_at_all_and_its_owner_says_what_became_of_it() -> None:
    async with two() as (first, second, all_three), pair(second.address) as other:
        await other.hand_over("done")
        async with AsyncAdminClient(all_three) as client:
            assert await client.abandon("done") == "DONE"
            assert await client.abandon("never-published") == "CANCELLED"
        for at in (first, second):
            found = await ask(at.address, lambda client: client.handoff("never-published").handoff)
            assert found.reason == "ABANDONED"


async def test_a_search_follows_the_owner_and_goes_there_at_once_the_next_time() -> None:
    async with two() as (first, second, _), engine(second.address, "p", 1):
        elsewhere = Elsewhere(second.address)
        first.hub.standing = elsewhere
        model = ModelIdentity("m", "v1")
        async with AsyncAdminClient(first.address) as client:
            for _ in range(2):
                assert await client.find([chain_of(range(64))], model=model) == [[]]
        assert elsewhere.asked == 1


async def test_brokers_that_name_each_other_end_with_their_refusal() -> None:
    async with two() as (first, second, _):
        first.hub.standing = Elsewhere(second.address)
        second.hub.standing = Elsewhere(first.address)
        async with AsyncAdminClient(first.address) as client:
            with pytest.raises(BrokerCallError) as caught:
                await client.find([chain_of(range(64))], model=ModelIdentity("m", "v1"))
        assert caught.value.reason == "NOT_OWNER"


async def test_a_broker_that_was_waited_for_in_vain_is_not_the_first_that_is_asked_again() -> None:
    async with two() as (first, second, _):
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
