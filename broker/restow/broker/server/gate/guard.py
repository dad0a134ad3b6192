"""Interceptors that identify and count every call, and log those that are refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from restow.broker.errors import (
    FirstMessageLateError,
    QuotaExceededError,
    RequestError,
    RestowError,
)
from restow.broker.rpc.status import rewrap
from restow.broker.server.base.logging import BoundedLog
from restow.broker.server.gate.callers import NOBODY_ASKED, KnownCall, tenant_of
from restow.broker.trust.errors import ForbiddenError, UnauthenticatedError
from restow.broker.trust.identity import Identity, Role

AT_ONCE = 32
"""Half-read first messages of a tenant, each of at most 16 MiB.

For calls that wait for their turn gRPC holds only a few kilobytes. A client may open a stream
and write later, so with a lower limit idle streams would soon take all turns.
"""
WAIT_S = 10.0


class FirstMessages:
    """Reads the first message of each admitted call, in turns. Belongs to one event loop."""

    def __init__(self) -> None:
        """Begin without calls."""
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def read(self, read: Callable[[], Awaitable[Any]], tenant: str) -> Any:
        """Return the first message from ``read``, which may be `grpc.aio.EOF`.

        Raises `FirstMessageLateError`.
        """
        turn = self._turns.setdefault(tenant, asyncio.Semaphore(AT_ONCE))
        async with turn:
            try:
                async with asyncio.timeout(WAIT_S):
                    return await read()
            except TimeoutError:
                raise FirstMessageLateError(
                    f"the call's first message did not come whole within {WAIT_S:g} s: check "
                    f"whether the client was stopped or its network is slow, and call again"
                ) from None


RawContext = grpc.aio.ServicerContext[Any, Any]
Identify = Callable[[RawContext], Identity]
"""Returns the caller's identity. Raises `UnauthenticatedError`."""


class WatchingInterceptor(grpc.aio.ServerInterceptor):
    """Logs and counts refused calls. Runs before the guard, inside of the error translation.

    A broker that trusts everybody has no guard: then this interceptor admits every call.
    """

    def __init__(
        self,
        identify: Identify | None,
        log: BoundedLog,
        count: Callable[[RestowError], None],
        admitted: Callable[[RawContext], None],
    ) -> None:
        """Identify callers by ``identify``, unless None; call ``count`` with each refusal.

        Without ``identify``, call ``admitted`` with each call.
        """
        self._identify = identify
        self._log = log
        self._count = count
        self._admitted = admitted

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler, if it has a kind that our services use."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method

        def unary(behavior: Callable[..., Any]) -> Callable[..., Any]:
            async def call(request: Any, context: RawContext) -> Any:
                with self._watched(method, context):
                    return await behavior(request, context)

            return call

        def stream(behavior: Callable[..., Any]) -> Callable[..., Any]:
            async def call(requests: AsyncIterator[Any], context: RawContext) -> AsyncIterator[Any]:
                with self._watched(method, context):
                    async for response in behavior(requests, context):
                        yield response

            return call

        return None if handler is None else rewrap(handler, unary, stream) or handler

    @contextlib.contextmanager
    def _watched(self, method: str, context: RawContext) -> Iterator[None]:
        if self._identify is None:
            self._admitted(context)
        try:
            yield
        except RestowError as error:
            self._tell(method, context, error)
            raise

    def _tell(self, method: str, context: RawContext, error: RestowError) -> None:
        self._count(error)
        if self._identify is None:
            identity, tenant = NOBODY_ASKED, tenant_of(context)
        else:
            try:
                caller = self._identify(context)
            except UnauthenticatedError:
                identity, tenant = "unknown", ""
            else:
                identity, tenant = str(caller), caller.tenant or ""
        self._log.warning(
            "call refused",
            tenant=tenant,
            method=method,
            identity=identity,
            peer=context.peer(),
            reason=error.reason,
            detail=error.message,
        )


REFUSALS = (UnauthenticatedError, ForbiddenError)
HOLD_S = 0.05
"""Delay of a refusal: grpc.aio tells a client no reason if its stream ends as it writes."""
MAX_HELD = 32
MAX_WATCHING = 64
"""Most streams on which strangers watch the broker's health."""
OPEN_SERVICES = frozenset({health.SERVICE_NAME})
"""Services that everybody may call."""
SERVICE_ROLES = {
    "restow.v1.Broker": frozenset({Role.ENGINE}),
    "restow.v1.AgentLink": frozenset({Role.AGENT}),
    "restow.v1.Admin": frozenset({Role.OPERATOR}),
    reflection.SERVICE_NAME: frozenset({Role.OPERATOR}),
}
METHOD_ROLES = {
    "/restow.v1.Broker/Find": frozenset({Role.ENGINE, Role.ROUTER, Role.OPERATOR}),
    "/restow.v1.Broker/Watch": frozenset({Role.ENGINE, Role.ROUTER, Role.OPERATOR}),
    "/restow.v1.Broker/Command": frozenset({Role.ENGINE, Role.ROUTER, Role.OPERATOR}),
    "/restow.v1.Broker/GetCommand": frozenset({Role.ENGINE, Role.ROUTER, Role.OPERATOR}),
    # A store, which is an engine, derives its layout from another engine's.
    "/restow.v1.Admin/GetLayout": frozenset({Role.OPERATOR, Role.ENGINE}),
    # An engine or a router tells its own clients how a handoff ended.
    "/restow.v1.Admin/GetHandoff": frozenset({Role.OPERATOR, Role.ENGINE, Role.ROUTER}),
    "/restow.v1.Admin/AbandonHandoff": frozenset({Role.OPERATOR, Role.ROUTER}),
}


def roles_for(method: str) -> frozenset[Role]:
    """Return the roles that may call a method; none for methods that nobody may call.

    >>> sorted(roles_for("/restow.v1.Admin/GetHandoff"))
    [<Role.ENGINE: 'engine'>, <Role.OPERATOR: 'operator'>, <Role.ROUTER: 'router'>]
    >>> roles_for("/something.Else/Method")
    frozenset()
    """
    service = method.strip("/").rpartition("/")[0]
    return METHOD_ROLES.get(method) or SERVICE_ROLES.get(service, frozenset())


class GuardInterceptor(grpc.aio.ServerInterceptor):
    """Checks the caller before every handler. Runs inside of the error translation."""

    def __init__(
        self, identify: Identify, admitted: Callable[[RawContext], None], tenant_max_calls: int
    ) -> None:
        """Identify callers by ``identify``; call ``admitted`` with each admitted call."""
        self._identify = identify
        self._admitted = admitted
        self._tenant_max_calls = tenant_max_calls
        self._calls: Counter[str] = Counter()
        """Open calls, by tenant."""
        self._first = FirstMessages()
        self._held = self._watching = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler in a check, or in the part that strangers may use."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        opened = method.strip("/").rpartition("/")[0] in OPEN_SERVICES
        call = self._opened(handler) if opened else self._guarded(handler, method)
        if call is None:
            raise TypeError(f"{method} has a kind that the guard does not know: nobody may call it")
        # An open service parses the bytes itself, or its wrapper does.
        deserializer = None if opened else handler.request_deserializer
        return grpc.stream_stream_rpc_method_handler(
            call, deserializer, handler.response_serializer
        )

    def _guarded(self, handler: Any, method: str) -> Callable[..., Any] | None:
        unary, streams = handler.unary_unary, handler.stream_stream
        answers = handler.unary_stream
        if unary is None and streams is None and answers is None:
            return None

        async def call(requests: AsyncIterator[Any], context: RawContext) -> AsyncIterator[Any]:
            try:
                known = self._admit(context, method)
            except REFUSALS:
                await self._hold()
                raise
            tenant = known.identity.tenant or ""
            with self._counted(tenant):
                first = await self._first.read(known.read, tenant)
                if streams is not None:
                    known.put_back(first)
                    del first
                    async for response in streams(requests, known):
                        yield response
                elif first is grpc.aio.EOF:
                    raise RequestError(f"{method} was called without a message: send a message")
                elif answers is not None:
                    async for response in answers(first, known):
                        yield response
                else:
                    yield await unary(first, known)

        return call

    @contextlib.contextmanager
    def _counted(self, tenant: str) -> Iterator[None]:
        """Count a call while it is open. Raises `QuotaExceededError`."""
        if self._calls[tenant] >= self._tenant_max_calls:
            raise QuotaExceededError(
                f"tenant {tenant} has {self._calls[tenant]} calls open, which is its limit: wait "
                f"until some have ended, or let the operator raise --max-connections",
                tenant=tenant,
                what="calls",
                limit=self._tenant_max_calls,
            )
        self._calls[tenant] += 1
        try:
            yield
        finally:
            self._calls[tenant] -= 1
            if not self._calls[tenant]:
                del self._calls[tenant]

    def _opened(self, handler: Any) -> Callable[..., Any] | None:
        """Wrap a health method; strangers' messages are not read, and mean the whole broker."""
        unary, watch = handler.unary_unary, handler.unary_stream
        if unary is None and watch is None:
            return None
        parse = handler.request_deserializer or bytes

        async def call(_: AsyncIterator[Any], context: RawContext) -> AsyncIterator[Any]:
            try:
                identity = self._identify(context)
                first = await self._first.read(context.read, identity.tenant or "")
                data = b"" if first is grpc.aio.EOF else first
            except UnauthenticatedError:
                data = b""
                if watch is not None and self._watching >= MAX_WATCHING:
                    raise QuotaExceededError(
                        f"{MAX_WATCHING} streams watch the broker's health already: call Check",
                        limit=MAX_WATCHING,
                    ) from None
            if unary is not None:
                yield await unary(parse(data), context)
                return
            self._watching += 1
            try:
                await watch(parse(data), context)
            finally:
                self._watching -= 1

        return call

    async def _hold(self) -> None:
        """Delay a refusal, so that the client can finish writing; only a few wait at a time."""
        if self._held < MAX_HELD:
            self._held += 1
            try:
                await asyncio.sleep(HOLD_S)
            finally:
                self._held -= 1

    def _admit(self, context: RawContext, method: str) -> KnownCall:
        identity = self._identify(context)
        roles = roles_for(method)
        if identity.roles.isdisjoint(roles):
            raise ForbiddenError(
                f"{method} is for {' or '.join(sorted(roles)) or 'nobody'}, but this identity is "
                f"{' and '.join(sorted(identity.roles))}: use an identity with that role",
                method=method,
            )
        self._admitted(context)
        return KnownCall(context, identity)
