"""The leader leaves, dies, stands still or is cut off, and handoffs go on at another one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from agent_harness.waiting import until
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
