"""Errors of calls to a broker, and helpers that tell cancelled tasks from failed calls."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from restow.broker.errors import AddressInvalidError, RestowError
from restow.broker.printable import shown
from restow.broker.rpc.status import ERROR_DOMAIN


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel the task, and return when it has ended.

    A cancellation of the caller is not mistaken for the task's. Raises what the task raised, unless
    that was its cancellation.
    """
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


def is_cancelled() -> bool:
    """Return whether the running task is being cancelled.

    If it is not, an `asyncio.CancelledError` of gRPC means that the call's channel was closed.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def begun(call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
    """Return when a call has begun or failed; reading tells which.

    Await it before the first read. While a call begins, a read mistakes its task's cancellation for
    the call's own; if the call fails in that moment, the read raises the failure, and the task goes
    on (grpcio 1.85, ``StreamStreamCall._prepare_rpc``).
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


OWN = "RESTOW_PROXY"
OF_THE_WEB = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables that gRPC would use, in its order."""
_SCHEME = "http://"


def proxy_options(environment: Mapping[str, str] = os.environ) -> tuple[tuple[str, int | str], ...]:
    """Return a channel's proxy options. Raises `AddressInvalidError`."""
    proxy = environment.get(OWN)
    if not proxy:
        return (("grpc.enable_http_proxy", 0),)
    if not proxy.startswith(_SCHEME):
        raise AddressInvalidError(f"{OWN} must be {_SCHEME}HOST:PORT, but begins otherwise")
    return (("grpc.http_proxy", proxy),)


def way_note(environment: Mapping[str, str] = os.environ) -> str:
    """Return a note on proxies for error messages; empty if no proxy variable is set."""
    if environment.get(OWN):
        # The part before an @ may contain a password.
        return f"calls go through {OWN}, {environment[OWN].rpartition('@')[2]}"
    ignored = [name for name in OF_THE_WEB if environment.get(name)]
    if not ignored:
        return ""
    return f"calls use no proxy: {', '.join(ignored)} is ignored, set {OWN}={_SCHEME}HOST:PORT"


Answer = TypeVar("Answer")

MAY_PASS = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
"""Statuses of refusals that may pass, so that a retry is useful."""


class BrokerCallError(RestowError):
    """The broker refused a call or a message, with its status, reason and subject."""

    def __init__(self, status: str, reason: str, message: str, **subject: object) -> None:
        """Carry the broker's answer."""
        super().__init__(message, **subject)
        self.status, self.reason = status, reason


class OtherServerError(BrokerCallError, reason="OTHER_SERVER"):
    """A refusal without a reason of Restow: from another server, or a gateway on the way."""

    def __init__(self, status: str, address: str, details: str) -> None:
        """Quote what ``address`` answered."""
        super().__init__(
            status,
            type(self).reason,
            f"{address} does not answer as a Restow broker that knows this call: check whether the "
            f"address is right, whether a gateway before the broker lets all calls through, and "
            f"whether the broker is as new as this client ({status}: {details})",
            broker=address,
        )


class BrokerUnreachableError(RestowError, status="UNAVAILABLE", reason="BROKER_UNREACHABLE"):
    """No broker answers at the address: check the address, and that a broker runs there."""


class ForkedError(RestowError, status="FAILED_PRECONDITION", reason="FORKED"):
    """The process was forked from a process that already used sessions, agents or clients."""

    def __init__(self, parent: int, child: int) -> None:
        """Name both processes."""
        super().__init__(
            f"process {child} was forked from process {parent} after the latter used Restow, "
            f"but gRPC, NIXL and their threads do not survive a fork. Create sessions, agents and "
            f"clients in the process that uses them, and start processes by `spawn` or "
            f"`forkserver`, or fork before the first of these objects is created",
            parent=parent,
            child=child,
        )


class PagesNotFreeError(RestowError, status="FAILED_PRECONDITION", reason="PAGES_NOT_FREE"):
    """The session was closed while a rank may have been writing to a demand's pages."""

    def __init__(self, handoff_id: str) -> None:
        """Name the handoff."""
        super().__init__(
            f"the session was closed before handoff {handoff_id} had ended: its pages are free "
            f"when the engine's agents are closed",
            handoff=handoff_id,
        )


class SessionClosedError(
    RestowError, RuntimeError, status="FAILED_PRECONDITION", reason="SESSION_CLOSED"
):
    """A `BlockingSession` was used before it was started, or after it was closed."""


class NoWelcomeError(RestowError, status="DEADLINE_EXCEEDED", reason="NO_WELCOME"):
    """The server answers but gave no welcome: it may be waiting for the engine to register."""


def _info(error: grpc.RpcError | grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    """Return the broker's details of a failed call, or None if no Restow broker failed it."""
    info = error_details_pb2.ErrorInfo()
    try:
        status = rpc_status.from_call(error)
        details = () if status is None else status.details
        told = any(detail.Unpack(info) for detail in details) and info.domain == ERROR_DOMAIN
        return info if told else None
    except (ValueError, DecodeError):  # the details have another status, or are malformed
        return None


def decoded(answer: Answer | None, address: str) -> Answer:
    """Return an answer; gRPC's asyncio calls return None for bytes that they cannot parse.

    Raises `OtherServerError`.
    """
    if answer is None:
        raise OtherServerError("UNKNOWN", address, "its answer can't be decoded")
    return answer


_UNREACHED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_BROKEN = (grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
"""Statuses of calls that broke on their way, as a few of a thousand simultaneous calls do."""


_TOO_LARGE = "message larger than max"
"""gRPC's words for a message that is always too large; other shortages pass soon."""


def unreachable(address: str, details: str, secure: bool = False) -> BrokerUnreachableError:
    """Return the error of an address that does not answer; ``secure``: TLS was used."""
    # A handshake that fails on either side's certificate looks as if nobody answered.
    certificates = ", or check that each side accepts the other's certificate (docs/security.md)"
    way = way_note()
    return BrokerUnreachableError(
        f"no broker answers at {address}: start a broker with `restow serve`, or name another "
        f"with --broker{certificates if secure else ''} ({details}{'; ' + way if way else ''})",
        broker=address,
    )


def from_rpc_error(
    error: grpc.RpcError | grpc.aio.AioRpcError, address: str, secure: bool = False
) -> RestowError:
    """Return the typed error of a failed call; ``secure``: TLS was used."""
    info = _info(error)
    if info is not None:
        refusal = BrokerCallError(error.code().name, info.reason, error.details() or "")
        refusal.subject = {shown(name): shown(value) for name, value in info.metadata.items()}
        return refusal
    if error.code() in _UNREACHED:
        return unreachable(address, error.details() or "", secure)
    crowded = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE not in (
        error.details() or ""
    )
    if crowded or error.code() in _BROKEN:
        return BrokerUnreachableError(
            f"a call to the broker at {address} broke: try again "
            f"({error.code().name}: {error.details()})",
            broker=address,
        )
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return BrokerCallError(error.code().name, error.code().name, error.details() or "")
    return OtherServerError(error.code().name, address, error.details() or "")
