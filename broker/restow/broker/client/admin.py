"""The operator's view of a broker: one set of calls, made blocking or with ``await``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

import grpc

from restow.broker.client import admin_calls as calls
from restow.broker.client.admin_calls import AdminCall, admin_options
from restow.broker.client.connection.authorized_channel import channel_showing
from restow.broker.client.connection.channel import broker_address
from restow.broker.client.connection.credentials import Credentials
from restow.broker.client.connection.diagnosis import explained, explained_soon
from restow.broker.client.connection.errors import from_rpc_error
from restow.broker.client.connection.own_process import OWN_PROCESS
from restow.broker.errors import RestowError
from restow.v1 import admin_pb2_grpc, broker_pb2_grpc

P = ParamSpec("P")
T = TypeVar("T")


class _Admin:
    """What both clients have: where the broker is, and who asks."""

    _grpc: ClassVar[Any]
    """The module whose channels are used."""

    def __init__(
        self,
        broker: str | None = None,
        timeout_s: float = 5.0,
        tenant: str | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Prepare; the first call connects.

        ``broker`` is HOST:PORT, or as gRPC writes addresses; None: RESTOW_BROKER or the default.
        ``timeout_s`` is how long each call may take. ``tenant`` None is that of the identity, or
        the broker's default one. ``credentials`` None: those of the environment. Raises a
        `TrustError` of theirs, and `AddressInvalidError`; like every call `ForkedError`, in a
        process that was forked after the first client, session or agent.
        """
        OWN_PROCESS.check()
        self.address = broker_address(broker)
        self._credentials = credentials or Credentials.of()
        self._channel = channel_showing(
            self._credentials, self._grpc, self.address, admin_options()
        )
        self._stub = admin_pb2_grpc.AdminStub(self._channel)
        self._broker_stub = broker_pb2_grpc.BrokerStub(self._channel)
        self._timeout_s = timeout_s
        self._metadata = (("restow-tenant", tenant),) if tenant is not None else ()

    def _made(self, call: AdminCall[Any]) -> Any:
        """The call under way."""
        OWN_PROCESS.check()
        method = getattr(self._broker_stub if call.of_broker else self._stub, call.method)
        patience_s = max(self._timeout_s, call.least_s)
        return method(call.request, timeout=patience_s, metadata=self._metadata)

    def _error(self, error: grpc.RpcError) -> RestowError:
        return from_rpc_error(error, self.address, self._credentials.secure)


def _blocking(make: Callable[P, AdminCall[T]]) -> Callable[Concatenate[AdminClient, P], T]:
    @wraps(make)
    def call(self: AdminClient, /, *words: P.args, **more: P.kwargs) -> T:
        one = make(*words, **more)
        try:
            return one.pick(self._made(one))
        except grpc.RpcError as error:
            raise explained(self._error(error), self.address, self._credentials) from None

    return call


def _awaited(
    make: Callable[P, AdminCall[T]],
) -> Callable[Concatenate[AsyncAdminClient, P], Awaitable[T]]:
    @wraps(make)
    async def call(self: AsyncAdminClient, /, *words: P.args, **more: P.kwargs) -> T:
        one = make(*words, **more)
        try:
            answer = await self._made(one)
        except grpc.aio.AioRpcError as error:
            unmet = self._error(error)
            raise await explained_soon(unmet, self.address, self._credentials) from None
        return one.pick(answer)

    return call


class AdminClient(_Admin):
    """Makes calls of `restow.v1.Admin`: the operator's view of a broker. A context.

    Each call waits for its answer, and is tried again while the broker is away, for a moment. It
    raises `BrokerCallError` with the broker's refusal, or `BrokerUnreachableError`. Of answers
    that are messages docs/api.md says what their fields mean.
    """

    _grpc: ClassVar = grpc

    status = _blocking(calls.status)
    tenants = _blocking(calls.tenants)
    engines = _blocking(calls.engines)
    layout = _blocking(calls.layout)
    agents = _blocking(calls.agents)
    holdings = _blocking(calls.holdings)
    find = _blocking(calls.find)
    handoffs = _blocking(calls.handoffs)
    handoff = _blocking(calls.handoff)
    costs = _blocking(calls.costs)
    probe_pair = _blocking(calls.probe_pair)
    audit = _blocking(calls.audit)
    release = _blocking(calls.release)
    set_draining = _blocking(calls.set_draining)
    drain_engine = _blocking(calls.drain_engine)
    forget_engine = _blocking(calls.forget_engine)
    abandon = _blocking(calls.abandon)

    def __enter__(self) -> Self:
        """Use as a context."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the channel."""
        self.close()

    def close(self) -> None:
        """Close the channel."""
        OWN_PROCESS.check()
        self._channel.close()


class AsyncAdminClient(_Admin):
    """Makes the calls of `AdminClient` with ``await``, on one event loop. A context."""

    _grpc: ClassVar = grpc.aio

    status = _awaited(calls.status)
    tenants = _awaited(calls.tenants)
    engines = _awaited(calls.engines)
    layout = _awaited(calls.layout)
    agents = _awaited(calls.agents)
    holdings = _awaited(calls.holdings)
    find = _awaited(calls.find)
    handoffs = _awaited(calls.handoffs)
    handoff = _awaited(calls.handoff)
    costs = _awaited(calls.costs)
    probe_pair = _awaited(calls.probe_pair)
    audit = _awaited(calls.audit)
    release = _awaited(calls.release)
    set_draining = _awaited(calls.set_draining)
    drain_engine = _awaited(calls.drain_engine)
    forget_engine = _awaited(calls.forget_engine)
    abandon = _awaited(calls.abandon)

    async def __aenter__(self) -> Self:
        """Use as a context."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the channel."""
        await self.close()

    async def close(self) -> None:
        """Close the channel."""
        OWN_PROCESS.check()
        await self._channel.close()
