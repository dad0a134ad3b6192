"""What operators do: release a handoff, drain a broker, have it audited."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from agent_harness.waiting import until
from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, Pair, heard, pair, silent
from broker.guarded import ask
from restow.broker.client import Credentials
from restow.broker.client.admin import AdminClient
from restow.broker.core.common.keys import State
from restow.broker.server.observe.status import StatusPage
from restow.broker.server.serve import RunningBroker
from restow.v1 import admin_pb2 as pb
from restow.v1 import broker_pb2

PLAIN = Credentials()
CANCELLED = broker_pb2.HANDOFF_STATE_CANCELLED


async def info(address: str, name: str) -> pb.HandoffInfo:
    return (await ask(address, PLAIN, lambda client: client.handoff(name))).handoff


async def test_one_that_waits_ends_at_once_for_both_sides(
    running: RunningBroker, both: Pair
) -> None:
    released = both.p.publish("h", P_BLOCKS, POSITION)
    asked = both.d.request("h", D_BLOCKS)
    await heard(running, "h")
    await heard(running, "h", asked=True)
    before = await info(running.address, "h")
    assert before.waits_for == "ranks [0, 1] of engine p have not fenced it"
    assert 0 < before.patience_s <= 30
    assert 0 < before.lease_s <= 30
    after = await ask(running.address, PLAIN, lambda client: client.release("h"))
    assert (after.state, after.reason, after.waits_for) == (CANCELLED, "RELEASED", "")
    assert not after.HasField("lease_s")
    assert not after.HasField("patience_s")
    assert ((await asked).state, (await asked).reason) == ("CANCELLED", "RELEASED")
    assert await released == await asked
    # Once more changes nothing.
    again = await ask(running.address, PLAIN, lambda client: client.release("h"))
    assert (again.state, again.reason) == (after.state, after.reason)
    await both.hand_over("next")


async def test_pages_under_a_read_are_nobodys_until_the_read_has_ended(
    running: RunningBroker,
) -> None:
    async with pair(running.address, 1, 1) as both:
        answers, both.d_agents[0].answers = both.d_agents[0].answers, silent
        released = await both.published("h")
        asked = both.d.request("h", D_BLOCKS)
        order = await both.d_agents[0].order("execute")
        after = await ask(running.address, PLAIN, lambda client: client.release("h"))
        assert after.state == broker_pb2.HANDOFF_STATE_CANCELLED
        assert (await released).reason == "RELEASED"
        assert not asked.done()
        both.d_agents[0].answers = answers
        execute = type(both.d_agents[0].orders[0])(execute=order)
        await both.d_agents[0].say(*answers(execute))
        assert ((await asked).state, (await asked).reason) == ("CANCELLED", "RELEASED")
        assert await released == await asked
        await both.hand_over("next")


async def test_a_drained_broker_grants_when_it_may_again(
    running: RunningBroker, both: Pair
) -> None:
    await both.hand_over("before")  # all is planned, so that only the drain is in the way
    assert await ask(running.address, PLAIN, lambda client: client.set_draining(True)) == 0
    assert (await ask(running.address, PLAIN, AdminClient.status)).draining
    released = await both.published("h")
    asked = both.d.request("h", D_BLOCKS)
    live = running.hub.directory.ledger.by_number
    await until(lambda: any(one.state is State.READY for one in live.values()))
    one = await info(running.address, "h")
    assert one.waits_for == "the broker is draining and grants nothing"
    seen = StatusPage(running.hub).look({})
    assert seen is not None
    (shown,) = seen["under_way"]["rows"]
    assert shown["texts"][-1] == one.waits_for
    assert [one.HasField("execute") for one in both.d_agents[0].orders].count(True) == 1
    assert not (await ask(running.address, PLAIN, AdminClient.audit)).findings
    await ask(running.address, PLAIN, lambda client: client.set_draining(False))
    assert (await asked).done
    assert await released == await asked
    assert not (await ask(running.address, PLAIN, AdminClient.status)).draining


async def test_one_that_was_drained_before_still_waits_for_reads_at_its_end(
    running: RunningBroker,
) -> None:
    async with pair(running.address, 1, 1) as both:
        for draining in (True, False):
            await ask(running.address, PLAIN, partial(AdminClient.set_draining, draining=draining))
        both.d_agents[0].answers = silent
        await both.published("h")
        reading = both.d.request("h", D_BLOCKS)
        await both.d_agents[0].order("execute")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(running.hub.drain(), 0.2)
        reading.cancel()


async def test_an_audit_says_what_must_not_be(running: RunningBroker, both: Pair) -> None:
    await both.hand_over("h")
    found = await ask(running.address, PLAIN, AdminClient.audit)
    assert (list(found.findings), found.handoffs) == ([], 1)
    ledger = running.hub.directory.ledger
    (handoff,) = ledger.ended.values()
    handoff.state = State.READING
    found = await ask(running.address, PLAIN, AdminClient.audit)
    assert any("h" in words for words in found.findings)
    handoff.state = State.DONE
