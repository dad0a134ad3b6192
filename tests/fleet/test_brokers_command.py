"""What operators see of three brokers over a real etcd, and when etcd is gone."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from agent_harness.waiting import until
from cli.broker_process import run_restow
from etcd_harness.cluster import EtcdCluster, running_etcd
from fleet.scene import pair
from fleet_harness.brokers import HOST, Fleet
from forked.ports import free_port
from restow.broker.client import AdminClient

WITHIN_S = 40.0


async def restow(*arguments: str) -> Any:
    done = await asyncio.to_thread(run_restow, *arguments, "--json")
    return json.loads(done.stdout)


def ready(port: int) -> str:
    """Return what the broker's probe says, or an empty text if nobody listens."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/readyz", timeout=5) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
    except OSError:
        return ""


async def test_each_broker_tells_who_leads_and_the_leader_answers_for_all(
    etcd: EtcdCluster, fleet: Fleet
) -> None:
    async with pair(fleet.addresses, "told") as both:
        assert (await both.hand_over()).done
        leader = both.leader(fleet)
        other = next(one for one in fleet.brokers if one is not leader)
        epochs = set()
        for asked in (leader, other):
            told = await restow("brokers", "--broker", asked.address)
            assert [one["address"] for one in told["brokers"]] == sorted(fleet.addresses.split(","))
            assert [one["address"] for one in told["brokers"] if one["leads"]] == [leader.address]
            assert told["membership"]["address"] == asked.address
            assert told["membership"]["leader"] == leader.address
            epochs.add(told["membership"]["epoch"])
        assert len(epochs) == 1
        away = f"{HOST}:{free_port()},{other.address}"
        assert len((await restow("engines", "--broker", away))["engines"]) == 2
        assert (await restow("check", "--broker", fleet.addresses))["findings"] == []
        looked = await restow("doctor", "--broker", fleet.addresses, "--etcd", etcd.endpoints[0])
        ok = {one["subject"] for one in looked["findings"] if one["verdict"] == "ok"}
        assert ok >= {f"broker {one.address}" for one in fleet.brokers}
        assert ok >= {f"etcd {etcd.endpoints[0]}", "etcd's leases"}


async def test_a_broker_says_that_it_stands_still_and_why_and_one_that_is_not_let_in_is_not_ready(
    tmp_path: Path,
) -> None:
    ports = [free_port(), free_port()]
    async with running_etcd(tmp_path, 1, heartbeat_ms=50, election_ms=500) as etcd:
        # With a longer lease it stands still for 6 s, and not for 1.5 s.
        options = ("--fleet", "still", "--member-lease-s", "8")
        fleet = Fleet(tmp_path, etcd, 2, options)
        for one, port in zip(fleet.brokers, ports, strict=True):
            one._options = (*one._options, "--http-listen", f"{HOST}:{port}")
        first, late = fleet.brokers
        try:
            await first.start()
            async with pair(first.address):
                etcd.kill()
                with AdminClient(first.address) as client:
                    await until(lambda: client.brokers().membership.trouble_reason != "", WITHIN_S)
                    await until(lambda: client.brokers().membership.HasField("still_s"), WITHIN_S)
                    membership = client.brokers().membership
                assert membership.trouble_reason == "ETCD_UNREACHABLE"
                assert ready(ports[0]) == "503 stands still: its lease may have ended\n"
                text = (
                    await asyncio.to_thread(
                        run_restow, "status", "-o", "wide", "--broker", first.address
                    )
                ).stdout
                assert "has stood still for" in text
                assert "ETCD_UNREACHABLE" in text
                late.begin()
                await until(lambda: bool(ready(ports[1])), WITHIN_S)
                assert ready(ports[1]) == "503 not let in by the other brokers' registry\n"
                etcd.start()
                await until(lambda: [ready(port) for port in ports] == ["200", "200"], WITHIN_S)
        finally:
            for one in fleet.brokers:
                one.kill()
