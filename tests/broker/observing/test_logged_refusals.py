"""Every refusal is logged once, with who was refused what and why; and no flood of them is."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from agent_harness.waiting import until
from broker.certificates import DOMAIN, Authority
from broker.fakes import (
    D_BLOCKS,
    P_BLOCKS,
    POSITION,
    broker,
    engine,
    heard,
    model_layout,
    pair,
)
from broker.guarded import (
    ask,
    channel_of,
    error_of,
    guarded,
    of_tenant,
    operator,
    reason_of,
    register,
)
from restow.broker.client import AdminClient, Credentials
from restow.broker.errors import RestowError
from restow.broker.server.base import logging as bounded_log
from restow.broker.server.base.logging import AT_ONCE, LOOK_S, MAX_KEPT, BoundedLog
from restow.broker.server.serve import RunningBroker
from restow.v1 import agent_link_pb2 as link
from restow.v1 import agent_link_pb2_grpc, broker_pb2_grpc
from restow.v1 import broker_pb2 as pb

P_ALONE = (f"{DOMAIN}/tenant/a/engine/p", f"{DOMAIN}/tenant/a/agent/p")
Logged = Callable[[str], list[dict[str, Any]]]


def refused(tenant: str, other: str) -> list[Any]:
    """Return calls about the engine ``other``, made for ``tenant`` if it is not empty."""
    ref = pb.EngineRef(engine_id=other, incarnation="1")
    publication, demand = pb.Publication(handoff_id="h"), pb.Demand(handoff_id="h")
    elsewhere = (("restow-tenant", tenant),)
    metadata = elsewhere if tenant else None
    hello = link.ConnectRequest(messages=[link.AgentMessage(hello=link.Hello(engine=ref))])

    async def once(request: Any) -> AsyncIterator[Any]:
        yield request

    return [
        lambda stub, _: stub.UnregisterEngine(
            pb.UnregisterEngineRequest(engine=ref), metadata=metadata
        ),
        lambda stub, _: stub.Publish(
            pb.PublishRequest(engine=ref, publication=publication), metadata=metadata
        ),
        lambda stub, _: stub.Request(
            pb.RequestRequest(engine=ref, demand=demand), metadata=metadata
        ),
        lambda stub, _: stub.Cancel(
            pb.CancelRequest(engine=ref, cancellation=pb.Cancellation(handoff_id="h")),
            metadata=metadata,
        ),
        lambda stub, _: stub.Session(once(pb.SessionRequest(engine=ref)), metadata=metadata).read(),
        lambda _, links: links.Connect(once(hello), metadata=metadata).read(),
    ]


@pytest.mark.parametrize(("tenant", "other"), [("", "somebody-else"), ("b", "p")])
async def test_each_call_across_engines_and_tenants_leaves_one_line(
    authority: Authority, logged: Logged, tenant: str, other: str
) -> None:
    async with (
        guarded(authority) as running,
        channel_of(running.address, authority.client(*P_ALONE)) as channel,
    ):
        calls = refused(tenant, other)
        stubs = broker_pb2_grpc.BrokerStub(channel), agent_link_pb2_grpc.AgentLinkStub(channel)
        errors: list[RestowError] = [await error_of(call(*stubs)) for call in calls]
        assert {one.reason for one in errors} == {"FORBIDDEN"}
        found = logged("call refused")
        assert len(found) == len(calls)
        assert {one["reason"] for one in found} == {"FORBIDDEN"}
        assert [one["detail"] for one in found] == [one.message for one in errors]
        assert {one["identity"].split(",")[0] for one in found} == {"agent and engine of tenant a"}
        assert all(one["method"].startswith("/restow.v1.") and one["peer"] for one in found)


async def test_who_is_not_known_is_told_by_where_he_calls_from(
    authority: Authority, logged: Logged
) -> None:
    async with (
        guarded(authority) as running,
        channel_of(running.address, authority.client("https://somebody.example")) as channel,
    ):
        assert await reason_of(register(channel)) == "UNAUTHENTICATED"
        (found,) = logged("call refused")
        assert (found["identity"], found["reason"]) == ("unknown", "UNAUTHENTICATED")
        assert "127.0.0.1" in found["peer"]


async def test_words_that_are_refused_within_a_session_leave_a_line_each(
    running: RunningBroker, logged: Logged
) -> None:
    async with (
        pair(running.address, 1, 1) as both,
        engine(running.address, "other", layout=model_layout(1)) as (other, agents),
    ):
        await both.published("h")
        await heard(running, "h")
        with pytest.raises(RestowError):
            await other.publish("h", P_BLOCKS, POSITION)
        await agents[0].fence("h")
        await until(lambda: len(logged("word refused")) == 2)
        found = [(one["word"], one["engine"], one["reason"]) for one in logged("word refused")]
        assert found == [
            ("publish", "other", "HANDOFF_OWNED"),
            ("fence", "other", "HANDOFF_OWNED"),
        ]
        assert {one["handoff"] for one in logged("word refused")} == {"h"}
        assert (await both.d.request("h", D_BLOCKS)).done


async def test_a_flood_leaves_few_lines_and_says_how_many_it_left_out(
    logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_log, "EACH_S", 0.0)
    async with (
        broker() as running,
        channel_of(running.address, Credentials()) as channel,
    ):
        stub, count = broker_pb2_grpc.BrokerStub(channel), 100
        ref = pb.EngineRef(engine_id="nobody", incarnation="1")
        for _ in range(count):
            await error_of(stub.UnregisterEngine(pb.UnregisterEngineRequest(engine=ref)))
        assert len(logged("call refused")) == AT_ONCE
        running.hub.said.tick(running.hub.now_s() + LOOK_S)
        (left,) = logged("lines left out")
        assert (left["of"], left["count"]) == ("call refused", count - AT_ONCE)


def test_one_tenants_flood_hides_nobody_elses_line(logged: Logged) -> None:
    now_s = 0.0
    log = BoundedLog(lambda: now_s)
    for _ in range(1000):
        log.warning("refused", tenant="loud")
    log.warning("refused", tenant="quiet")
    log.warning("another event", tenant="loud")
    assert [one["tenant"] for one in logged("refused")] == ["loud"] * AT_ONCE + ["quiet"]
    assert logged("another event")
    now_s = 1.0
    log.warning("refused", tenant="loud")
    assert logged("refused")[-1]["left_out"] == 1000 - AT_ONCE
    for number in range(MAX_KEPT * 2):
        log.warning("refused", tenant=str(number))
    assert len(log._allowances) == MAX_KEPT


async def test_what_operators_do_names_them(authority: Authority, logged: Logged) -> None:
    async with guarded(authority) as running:
        tenants, whole = of_tenant(authority, "a"), operator(authority, None)
        async with pair(running.address, 1, 1, credentials=tenants) as both:
            released = both.p.publish("h", P_BLOCKS, POSITION)
            await ask(running.address, operator(authority, "a"), known)
            await ask(running.address, operator(authority, "a"), lambda one: one.release("h"))
            assert (await released).reason == "RELEASED"
        await ask(running.address, whole, lambda client: client.set_draining(True))
    (found,) = logged("released by an operator")
    assert found["identity"].startswith("operator of tenant a, by certificate ")
    assert (found["tenant"], found["handoff"]) == ("a", "h")
    (found,) = logged("draining set by an operator")
    assert found["identity"].startswith("operator of all tenants, by certificate ")


def known(client: AdminClient) -> str:
    """Return the id of the handoff as soon as the broker has heard of it."""
    while True:
        found = client.handoffs().handoffs
        if found:
            return found[0].handoff_id


def status(address: str, path: str, host: str | None) -> int:
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.putrequest("GET", path, skip_host=True)
        if host is not None:
            connection.putheader("Host", host)
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


async def test_the_page_answers_to_its_own_names_alone(
    shown: RunningBroker, logged: Logged
) -> None:
    address = shown.http_address or ""

    async def asked(path: str, *hosts: str | None) -> set[int]:
        return {await asyncio.to_thread(status, address, path, host) for host in hosts}

    own = (address, "127.0.0.1", "localhost:80", "LocalHost", "[::1]:9464", "10.1.2.3:9464")
    named = ("status.example", "STATUS.example:9464", "b")
    strangers = ("evil.example", "evil.example:9464", "127.0.0.1.evil.example", "localhost.evil")
    odd = (None, "", "a@localhost", "localhost@evil", "[::1", "b,evil", "evil/localhost", "b:x")
    for path in ("/", "/status.json", "/handoff.json"):
        # Of no handoff there is nothing to tell.
        assert await asked(path, *own, *named) == {404 if path == "/handoff.json" else 200}
        assert await asked(path, *strangers) == {421}
        assert await asked(path, *odd) <= {400, 421}
    # What tells no names is for everyone who reaches the port.
    for path in ("/metrics", "/healthz", "/readyz"):
        assert await asked(path, *own, *strangers) == {200}
    found = logged("page refused")
    assert {one["host"] for one in found} >= set(strangers)
    assert {one["peer"] for one in found} == {"127.0.0.1"}
