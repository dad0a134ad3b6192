"""The leader leaves, joins, dies and stands still, and handoffs go on at another one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agent_harness.waiting import until
from etcd_harness.cluster import EtcdCluster
from fleet.scene import pair, traffic
from fleet_harness.brokers import running_fleet


async def test_an_leader_that_is_sent_away_is_followed_by_another_and_nothing_fails(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    async with running_fleet(tmp_path, etcd) as fleet, pair(fleet.addresses) as both:
        async with traffic(both) as flow:
            for _ in range(3):
                await until(lambda: len(flow.done_s) > 20)
                leader = both.leader(fleet)
                await leader.leave()
                count = len(flow.done_s)
                await until(lambda: len(flow.done_s) > count + 20)  # noqa: B023 - at once
                assert both.leader(fleet) is not leader
                await leader.start()
                await asyncio.sleep(1.5)
        assert not flow.failed, flow.failed


async def test_an_leader_that_dies_is_followed_by_another_and_nothing_fails(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    async with running_fleet(tmp_path, etcd) as fleet, pair(fleet.addresses) as both:
        async with traffic(both) as flow:
            await until(lambda: len(flow.done_s) > 20)
            leader = both.leader(fleet)
            leader.kill()
            count = len(flow.done_s)
            await until(lambda: len(flow.done_s) > count + 20)
            assert both.leader(fleet) is not leader
        assert not flow.failed, flow.failed


async def test_an_leader_that_stands_still_longer_than_its_lease_harms_nothing_when_it_goes_on(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    async with running_fleet(tmp_path, etcd) as fleet, pair(fleet.addresses) as both:
        async with traffic(both) as flow:
            await until(lambda: len(flow.done_s) > 20)
            leader = both.leader(fleet)
            leader.stop()
            count = len(flow.done_s)
            await until(lambda: len(flow.done_s) > count + 20, 40.0)
            assert both.leader(fleet) is not leader
            leader.go_on()
            await asyncio.sleep(1.0)
            count = len(flow.done_s)
            await until(lambda: len(flow.done_s) > count + 20)
        assert not flow.failed, flow.failed


async def test_an_leader_that_is_cut_off_from_all_is_followed_by_another_and_nothing_fails(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    async with running_fleet(tmp_path, etcd, wired=True) as fleet, pair(fleet.addresses) as both:
        async with traffic(both) as flow:
            await until(lambda: len(flow.done_s) > 20)
            leader = both.leader(fleet)
            leader.cut_off()
            count = len(flow.done_s)
            await until(lambda: len(flow.done_s) > count + 20, 40.0)
            assert both.leader(fleet) is not leader
            leader.heal()
            await asyncio.sleep(1.0)
            count = len(flow.done_s)
            await until(lambda: len(flow.done_s) > count + 20)
        assert not flow.failed, flow.failed
