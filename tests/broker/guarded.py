"""A broker that knows its callers, and calls of every kind to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf import message_factory
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
    agent_link_pb2,
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
    async with broker(**authority.server(), **more) as running:
        yield running


async def refusal(call: Awaitable[object]) -> tuple[str, str]:
    """Return the status and the reason of a call that fails."""
    error = await error_of(call)
    return error.status, error.reason


async def reason_of(call: Awaitable[object]) -> str:
    """Return the reason of a call that fails."""
    return (await error_of(call)).reason


async def error_of(call: Awaitable[object]) -> RestowError:
    """Return the error of a call that fails."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error, "broker")
    except RestowError as error:
        return error
    raise AssertionError("it was let in")


async def told_by_all(channel: grpc.aio.Channel) -> dict[str, tuple[str, str]]:
    """Call every method at once; return the status and the reason of each call that fails."""

    async def told(call: Awaitable[object]) -> tuple[str, str]:
        try:
            return await refusal(call)
        except AssertionError:
            return ("OK", "")

    calls = everything(channel)
    return dict(zip(calls, await asyncio.gather(*(told(c()) for c in calls.values())), strict=True))


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


def methods_of_the_contract() -> list[Any]:
    files = (pb.DESCRIPTOR, agent_link_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
    return [
        method
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    ]


def said_raw(channel: grpc.aio.Channel, method: Any, words: bytes) -> Awaitable[object]:
    """Call a method with bytes."""
    made: Any = channel  # grpc's types know no method without serializers
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:
        return first_of(made.stream_stream(path)(iter([words])))
    if method.server_streaming:
        return first_of(made.unary_stream(path)(words))
    answer: Awaitable[object] = made.unary_unary(path)(words)
    return answer


def request_of(method: Any) -> bytes:
    """Return a request about an engine ``e`` and a handoff ``h``, as far as the method has them."""
    engine = pb.EngineRef(engine_id="e", incarnation="1")
    if method.name == "Connect":
        hello = agent_link_pb2.AgentMessage(hello=agent_link_pb2.Hello(engine=engine))
        return agent_link_pb2.ConnectRequest(messages=[hello]).SerializeToString()
    values = {"engine": engine, "engine_id": "e", "handoff_id": "h", "revision": "v1"}
    known = values.keys() & method.input_type.fields_by_name.keys()
    make: Any = message_factory.GetMessageClass(method.input_type)
    request: bytes = make(**{name: values[name] for name in known}).SerializeToString()
    return request


def everything(channel: grpc.aio.Channel) -> dict[str, Callable[[], Awaitable[object]]]:
    """Return calls of all methods but those of health, about an engine ``e`` and a handoff."""
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    return {
        **{
            method.name: partial(said_raw, channel, method, request_of(method))
            for method in methods_of_the_contract()
        },
        "RegisterEngine": lambda: register(channel, "registered"),
        "ServerReflectionInfo": lambda: first_of(reflection.ServerReflectionInfo(iter([listing]))),
    }


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
