"""Translate typed errors to gRPC statuses; nothing else does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from inspect import isasyncgenfunction
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from restow.broker.errors import RequestError, RestowError
from restow.broker.printable import is_word, shown

ERROR_DOMAIN = "restow"
REASON_KEY = "restow-reason"
"""Trailing metadata with only the reason, for clients that do not decode `ErrorInfo`."""

MAX_MESSAGE_BYTES = 1024
MAX_SUBJECT_BYTES = 256
"""Limit per value. A status travels as metadata, of which gRPC may drop what exceeds 8 KiB."""


def to_rpc_status(error: RestowError) -> status_pb2.Status:
    """Return the error's status, with an `ErrorInfo` that has reason and subject."""
    subject = {name: cut(value, MAX_SUBJECT_BYTES) for name, value in error.subject.items()}
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=subject)
    detail = any_pb2.Any()
    detail.Pack(info)
    code: int = grpc.StatusCode[error.status].value[0]
    return status_pb2.Status(code=code, message=cut(error.message), details=[detail])


def cut(words: str, most_bytes: int = MAX_MESSAGE_BYTES) -> str:
    """Return the text with escapes, cut to ``most_bytes``: names in it may have megabytes.

    >>> cut("engine x", 6)
    'eng...'
    """
    words = shown(words[: most_bytes + 1])
    data = words.encode()
    return (
        words if len(data) <= most_bytes else data[: most_bytes - 3].decode(errors="ignore") + "..."
    )


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RestowError) -> None:
    """End the call with the error.

    gRPC keeps the exception that `abort` raises, with all frames that it passes and its context.
    Call this function outside of ``except``, where no frame refers to a message any more.
    """
    status = rpc_status.to_status(to_rpc_status(error))
    # A daemon passes on a broker's reason, which metadata might not be able to carry.
    reason = error.reason if is_word(error.reason) else RestowError.reason
    trailing = (*(status.trailing_metadata or ()), (REASON_KEY, reason))
    await context.abort(status.code, status.details, trailing)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns every `RestowError` that a handler raises into its status."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler if it is of a kind that our services use."""
        handler = await continuation(handler_call_details)
        return None if handler is None else rewrap(handler, _wrap_unary, _wrap_stream) or handler


Behavior = Callable[..., Any]


def rewrap(
    handler: Any,
    unary: Callable[[Behavior], Behavior],
    stream: Callable[[Behavior], Behavior],
    answers: Callable[[Behavior], Behavior] | None = None,
    *,
    parses: bool = False,
) -> Any:
    """Return the method's handler with wrapped behavior; None for kinds that we do not use.

    ``answers`` wraps behavior that answers one request by a stream; by default ``stream`` does. A
    wrapper that ``parses`` gets bytes and passes messages to the behavior.
    """
    # The health service writes its stream of answers itself.
    yields = isasyncgenfunction(handler.unary_stream)
    for behavior, wrap, make in (
        (handler.unary_unary, unary, grpc.unary_unary_rpc_method_handler),
        (handler.stream_stream, stream, grpc.stream_stream_rpc_method_handler),
        (
            handler.unary_stream if yields else None,
            answers or stream,
            grpc.unary_stream_rpc_method_handler,
        ),
    ):
        if behavior is not None:
            deserializer = None if parses else handler.request_deserializer
            return make(wrap(behavior), deserializer, handler.response_serializer)
    return None


def _wrap_unary(behavior: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await behavior(request, context)
        except RestowError as error:
            refusal = error.with_traceback(None)
        del request
        return await abort(context, refusal)

    return call


def _wrap_stream(behavior: Callable[..., Any]) -> Callable[..., Any]:
    async def call(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        try:
            async for response in behavior(requests, context):
                yield response
            return
        except RestowError as error:
            refusal = error.with_traceback(None)
        del requests
        await abort(context, refusal)

    return call


class ParsingInterceptor(grpc.aio.ServerInterceptor):
    """Parses requests; must be the innermost interceptor."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler if it is of a kind that our services use."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        parse = handler.request_deserializer

        def unary(behavior: Callable[..., Any]) -> Callable[..., Any]:
            async def call(data: bytes, context: Any) -> Any:
                return await behavior(_parsed(parse, data), context)

            return call

        def stream(behavior: Callable[..., Any]) -> Callable[..., Any]:
            async def requests(context: Any) -> AsyncIterator[Any]:
                # gRPC's own iterator would keep each message until the next message arrives.
                while (data := await context.read()) is not grpc.aio.EOF:
                    parsed = [_parsed(parse, data)]
                    del data
                    yield parsed.pop()

            async def call(_: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
                async for response in behavior(requests(context), context):
                    yield response

            return call

        def answers(behavior: Callable[..., Any]) -> Callable[..., Any]:
            async def call(data: bytes, context: Any) -> AsyncIterator[Any]:
                async for response in behavior(_parsed(parse, data), context):
                    yield response

            return call

        return rewrap(handler, unary, stream, answers, parses=True) or handler


def _parsed(parse: Callable[[bytes], Any], data: bytes) -> Any:
    """Parse a request. Raises `RequestError`, where gRPC would report an unknown server error."""
    try:
        return parse(data)
    except DecodeError as error:
        raise RequestError(f"{len(data)} bytes are not a valid request: {error}") from None
