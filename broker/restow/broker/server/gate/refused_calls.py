"""Every call that is refused is counted and logged once: who made it, what it was, why not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from restow.broker.errors import RestowError
from restow.broker.rpc.status import rewrap
from restow.broker.server.bounded_log import BoundedLog
from restow.broker.server.gate.callers import NOBODY_ASKED, tenant_of
from restow.broker.server.gate.guard import Identify, RawContext
from restow.broker.trust.errors import UnauthenticatedError


class RefusedCallsInterceptor(grpc.aio.ServerInterceptor):
    """Stands before the guard, and behind the interceptor that translates errors."""

    def __init__(
        self,
        identify: Identify | None,
        log: BoundedLog,
        count: Callable[[RestowError], None],
    ) -> None:
        """Know callers by ``identify``; None: nobody asks who they are. ``count`` hears each."""
        self._identify = identify
        self._log = log
        self._count = count

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler, if it is of a kind that our services have."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method

        def unary(behavior: Callable[..., Any]) -> Callable[..., Any]:
            async def call(request: Any, context: RawContext) -> Any:
                try:
                    return await behavior(request, context)
                except RestowError as error:
                    self._tell(method, context, error)
                    raise

            return call

        def stream(behavior: Callable[..., Any]) -> Callable[..., Any]:
            async def call(requests: AsyncIterator[Any], context: RawContext) -> AsyncIterator[Any]:
                try:
                    async for response in behavior(requests, context):
                        yield response
                except RestowError as error:
                    self._tell(method, context, error)
                    raise

            return call

        return None if handler is None else rewrap(handler, unary, stream) or handler

    def _tell(self, method: str, context: RawContext, error: RestowError) -> None:
        self._count(error)
        if self._identify is None:
            identity, tenant = NOBODY_ASKED, tenant_of(context)
        else:
            try:
                who = self._identify(context)
            except UnauthenticatedError:
                identity, tenant = "unknown", ""
            else:
                identity, tenant = str(who), who.tenant or ""
        self._log.warning(
            "call refused",
            tenant=tenant,
            method=method,
            identity=identity,
            peer=context.peer(),
            reason=error.reason,
            detail=error.message,
        )
