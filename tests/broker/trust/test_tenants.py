"""Tenants on one broker: what operators see, and what one tenant may not take from another."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

import pytest

from broker.certificates import Authority
from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, called, engine, model_layout, pair
from broker.guarded import ask, guarded, of_tenant, operator
from restow.broker.client import AdminClient, BrokerCallError, EngineSession
from restow.v1 import broker_pb2 as pb


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tenants"))


async def test_tenants_with_equal_names_share_nothing(authority: Authority) -> None:
    async with (
        guarded(authority) as running,
        pair(running.address, 2, 1, credentials=of_tenant(authority, "a")) as mine,
        pair(running.address, 2, 1, credentials=of_tenant(authority, "b")) as others,
    ):
        waiting = mine.p.publish("h", P_BLOCKS, POSITION)
        ended = await others.d.request("h", D_BLOCKS, timeout_ms=50)
        assert ended.reason == "NOT_PUBLISHED"
        others.d.cancel("h")
        await others.hand_over("i")
        with pytest.raises(BrokerCallError) as caught:
            await ask(
                running.address, operator(authority, "b"), lambda client: client.handoff("unknown")
            )
        unknown = caught.value
        await mine.hand_over("j")
        with pytest.raises(BrokerCallError) as caught:
            await ask(running.address, operator(authority, "b"), lambda client: client.handoff("j"))
        assert (caught.value.status, caught.value.reason) == (unknown.status, unknown.reason)
        assert caught.value.message == unknown.message.replace("unknown", "j")
        # Everybody was told of peers of its own tenant alone.
        for one, its_own in ((mine, mine), (others, others)):
            names = {agent.hello.agent_name for agent in its_own.p_agents}
            told = {o.peer.agent_name for a in one.d_agents for o in a.orders if o.HasField("peer")}
            assert told == names
        assert not waiting.done()


async def test_an_operator_sees_the_figures_of_its_own_tenant(authority: Authority) -> None:
    hosts = ("host-p", "host-d")
    async with guarded(authority) as running:
        address = running.address
        async with (
            pair(address, 2, 1, hosts, of_tenant(authority, "a")) as mine,
            pair(address, 1, 1, ("else", "where"), of_tenant(authority, "b")) as others,
        ):
            await mine.hand_over("one")
            await mine.hand_over("two")
            await others.hand_over("one")
            mine.p.publish("three", P_BLOCKS, POSITION)
            asked = others.d.request("four", D_BLOCKS, timeout_ms=50)
            await asked
            views = [operator(authority, tenant) for tenant in ("a", "b", "c", None)]
            status = [await ask(address, one, AdminClient.status) for one in views]
            assert [(s.engines, s.agents, s.handoffs_live) for s in status] == [
                (2, 3, 1),
                (2, 2, 0),
                (0, 0, 0),
                (4, 5, 1),
            ]
            assert [{one.state: one.count for one in s.ended} for s in status] == [
                {pb.HANDOFF_STATE_DONE: 2},
                {pb.HANDOFF_STATE_DONE: 1, pb.HANDOFF_STATE_EXPIRED: 1},
                {},
                {pb.HANDOFF_STATE_DONE: 3, pb.HANDOFF_STATE_EXPIRED: 1},
            ]
            assert [s.bytes_read for s in status] == [200, 100, 0, 300]
            assert [bool(s.plans) for s in status] == [False, False, False, True]
            costs = [await ask(address, one, AdminClient.costs) for one in views]
            assert [{one.source_host for one in c.hosts} for c in costs] == [
                {"host-p"},
                {"else"},
                set(),
                {"host-p", "else"},
            ]
            listed = [await ask(address, one, AdminClient.handoffs) for one in views[:3]]
            assert [{h.handoff_id for h in one.handoffs} for one in listed] == [
                {"one", "two", "three"},
                {"one", "four"},
                set(),
            ]
            named = await ask(address, views[3], AdminClient.handoffs, tenant="b")
            assert {one.handoff_id for one in named.handoffs} == {"one", "four"}


async def test_quotas_are_told_to_whom_they_bound(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, others = of_tenant(authority, "a"), of_tenant(authority, "b")
    bounds = {"tenant_max_live": 1, "tenant_max_engines": 2}
    async with guarded(authority, **bounds) as running:
        address = running.address
        async with (
            pair(address, 1, 1, credentials=own) as mine,
            engine(address, "e", credentials=others) as (other, _),
        ):
            published = called(running.hub.directory, "publish", monkeypatch)
            cancelled = called(running.hub.directory, "cancel", monkeypatch)
            mine.p.publish("one", P_BLOCKS, POSITION)
            await published.get()
            with pytest.raises(BrokerCallError) as caught:
                await mine.d.request("two", D_BLOCKS)
            error = caught.value
            assert (error.status, error.reason) == ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
            assert error.message.startswith("tenant a has 1 handoffs, and its quota is 1: wait")
            with pytest.raises(BrokerCallError, match="tenant a has 2 engines") as caught:
                await EngineSession("third", "1", model_layout(1), address, own).start()
            assert caught.value.reason == "QUOTA_EXCEEDED"
            assert caught.value.subject == {"tenant": "a", "what": "engines", "limit": "2"}
            other.publish("one", P_BLOCKS, POSITION)
            await published.get()
            mine.p.cancel("one")
            await cancelled.get()
            await mine.hand_over("two")


async def test_an_engine_that_leaves_is_not_taken_for_its_namesake(authority: Authority) -> None:
    async with (
        guarded(authority) as running,
        engine(running.address, "p", credentials=of_tenant(authority, "a")) as (p, agents),
        engine(running.address, "p", credentials=of_tenant(authority, "b")) as (q, _),
    ):
        assert p.ref != q.ref
        own = [key for key in running.hub.directory.members.engines if key.tenant == "a"]
        await q.close()
        assert [key for key in running.hub.directory.members.engines if key.tenant == "a"] == own
        assert not agents[0].ended.is_set()


async def test_traffic_is_that_of_the_own_tenant(authority: Authority) -> None:
    # The traffic is shown to operators of one tenant, and on the page where a tenant is chosen.
    async with (
        guarded(authority, http_listen="127.0.0.1:0", status_page=True) as running,
        pair(running.address, 1, 1, credentials=of_tenant(authority, "a")) as mine,
        pair(running.address, 1, 1, credentials=of_tenant(authority, "b")) as others,
    ):
        await mine.hand_over("one")
        for name in ("one", "two"):
            await others.hand_over(name)
        views = [operator(authority, tenant) for tenant in ("a", "b", "c", None)]
        for view, count, tenants in zip(
            views, (1, 2, 0, 3), (["a"], ["b"], [], ["a", "b"]), strict=True
        ):
            listed = {"tenant": "*"} if view is views[-1] else {}
            told = await ask(
                running.address, view, lambda client: client.status(traffic=True), **listed
            )
            assert sum(step.done for step in told.steps) == count
            assert sorted(pair.tenant for pair in told.pairs) == tenants
        assert not (await ask(running.address, views[0], AdminClient.status)).step_s

        def page(query: str) -> dict[str, Any]:
            url = f"http://{running.http_address}/{query}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found

        whole, theirs = [
            await asyncio.to_thread(page, f"status.json{query}") for query in ("", "?tenant=b")
        ]
        assert whole["tenants"] == theirs["tenants"] == ["a", "b"]
        assert {one["name"] for one in whole["engines"]} == {"a/p", "a/d", "b/p", "b/d"}
        assert {one["name"] for one in theirs["engines"]} == {"p", "d"}
        for seen, count in ((whole, 3), (theirs, 2)):
            assert ["DONE", str(count), False] in seen["figures"]
            assert len(seen["ended"]["rows"]) == count
            assert sum(int(one["done"]) for one in seen["pairs"]) == count
        assert [one["from"] for one in whole["pairs"]] == ["b/p", "a/p"]
        assert [one["from"] for one in theirs["pairs"]] == ["p"]
        one = await asyncio.to_thread(page, "handoff.json?tenant=b&id=two")
        assert (one["id"], one["state"]) == ("two", "DONE")
        for query in ("status.json?tenant=c", "handoff.json?tenant=a&id=two"):
            with pytest.raises(OSError, match="404"):
                await asyncio.to_thread(page, query)
