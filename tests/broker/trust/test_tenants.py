"""Tenants on one broker: what operators see, and what one tenant may not take from another."""

from __future__ import annotations

from broker.certificates import Authority
from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, engine, pair
from broker.guarded import ask, error_of, guarded, of_tenant, operator
from broker.pages import fetch
from restow.broker.client import AdminClient
from restow.broker.errors import RestowError
from restow.v1 import broker_pb2 as pb


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
        await mine.hand_over("j")

        async def error_about(handoff_id: str) -> RestowError:
            """Return the error of an operator of b who asks for a handoff."""
            of_b = operator(authority, "b")
            return await error_of(
                ask(running.address, of_b, lambda client: client.handoff(handoff_id))
            )

        unknown, theirs = await error_about("unknown"), await error_about("j")
        assert (theirs.status, theirs.reason) == (unknown.status, unknown.reason)
        assert theirs.message == unknown.message.replace("unknown", "j")
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

        whole, theirs = [
            (await fetch(running, f"/status.json{query}")).json for query in ("", "?tenant=b")
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
        one = (await fetch(running, "/handoff.json?tenant=b&id=two")).json
        assert (one["id"], one["state"]) == ("two", "DONE")
        for query in ("status.json?tenant=c", "handoff.json?tenant=a&id=two"):
            assert (await fetch(running, f"/{query}")).status == 404
