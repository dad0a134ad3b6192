"""What one of several brokers does that is not the leader, not let in, or not sure of its lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_harness.waiting import until
from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, broker, model_layout
from etcd_harness.cluster import EtcdCluster, running_etcd
from fleet.scene import pair
from forked.ports import free_port
from registry.scene import AtEtcd
from restow.broker.client import EngineSession
from restow.broker.client.connection.errors import BrokerCallError
from restow.broker.core.audit import audit
from restow.broker.core.common.limits import Limits
from restow.broker.errors import AddressInvalidError, NotLeaderError
from restow.broker.rpc.sizes import SEVERAL_ANSWER_S, SEVERAL_EVERY_S
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.base.standing import LEADER_WAIT_S
from restow.broker.server.serve import RunningBroker


@asynccontextmanager
async def one_broker(
    etcd: EtcdCluster | str, name: str, **more: Any
) -> AsyncIterator[RunningBroker]:
    endpoints = etcd if isinstance(etcd, str) else ",".join(etcd.endpoints)
    async with broker(f"127.0.0.1:{free_port()}", etcd=endpoints, fleet=name, **more) as running:
        yield running


def name_of(folder: Path) -> str:
    return folder.name.lower().replace("_", "-")


def fleet_of(running: RunningBroker) -> Any:
    assert running.fleet is not None
    return running.fleet


async def let_in(*brokers: RunningBroker) -> None:
    """Wait until all brokers know of each other, and are let in."""
    addresses = {one.address for one in brokers}
    await until(
        lambda: all(
            fleet_of(one).report().brokers == addresses
            and fleet_of(one).leadership.lease is not None
            and fleet_of(one).leadership.leader
            for one in brokers
        )
    )


async def test_a_standby_says_who_leads(etcd: EtcdCluster, tmp_path: Path) -> None:
    async with one_broker(etcd, name_of(tmp_path)) as x, one_broker(etcd, name_of(tmp_path)) as y:
        await let_in(x, y)
        async with pair(f"{x.address},{y.address}") as both:
            assert (await both.hand_over()).done
            leader = next(one for one in (x, y) if one.hub.directory.members.engines)
            other = x if leader is y else y
            assert not other.hub.directory.members.engines
            with pytest.raises(NotLeaderError) as caught:
                await other.hub.standing.lead()
            assert caught.value.subject["leader"] == leader.address
            assert other.hub.standing.epoch == 0 < leader.hub.standing.epoch


async def test_a_leader_goes_above_an_epoch_that_an_engine_knows(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    async with one_broker(etcd, name_of(tmp_path)) as x, pair(x.address) as both:
        x.hub.standing.name_epoch(40)
        await until(lambda: x.hub.standing.epoch == 41)
        assert x.hub.standing.term == 1
        assert (await both.hand_over()).done
        for session in (both.p, both.d):  # the next event says it
            assert session._stream._epochs.highest == 41


async def test_a_broker_fails_when_its_part_in_the_fleet_does(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    async with one_broker(etcd, name_of(tmp_path)) as x:
        await let_in(x)
        fleet_of(x).leadership.tick = None  # as by an error in our own code
        with pytest.raises(ExceptionGroup):
            async with asyncio.timeout(5):
                await x.failed()


async def test_a_leader_whose_key_is_deleted_leads_anew_and_has_forgotten_everything(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    # Another broker may have led between the deletion and the moment at which this broker looks.
    async with (
        one_broker(etcd, name_of(tmp_path)) as x,
        AtEtcd(etcd, name_of(tmp_path)) as scene,
    ):
        await let_in(x)
        async with pair(x.address) as both:
            assert (await both.hand_over()).done
            epoch, ledger = x.hub.standing.epoch, x.hub.directory.ledger
            assert ledger.ended
            await scene.delete_leader()
            await until(lambda: x.hub.standing.epoch > epoch)
            assert x.hub.standing.term == 2
            assert not ledger.ended
            assert (await both.hand_over()).done


async def test_who_leads_no_longer_forgets_everything(etcd: EtcdCluster, tmp_path: Path) -> None:
    async with one_broker(etcd, name_of(tmp_path)) as x, one_broker(etcd, name_of(tmp_path)) as y:
        await let_in(x, y)
        async with pair(f"{x.address},{y.address}") as both:
            assert (await both.hand_over()).done
            leader = next(one for one in (x, y) if one.hub.directory.members.engines)
            other = x if leader is y else y
            published = [both.p.publish(f"open{n}", P_BLOCKS, POSITION) for n in range(3)]
            asked = both.d.request("asked", D_BLOCKS)
            await until(lambda: len(leader.hub.directory.ledger.live) == 4)
            before = leader.hub.directory.ledger.statistics.ends.copy()
            await fleet_of(leader).leave()
            await until(lambda: len(other.hub.directory.ledger.live) == 4)
            directory = leader.hub.directory
            assert not directory.ledger.live
            assert not directory.members.engines
            assert not directory.ledger.by_number
            assert directory.ledger.statistics.ends == before
            assert list(audit(directory)) == []
            assert list(audit(other.hub.directory)) == []
            assert not any(one.done() for one in (*published, asked))
            for agent in both.p_agents:
                for number in range(3):
                    agent.fence(f"open{number}")
            assert (await both.d.request("open1", D_BLOCKS)).done


async def test_one_that_is_not_sure_of_its_lease_stands_still_and_nothing_fails(
    tmp_path: Path,
) -> None:
    async with (
        running_etcd(tmp_path, 1) as etcd,
        one_broker(etcd, "still") as x,
        pair(x.address) as both,
    ):
        assert (await both.hand_over()).done
        etcd.members[0].stop()
        await until(lambda: not x.hub.standing.is_sure())
        ended = x.hub.directory.ledger.statistics.ends.copy()
        released, asked = both.begin()
        await asyncio.sleep(0.5)
        assert not x.hub.standing.is_sure()
        assert x.hub.directory.ledger.statistics.ends == ended
        assert not released.done()
        assert not asked.done()
        etcd.members[0].go_on()
        assert (await asked).done
        assert (await released).done


async def test_one_that_etcd_has_not_let_in_does_not_lead_and_says_why(tmp_path: Path) -> None:
    port = free_port()
    async with one_broker(f"127.0.0.1:{port}", "late") as x:
        with pytest.raises(BrokerCallError, match=f"no etcd answers at 127.0.0.1:{port}") as caught:
            await EngineSession("e", "1", model_layout(), x.address).start(LEADER_WAIT_S + 1)
        assert caught.value.reason == "NO_LEADER"


async def test_two_of_one_address_are_not_both_let_in(etcd: EtcdCluster, tmp_path: Path) -> None:
    name = name_of(tmp_path)
    async with one_broker(etcd, name) as x:
        await let_in(x)
        async with one_broker(etcd, name, advertise=x.address) as twin:
            await until(lambda: fleet_of(twin).report().trouble is not None)
            assert fleet_of(twin).report().trouble.reason == "ADDRESS_TAKEN"
            assert twin.hub.standing.epoch == 0


async def test_an_address_that_is_no_place_is_refused_at_the_start(etcd: EtcdCluster) -> None:
    with pytest.raises(AddressInvalidError, match="--advertise HOST:PORT"):
        async with broker("0.0.0.0:0", etcd=",".join(etcd.endpoints)):
            pass


@pytest.mark.parametrize("others", [{"etcd": "127.0.0.1:2379"}, {"kubernetes_leases": "restow"}])
def test_an_agent_has_time_to_ask_others_first_and_d_dies_sooner_for_one_broker(
    others: dict[str, str],
) -> None:
    # The leader stood still for less than its lease: an agent that left it comes back, and lives.
    noticed_s = SEVERAL_EVERY_S + SEVERAL_ANSWER_S
    assert BrokerSettings(**others).limits().agent_back_s > noticed_s + LEADER_WAIT_S  # type: ignore[arg-type]
    assert BrokerSettings().limits() == Limits()
