"""Certificates on both sides: who is let in, to what, and how everybody else is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from broker.certificates import DAY, DOMAIN, P_AND_D, Authority
from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, FakeAgent, engine, model_layout, pair
from broker.guarded import (
    ADMIN_METHODS,
    ALL_TENANTS_METHODS,
    ENGINE_METHODS,
    channel_of,
    credentials_of,
    error_of,
    everything,
    guarded,
    refusal,
    register,
    told_by_all,
)
from restow.broker.client import AdminClient, Credentials, EngineSession
from restow.broker.client.connection.brokers import Brokers
from restow.broker.client.connection.channel import RenewedChannel, open_channel
from restow.broker.errors import RestowError
from restow.broker.server.serve import RunningBroker
from restow.broker.trust.errors import KeyFileError
from restow.v1 import admin_pb2, admin_pb2_grpc

OPERATOR = f"{DOMAIN}/tenant/a/operator"
OPERATOR_OF_ALL = f"{DOMAIN}/operator"


# -- a whole house --------------------------------------------------------------------------------


async def test_a_whole_handoff(authority: Authority) -> None:
    async with (
        guarded(authority, strategy="pack") as running,
        pair(running.address, 2, 2, credentials=authority.client(*P_AND_D)) as both,
    ):
        await both.hand_over("h")
        assert (await both.p_agents[0].order("stage")).parts
        assert running.hub.directory.ledger.find("a", "h").state == "DONE"


async def test_each_side_may_have_a_certificate_of_its_own(authority: Authority) -> None:
    engines = f"{DOMAIN}/tenant/a/engine/"
    async with guarded(authority) as running:
        address, layout = running.address, model_layout(1)
        p = EngineSession("p", "1", layout, address, authority.client(engines + "p"))
        agents = authority.client(f"{DOMAIN}/tenant/a/agent/p")
        async with (
            p,
            engine(address, "d", credentials=authority.client(*P_AND_D)) as (d, _),
        ):
            fake = FakeAgent(p, layout, 0, 64)
            fake._channel = RenewedChannel(Brokers(address), agents)
            await fake.connect()
            released = p.publish("h", P_BLOCKS, POSITION)
            await fake.fence("h")
            assert (await d.request("h", D_BLOCKS)).done
            assert (await released).done
            await fake.drop()


# -- who is not let in ----------------------------------------------------------------------------


async def test_connections_without_a_good_certificate(authority: Authority, tmp_path: Path) -> None:
    stranger, old = Authority(tmp_path, "stranger"), authority.issue(*P_AND_D, lasts=-DAY)
    unreached = ("UNAVAILABLE", "BROKER_UNREACHABLE")
    async with guarded(authority) as running:
        for credentials in (
            Credentials(authority.path),
            stranger.client(*P_AND_D, authority=authority.path),
            authority.client(*P_AND_D, authority=stranger.path),
            Credentials(),
        ):
            async with channel_of(running.address, credentials) as channel:
                assert await refusal(register(channel)) == unreached
        # Our own clients would not show an old one.
        shown = grpc.ssl_channel_credentials(
            authority.path.read_bytes(), old.key.read_bytes(), old.certificate.read_bytes()
        )
        async with grpc.aio.secure_channel(running.address, shown) as channel:
            assert await refusal(register(channel)) == unreached
        with pytest.raises(KeyFileError, match="has expired"):
            AdminClient(running.address, credentials=credentials_of(old, authority))
        assert not running.hub.directory.members.engines
        async with channel_of(running.address, authority.client(*P_AND_D)) as channel:
            await register(channel)


NOBODY: list[tuple[str, ...]] = [
    (),
    ("spiffe://test/ns/prod/sa/engine",),
    (f"{DOMAIN}/tenant/a/engine",),
    (f"{DOMAIN}/tenant/a/engine/p/more",),
    (f"{DOMAIN}/tenant/a/owner",),
    (f"{DOMAIN}/tenant/*/engine/*",),
    (f"{DOMAIN}/tenant/a/engine/*", f"{DOMAIN}/tenant/b/agent/*"),
    (f"{DOMAIN}/tenant/a/engine/*", OPERATOR_OF_ALL),
    ("https://test/restow/operator",),
]


async def test_certificates_that_name_nobody(authority: Authority) -> None:
    async with guarded(authority) as running:
        for uris in NOBODY:
            async with channel_of(running.address, authority.client(*uris)) as channel:
                told = await told_by_all(channel)
            assert set(told.values()) == {("UNAUTHENTICATED", "UNAUTHENTICATED")}, uris


async def test_a_dns_name_that_looks_like_an_identity_is_none(authority: Authority) -> None:
    own = authority.issue(dns=(OPERATOR_OF_ALL,))
    async with (
        guarded(authority) as running,
        channel_of(running.address, credentials_of(own, authority)) as channel,
    ):
        error = await error_of(everything(channel)["GetStatus"]())
        assert error.reason == "UNAUTHENTICATED"


# -- who may call what ----------------------------------------------------------------------------


READS = {"Find", "Watch", "Command", "GetCommand"}


@pytest.mark.parametrize(
    ("uri", "allowed"),
    [
        (f"{DOMAIN}/tenant/a/engine/*", ENGINE_METHODS | {"GetHandoff", "GetLayout"} | READS),
        (f"{DOMAIN}/tenant/a/agent/*", {"Connect"}),
        (f"{DOMAIN}/tenant/a/router", {"GetHandoff", "AbandonHandoff"} | READS),
        (OPERATOR, ADMIN_METHODS | READS | {"ServerReflectionInfo"}),
        (OPERATOR_OF_ALL, ADMIN_METHODS | ALL_TENANTS_METHODS | READS | {"ServerReflectionInfo"}),
    ],
)
async def test_every_method_is_for_its_roles_alone(
    authority: Authority, uri: str, allowed: set[str]
) -> None:
    forbidden = ("PERMISSION_DENIED", "FORBIDDEN")
    async with (
        guarded(authority) as running,
        channel_of(running.address, authority.client(uri)) as channel,
    ):
        running.hub.expected.wait_s = 0
        told = await told_by_all(channel)
        assert {name for name, said in told.items() if said != forbidden} == allowed


async def test_health_is_for_everybody_who_may_connect(authority: Authority) -> None:
    async with (
        guarded(authority) as running,
        channel_of(running.address, authority.client()) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=""))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watched = await anext(aiter(stub.Watch(health_pb2.HealthCheckRequest(service=""))))
        assert watched.status == health_pb2.HealthCheckResponse.SERVING


# -- for whom somebody may speak ------------------------------------------------------------------


async def test_an_engine_speaks_for_itself_alone(authority: Authority) -> None:
    own = authority.client(f"{DOMAIN}/tenant/a/engine/e", f"{DOMAIN}/tenant/a/agent/e")
    other = authority.client(*(uri.replace("*", "x") for uri in P_AND_D))
    forbidden = ("PERMISSION_DENIED", "FORBIDDEN")
    async with guarded(authority) as running, channel_of(running.address, other) as channel:
        calls = everything(channel)
        calls["RegisterEngine"] = lambda: register(channel, "e")
        named = (*ENGINE_METHODS, "Connect")
        before = [await refusal(calls[name]()) for name in named]
        async with engine(running.address, "e", credentials=own) as (session, _):
            # It makes no difference whether the engine is there.
            assert [await refusal(calls[name]()) for name in named] == before
            session.publish("h", P_BLOCKS, POSITION)
        assert before == [forbidden] * len(named)
        assert await refusal(register(channel, "")) == forbidden


async def test_an_engine_is_no_agent_of_its_own(authority: Authority) -> None:
    uris = (f"{DOMAIN}/tenant/a/engine/e", f"{DOMAIN}/tenant/a/agent/other")
    async with guarded(authority) as running:
        session = EngineSession("e", "1", model_layout(1), running.address, authority.client(*uris))
        async with session:
            caught = await error_of(FakeAgent(session, model_layout(1), 0, 64).connect())
            assert caught.reason == "FORBIDDEN"
            assert caught.subject == {"engine": "e", "role": "agent"}


async def test_metadata_names_no_other_tenant(authority: Authority) -> None:
    def listed(uri: str, tenant: str | None) -> str:
        with AdminClient(
            running.address, tenant=tenant, credentials=authority.client(uri)
        ) as client:
            try:
                return ",".join(one.engine_id for one in client.engines())
            except RestowError as error:
                return f"{error.status} {error.reason}"

    async with (
        guarded(authority) as running,
        engine(running.address, "p", credentials=authority.client(*P_AND_D)),
    ):
        heard = [
            await asyncio.to_thread(listed, uri, tenant)
            for uri, tenant in (
                (OPERATOR, None),
                (OPERATOR, "a"),
                (OPERATOR, "b"),
                (f"{DOMAIN}/tenant/b/operator", "a"),
                (f"{DOMAIN}/tenant/b/operator", None),
                (OPERATOR_OF_ALL, None),
                (OPERATOR_OF_ALL, "a"),
            )
        ]
    denied = "PERMISSION_DENIED FORBIDDEN"
    assert heard == ["p", "p", denied, denied, "", "", "p"]


async def test_on_plaintext_nobody_is_asked_who_he_is(running: RunningBroker) -> None:
    async with open_channel(running.address) as channel:
        await register(channel)
        status = await admin_pb2_grpc.AdminStub(channel).GetStatus(
            admin_pb2.GetStatusRequest(), metadata=(("restow-tenant", "b"),)
        )
        assert status.engines == 1
