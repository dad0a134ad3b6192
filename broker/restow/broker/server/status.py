"""Typed errors as gRPC status: the one place where they are translated."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from restow.broker.errors import RestowError

ERROR_DOMAIN = "restow"


def to_rpc_status(error: RestowError) -> status_pb2.Status:
    """The error with an `ErrorInfo` that carries reason and subject."""
    info = error_details_pb2.ErrorInfo(
        reason=error.reason, domain=ERROR_DOMAIN, metadata=error.subject
    )
    detail = any_pb2.Any()
    detail.Pack(info)
    code: int = grpc.StatusCode[error.status].value[0]
    return status_pb2.Status(code=code, message=error.message, details=[detail])


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RestowError) -> None:
    """End the call with the error."""
    status = rpc_status.to_status(to_rpc_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns every `RestowError` that a handler raises into its status."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler by its kind."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _wrap_unary(handler.unary_unary),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                _wrap_stream(handler.stream_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return handler


def _wrap_unary(behavior: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await behavior(request, context)
        except RestowError as error:
            return await abort(context, error)

    return call


def _wrap_stream(behavior: Callable[..., Any]) -> Callable[..., Any]:
    async def call(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        try:
            async for response in behavior(requests, context):
                yield response
        except RestowError as error:
            await abort(context, error)

    return call
