"""`restow doctor --etcd` against a real etcd, one that is not there, and one that refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from etcd_harness.cluster import EtcdCluster, client_of, running_etcd
from forked.ports import free_port
from restow.broker.doctor.etcd_view import judge_lease, judge_member, look_at_etcd
from restow.broker.doctor.local import Finding, Verdict
from restow.broker.registry.etcd_access import EtcdAccess
from restow.broker.registry.etcd_client import MemberStatus


async def looked_at(access: EtcdAccess) -> dict[str, Finding]:
    return {one.subject: one async for one in look_at_etcd(access, "default")}


async def test_members_leader_release_and_leases_are_told_and_nothing_is_left_behind(
    etcd: EtcdCluster,
) -> None:
    found = await looked_at(EtcdAccess(etcd.endpoints))
    members = [found[f"etcd {one}"] for one in etcd.endpoints]
    assert {one.verdict for one in members} == {Verdict.OK}
    assert sum("leads" in one.words for one in members) == 1
    leases = found["etcd's leases"]
    assert leases.words.startswith("2 s are granted as 2 s, with a key in ")
    async with client_of(etcd) as client:
        assert not (await client.range(b"/restow/default/doctor/", b"/restow/default/doctor0")).kvs


async def test_a_member_that_is_not_there_is_named_and_the_others_are_used(
    etcd: EtcdCluster,
) -> None:
    away = f"127.0.0.1:{free_port()}"
    found = await looked_at(EtcdAccess((away, *etcd.endpoints)))
    assert found[f"etcd {away}"].verdict is Verdict.BAD
    assert found[f"etcd {away}"].next_step == "`restow reasons ETCD_UNREACHABLE`"
    assert found["etcd's leases"].verdict is Verdict.OK


async def test_slow_timers_make_long_leases_which_is_told(tmp_path: Path) -> None:
    async with running_etcd(tmp_path, 1, heartbeat_ms=300, election_ms=3000) as slow:
        leases = (await looked_at(EtcdAccess(slow.endpoints)))["etcd's leases"]
    assert leases.verdict is Verdict.WARN
    assert "2 s are granted as 5 s" in leases.words


@pytest.mark.parametrize(("granted_s", "verdict"), [(2.0, Verdict.OK), (3.0, Verdict.WARN)])
def test_a_lease_that_is_longer_than_asked_is_a_warning(granted_s: float, verdict: Verdict) -> None:
    assert judge_lease(granted_s, 0.01).verdict is verdict


def test_a_member_without_a_leader_is_bad() -> None:
    assert judge_member(MemberStatus("h:1", "3.5.1", False, False)).verdict is Verdict.BAD
