"""The leader leaves, dies, stands still or is cut off, and handoffs go on at another one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from agent_harness.waiting import until
from engines.test_examples import SHORT, alone, begin, tokens_in
from fleet.scene import Traffic, pair, traffic
from fleet_harness.brokers import BrokerProcess, Fleet


async def goes_on(flow: Traffic) -> None:
    count = len(flow.done_s)
    await until(lambda: len(flow.done_s) > count + 20, 40.0)


def at_once(call: Callable[[BrokerProcess], None]) -> Callable[[BrokerProcess], Awaitable[None]]:
    async def done(broker: BrokerProcess) -> None:
        call(broker)

    return done


@pytest.mark.parametrize(
    ("harm", "mend", "rounds"),
    [
        (BrokerProcess.leave, BrokerProcess.start, 3),
        (at_once(BrokerProcess.kill), BrokerProcess.start, 1),
        (at_once(BrokerProcess.stop), at_once(BrokerProcess.go_on), 1),
        (at_once(BrokerProcess.cut_off), at_once(BrokerProcess.heal), 1),
    ],
    ids=["leaves", "dies", "stands-still", "is-cut-off"],
)
async def test_another_leader_follows_and_nothing_fails(
    fleet: Fleet,
    request: pytest.FixtureRequest,
    harm: Callable[[BrokerProcess], Awaitable[None]],
    mend: Callable[[BrokerProcess], Awaitable[None]],
    rounds: int,
) -> None:
    async with pair(fleet.addresses, request.node.callspec.id) as both:
        async with traffic(both) as flow:
            for _ in range(rounds):
                await goes_on(flow)
                leader = both.leader(fleet)
                await harm(leader)
                await goes_on(flow)
                assert both.leader(fleet) is not leader
                await mend(leader)
                await asyncio.sleep(1.0)  # whatever the former leader does now harms nothing
            await goes_on(flow)
        assert not flow.failed, flow.failed


async def test_the_example_engine_hands_over_whichever_broker_it_asks_first(fleet: Fleet) -> None:
    addresses = fleet.addresses.split(",")
    told = ("--handoff-id", "example", "--prompt", *map(str, SHORT), "--broker")
    p = begin("engine.py", "prefill", "--tp", "4", *told, ",".join(addresses))
    d = begin("engine.py", "decode", "--tp", "2", *told, ",".join(reversed(addresses)))
    said, _ = await asyncio.to_thread(d.communicate, timeout=60)
    freed, _ = await asyncio.to_thread(p.communicate, timeout=60)
    assert tokens_in(said) == alone(SHORT, 8)
    assert "DONE" in freed
