"""Operators' clients of brokers, with the same calls, blocking or with ``await``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, ClassVar, Concatenate, NamedTuple, ParamSpec, Self, TypeVar

import grpc

from restow.broker.addresses import checked_targets
from restow.broker.client import admin_calls as calls
from restow.broker.client.admin_calls import AdminCall, admin_options
from restow.broker.client.connection.brokers import Brokers
from restow.broker.client.connection.channel import (
    OWN_PROCESS,
    Credentials,
    broker_address,
    channel_showing,
)
from restow.broker.client.connection.diagnosis import explained, explained_soon
from restow.broker.client.connection.errors import (
    BrokerUnreachableError,
    OtherServerError,
    decoded,
    from_rpc_error,
)
from restow.broker.errors import NoLeaderError, NotLeaderError, RestowError
from restow.v1 import admin_pb2_grpc, broker_pb2_grpc

P = ParamSpec("P")
T = TypeVar("T")


class _Stubs(NamedTuple):
    """The stubs of a broker, over a channel."""

    channel: Any
    admin: Any
    broker: Any


class _Admin:
    """The common part of both clients: the brokers' addresses, and who asks."""

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

        ``broker`` is HOST:PORT or any address that gRPC accepts, or several with commas; None means
        RESTOW_BROKER or the default. ``timeout_s`` is how long each call may take, at each broker.
        ``tenant`` None means the tenant of the identity, or the broker's default tenant.
        ``credentials`` None means those of the environment. Raises a `TrustError` of the
        credentials, and `AddressInvalidError`. Like every call, it raises `ForkedError` in a
        process that was forked after the first client, session or agent.
        """
        OWN_PROCESS.check()
        self.address = broker_address(broker)
        self.addresses = tuple(dict.fromkeys(checked_targets(self.address)))
        self._brokers = Brokers(self.address)
        self._credentials = credentials or Credentials.of()
        self._stubs: dict[str, _Stubs] = {}
        self._timeout_s = timeout_s
        self._metadata = (("restow-tenant", tenant),) if tenant is not None else ()
        for address in self.addresses:
            self._opened(address)

    def _opened(self, address: str) -> _Stubs:
        """Return the stubs of a broker that was given, or that another broker named."""
        if address not in self._stubs:
            options = admin_options(self._brokers.several)
            channel = channel_showing(self._credentials, self._grpc, address, options)
            admin = admin_pb2_grpc.AdminStub(channel)
            self._stubs[address] = _Stubs(channel, admin, broker_pb2_grpc.BrokerStub(channel))
        return self._stubs[address]

    def _method(self, address: str, call: AdminCall[Any]) -> Any:
        stubs = self._opened(address)
        return getattr(stubs.broker if call.of_broker else stubs.admin, call.method)

    def _how(self, call: AdminCall[Any]) -> dict[str, Any]:
        return {"timeout": max(self._timeout_s, call.least_s), "metadata": self._metadata}

    def _error(self, error: grpc.RpcError, address: str) -> RestowError:
        return from_rpc_error(error, address, self._credentials.secure)

    def _ask_another(self, error: RestowError) -> bool:
        """Return whether to ask another broker: the leader that this broker names, or the next.

        Each of the given brokers is asked once.
        """
        if error.reason == NotLeaderError.reason:
            return self._brokers.refused(error)
        if isinstance(error, BrokerUnreachableError | OtherServerError) or (
            error.reason == NoLeaderError.reason
        ):
            return self._brokers.several and self._brokers.failed()
        return False

    def _of_several(self, error: RestowError) -> RestowError:
        """Return the error; if no broker answers, it names all brokers."""
        if len(self.addresses) == 1 or not isinstance(error, BrokerUnreachableError):
            return error
        words = f"{error.message}; none of {', '.join(self.addresses)} answers"
        return BrokerUnreachableError(words, broker=self.address)


def _blocking(make: Callable[P, AdminCall[T]]) -> Callable[Concatenate[AdminClient, P], T]:
    @wraps(make)
    def call(self: AdminClient, /, *words: P.args, **more: P.kwargs) -> T:
        OWN_PROCESS.check()
        return self._ask(make(*words, **more))

    return call


def _awaited(
    make: Callable[P, AdminCall[T]],
) -> Callable[Concatenate[AsyncAdminClient, P], Awaitable[T]]:
    @wraps(make)
    async def call(self: AsyncAdminClient, /, *words: P.args, **more: P.kwargs) -> T:
        OWN_PROCESS.check()
        return await self._ask(make(*words, **more))

    return call


class AdminClient(_Admin):
    """Makes calls of `restow.v1.Admin`: the operator's view of brokers. A context.

    Each call waits for its answer, and is repeated for a moment if the broker is away. It raises
    `BrokerCallError` with the broker's refusal, or `BrokerUnreachableError`. docs/api.md says what
    the fields of answers mean.

    If several brokers are given, the leader is asked: a standby names it.
    """

    _grpc: ClassVar = grpc

    status = _blocking(calls.status)
    tenants = _blocking(calls.tenants)
    engines = _blocking(calls.engines)
    layout = _blocking(calls.layout)
    agents = _blocking(calls.agents)
    holdings = _blocking(calls.holdings)
    find = _blocking(calls.find)
    command = _blocking(calls.command)
    command_status = _blocking(calls.command_status)
    handoffs = _blocking(calls.handoffs)
    handoff = _blocking(calls.handoff)
    brokers = _blocking(calls.brokers)
    costs = _blocking(calls.costs)
    probe_pair = _blocking(calls.probe_pair)
    audit = _blocking(calls.audit)
    release = _blocking(calls.release)
    set_draining = _blocking(calls.set_draining)
    drain_engine = _blocking(calls.drain_engine)
    forget_engine = _blocking(calls.forget_engine)
    forget_states = _blocking(calls.forget_states)
    abandon = _blocking(calls.abandon)

    def __enter__(self) -> Self:
        """Use as a context."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the channels."""
        self.close()

    def close(self) -> None:
        """Close the channels."""
        OWN_PROCESS.check()
        for end in self._stubs.values():
            end.channel.close()

    def _ask(self, call: AdminCall[T]) -> T:
        """Ask the leader."""
        while True:
            address = self._brokers.current
            try:
                answer = self._method(address, call)(call.request, **self._how(call))
            except grpc.RpcError as failure:
                error = self._error(failure, address)
                if not self._ask_another(error):
                    raise self._explained(address, error) from None
            else:
                self._brokers.works()
                return call.pick(answer)

    def _explained(self, address: str, error: RestowError) -> RestowError:
        return self._of_several(explained(error, address, self._credentials))


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
    command = _awaited(calls.command)
    command_status = _awaited(calls.command_status)
    handoffs = _awaited(calls.handoffs)
    handoff = _awaited(calls.handoff)
    brokers = _awaited(calls.brokers)
    costs = _awaited(calls.costs)
    probe_pair = _awaited(calls.probe_pair)
    audit = _awaited(calls.audit)
    release = _awaited(calls.release)
    set_draining = _awaited(calls.set_draining)
    drain_engine = _awaited(calls.drain_engine)
    forget_engine = _awaited(calls.forget_engine)
    forget_states = _awaited(calls.forget_states)
    abandon = _awaited(calls.abandon)

    async def __aenter__(self) -> Self:
        """Use as a context."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the channels."""
        await self.close()

    async def close(self) -> None:
        """Close the channels."""
        OWN_PROCESS.check()
        await asyncio.gather(*(end.channel.close() for end in self._stubs.values()))

    async def _ask(self, call: AdminCall[T]) -> T:
        """Ask the leader."""
        while True:
            address = self._brokers.current
            try:
                answer = await self._answer(address, call)
            except RestowError as error:
                if not self._ask_another(error):
                    raise await self._explained(address, error) from None
            except asyncio.CancelledError:  # the caller no longer waits for this broker
                self._brokers.failed()
                raise
            else:
                self._brokers.works()
                return call.pick(answer)

    async def _answer(self, address: str, call: AdminCall[T]) -> Any:
        try:
            return decoded(
                await self._method(address, call)(call.request, **self._how(call)), address
            )
        except grpc.aio.AioRpcError as error:
            raise self._error(error, address) from None

    async def _explained(self, address: str, error: RestowError) -> RestowError:
        return self._of_several(await explained_soon(error, address, self._credentials))
