"""A broker that knows its callers, and calls of every kind to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from broker.certificates import DOMAIN, P_AND_D, Authority, Pair
from broker.fakes import broker, model_layout
from restow.broker.client import AdminClient, Credentials
from restow.broker.client.connection.channel import open_channel
from restow.broker.client.connection.errors import from_rpc_error
from restow.broker.errors import RestowError
from restow.broker.rpc import wire
from restow.broker.server.serve import RunningBroker
from restow.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    agent_link_pb2,
    agent_link_pb2_grpc,
    broker_pb2_grpc,
)
from restow.v1 import broker_pb2 as pb

T = TypeVar("T")


def of_tenant(authority: Authority, tenant: str) -> Credentials:
    return authority.client(*(uri.replace("/a/", f"/{tenant}/") for uri in P_AND_D))


def operator(authority: Authority, tenant: str | None) -> Credentials:
    whose = "" if tenant is None else f"/tenant/{tenant}"
    return authority.client(f"{DOMAIN}{whose}/operator")


async def ask(
    address: str, credentials: Credentials, question: Callable[[AdminClient], T], **more: Any
) -> T:
    def call() -> T:
        with AdminClient(address, credentials=credentials, **more) as client:
            return question(client)

    return await asyncio.to_thread(call)


@contextlib.asynccontextmanager
async def guarded(authority: Authority, **more: Any) -> AsyncIterator[RunningBroker]:
    """Run a broker that knows its clients by certificates of this authority."""
    own = authority.issue(server=True)
    more |= {"tls_cert": own.certificate, "tls_key": own.key, "client_ca": authority.path}
    async with broker(**more) as running:
        yield running


async def refusal(call: Awaitable[object]) -> tuple[str, str]:
    """Return the status and the reason of a call that fails."""
    error = await error_of(call)
    return error.status, error.reason


async def error_of(call: Awaitable[object]) -> RestowError:
    """Return the error of a call that fails."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error, "broker")
    except RestowError as error:
        return error
    raise AssertionError("it was let in")


async def first_of(call: AsyncIterable[object]) -> object:
    return await anext(aiter(call))


def register(channel: grpc.aio.Channel, name: str = "e") -> Awaitable[object]:
    ref = pb.EngineRef(engine_id=name, incarnation="1")
    request = pb.RegisterEngineRequest(engine=ref, layout=wire.layout_to_proto(model_layout(1)))
    return broker_pb2_grpc.BrokerStub(channel).RegisterEngine(request)


@contextlib.asynccontextmanager
async def channel_of(address: str, credentials: Credentials) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(address, credentials) as channel:
        yield channel


def credentials_of(own: Pair, authority: Authority) -> Credentials:
    return Credentials(authority.path, own.certificate, own.key)


def everything(channel: grpc.aio.Channel) -> dict[str, Callable[[], Awaitable[object]]]:
    """Return calls of all methods but those of health, about an engine ``e`` and a handoff."""
    broker_stub = broker_pb2_grpc.BrokerStub(channel)
    admin = admin_pb2_grpc.AdminStub(channel)
    ref = pb.EngineRef(engine_id="e", incarnation="1")
    hello = agent_link_pb2.AgentMessage(hello=agent_link_pb2.Hello(engine=ref))

    return {
        "RegisterEngine": lambda: register(channel, "registered"),
        "UnregisterEngine": lambda: broker_stub.UnregisterEngine(
            pb.UnregisterEngineRequest(engine=ref)
        ),
        "Session": lambda: first_of(broker_stub.Session(iter([pb.SessionRequest(engine=ref)]))),
        "Publish": lambda: broker_stub.Publish(pb.PublishRequest(engine=ref)),
        "Request": lambda: broker_stub.Request(pb.RequestRequest(engine=ref)),
        "Find": lambda: broker_stub.Find(pb.FindRequest(engine_id="e")),
        "Cancel": lambda: broker_stub.Cancel(pb.CancelRequest(engine=ref)),
        "Connect": lambda: first_of(
            agent_link_pb2_grpc.AgentLinkStub(channel).Connect(
                iter([agent_link_pb2.ConnectRequest(messages=[hello])])
            )
        ),
        "GetStatus": lambda: admin.GetStatus(admin_pb2.GetStatusRequest()),
        "ListTenants": lambda: admin.ListTenants(admin_pb2.ListTenantsRequest()),
        "ListEngines": lambda: admin.ListEngines(admin_pb2.ListEnginesRequest()),
        "ListBrokers": lambda: admin.ListBrokers(admin_pb2.ListBrokersRequest()),
        "GetLayout": lambda: admin.GetLayout(admin_pb2.GetLayoutRequest(engine_id="e")),
        "ListHoldings": lambda: admin.ListHoldings(admin_pb2.ListHoldingsRequest()),
        "ListAgents": lambda: admin.ListAgents(admin_pb2.ListAgentsRequest()),
        "ListHandoffs": lambda: admin.ListHandoffs(admin_pb2.ListHandoffsRequest()),
        "GetHandoff": lambda: admin.GetHandoff(admin_pb2.GetHandoffRequest(handoff_id="h")),
        "ListCosts": lambda: admin.ListCosts(admin_pb2.ListCostsRequest()),
        "ProbePair": lambda: admin.ProbePair(admin_pb2.ProbePairRequest(source_engine="p")),
        "ReleaseHandoff": lambda: admin.ReleaseHandoff(
            admin_pb2.ReleaseHandoffRequest(handoff_id="h")
        ),
        "DrainEngine": lambda: admin.DrainEngine(admin_pb2.DrainEngineRequest(engine_id="e")),
        "ForgetEngine": lambda: admin.ForgetEngine(admin_pb2.ForgetEngineRequest(engine_id="e")),
        "ForgetStates": lambda: admin.ForgetStates(admin_pb2.ForgetStatesRequest(revision="v1")),
        "AbandonHandoff": lambda: admin.AbandonHandoff(
            admin_pb2.AbandonHandoffRequest(handoff_id="h")
        ),
        "AuditBroker": lambda: admin.AuditBroker(admin_pb2.AuditBrokerRequest()),
        "SetDraining": lambda: admin.SetDraining(admin_pb2.SetDrainingRequest()),
        "ServerReflectionInfo": lambda: first_of(
            reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            )
        ),
    }


def methods_of_the_contract() -> list[Any]:
    files = (pb.DESCRIPTOR, agent_link_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
    return [
        method
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    ]


ENGINE_METHODS = {"RegisterEngine", "UnregisterEngine", "Session", "Publish", "Request", "Cancel"}
ADMIN_METHODS = {
    "GetStatus",
    "ListTenants",
    "ListEngines",
    "ListAgents",
    "ListHoldings",
    "ListBrokers",
    "GetLayout",
    "ListHandoffs",
    "GetHandoff",
    "ListCosts",
    "ProbePair",
    "ReleaseHandoff",
    "DrainEngine",
    "ForgetEngine",
    "ForgetStates",
    "AbandonHandoff",
}
ALL_TENANTS_METHODS = {"AuditBroker", "SetDraining"}
"""What concerns all tenants is for operators of all."""
