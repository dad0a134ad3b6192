"""Cancellation of a task, told apart from that of a call it awaits."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc


async def end_task(task: asyncio.Task[Any]) -> None:
    """Return when the task, which is cancelled now, has ended.

    A cancellation of the caller is not taken for the task's own. Raises what the task raised, if
    that was no cancellation.
    """
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


def is_cancelled() -> bool:
    """Whether the running task is being cancelled.

    If not, an `asyncio.CancelledError` of gRPC says that the call's channel was closed.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def begun(call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
    """Return when a call has begun or has failed; reading says which.

    To be awaited before the first read. While a call begins, a read takes its task's cancellation
    for the call's own; a call that fails in that moment raises its failure instead, and the task
    goes on (grpcio 1.85, ``StreamStreamCall._prepare_rpc``).
    """
    beginning = asyncio.create_task(_begun_or_failed(call))
    try:
        await asyncio.shield(beginning)
    except asyncio.CancelledError:
        call.cancel()
        beginning.cancel()
        raise


async def _begun_or_failed(call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call.wait_for_connection()
