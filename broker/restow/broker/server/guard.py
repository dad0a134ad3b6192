"""The guard: no handler is reached by a call whose caller is not known and may not make it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from restow.broker.rpc.status import rewrap
from restow.broker.server.callers import KnownCall
from restow.broker.trust.errors import ForbiddenError, UnauthenticatedError
from restow.broker.trust.identity import Identity, Role

RawContext = grpc.aio.ServicerContext[Any, Any]
Identify = Callable[[RawContext], Identity]
"""Who makes a call. Raises `UnauthenticatedError`."""

REFUSALS = (UnauthenticatedError, ForbiddenError)
FIRST_MESSAGE_S = 2.0
OPEN_SERVICES = frozenset({health.SERVICE_NAME})
"""What everybody may call."""
SERVICE_ROLES = {
    "restow.v1.Broker": frozenset({Role.ENGINE}),
    "restow.v1.AgentLink": frozenset({Role.AGENT}),
    "restow.v1.Admin": frozenset({Role.OPERATOR}),
    reflection.SERVICE_NAME: frozenset({Role.OPERATOR}),
}
METHOD_ROLES = {
    # An engine or a router tells its own clients what became of a handoff.
    "/restow.v1.Admin/GetHandoff": frozenset({Role.OPERATOR, Role.ENGINE, Role.ROUTER}),
    "/restow.v1.Admin/AbandonHandoff": frozenset({Role.OPERATOR, Role.ROUTER}),
}


def roles_for(method: str) -> frozenset[Role]:
    """The roles of which a caller needs one; none for what nobody may call.

    >>> sorted(roles_for("/restow.v1.Admin/GetHandoff"))
    [<Role.ENGINE: 'engine'>, <Role.OPERATOR: 'operator'>, <Role.ROUTER: 'router'>]
    >>> roles_for("/something.Else/Method")
    frozenset()
    """
    service = method.strip("/").rpartition("/")[0]
    return METHOD_ROLES.get(method) or SERVICE_ROLES.get(service, frozenset())


async def _drop_first(requests: AsyncIterator[Any]) -> None:
    """Let a refused stream's first message pass.

    A client of grpc.aio is not told why its stream ended if that happens while it writes.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_MESSAGE_S):
            await anext(aiter(requests), None)


class GuardInterceptor(grpc.aio.ServerInterceptor):
    """Stands before every handler. Stands behind the interceptor that translates errors."""

    def __init__(self, identify: Identify) -> None:
        """Know callers by ``identify``."""
        self._identify = identify

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler, unless its service is open to all."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.strip("/").rpartition("/")[0] in OPEN_SERVICES:
            return handler

        def unary(behavior: Callable[..., Any]) -> Callable[..., Any]:
            async def call(request: Any, context: RawContext) -> Any:
                return await behavior(request, self._admit(context, method))

            return call

        def stream(behavior: Callable[..., Any]) -> Callable[..., Any]:
            async def call(requests: AsyncIterator[Any], context: RawContext) -> AsyncIterator[Any]:
                try:
                    known = self._admit(context, method)
                except REFUSALS:
                    await _drop_first(requests)
                    raise
                async for response in behavior(requests, known):
                    yield response

            return call

        guarded = rewrap(handler, unary, stream)
        if guarded is None:
            raise TypeError(f"{method} is of a kind that is not guarded: nobody may call it")
        return guarded

    def _admit(self, context: RawContext, method: str) -> KnownCall:
        identity = self._identify(context)
        roles = roles_for(method)
        if identity.roles.isdisjoint(roles):
            raise ForbiddenError(
                f"{method} is for {' or '.join(sorted(roles)) or 'nobody'}, and this identity "
                f"is {' and '.join(sorted(identity.roles))}: take one with that role",
                method=method,
            )
        return KnownCall(context, identity)
