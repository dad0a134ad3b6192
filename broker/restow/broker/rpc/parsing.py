"""Requests are parsed behind the other interceptors.

So a call whose caller may not make it is not parsed, and bytes that are no message are refused like
any other bad argument.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from restow.broker.errors import RequestError
from restow.broker.rpc.status import rewrap


class ParsingInterceptor(grpc.aio.ServerInterceptor):
    """Makes messages of bytes. Stands behind every other interceptor."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler, if it is of a kind that our services have."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        parse = handler.request_deserializer

        def unary(behavior: Callable[..., Any]) -> Callable[..., Any]:
            async def call(data: bytes, context: Any) -> Any:
                return await behavior(_parsed(parse, data), context)

            return call

        def stream(behavior: Callable[..., Any]) -> Callable[..., Any]:
            async def each(context: Any) -> AsyncIterator[Any]:
                # gRPC's iterator would keep each message until the next one comes.
                while (data := await context.read()) is not grpc.aio.EOF:
                    parsed = [_parsed(parse, data)]
                    del data
                    yield parsed.pop()

            async def call(_: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
                async for response in behavior(each(context), context):
                    yield response

            return call

        return rewrap(handler, unary, stream, parses=True) or handler


def _parsed(parse: Callable[[bytes], Any], data: bytes) -> Any:
    """The request. Raises `RequestError`: gRPC would call it an unknown error of the server's."""
    try:
        return parse(data)
    except DecodeError as error:
        raise RequestError(f"{len(data)} bytes are no request: {error}") from None
