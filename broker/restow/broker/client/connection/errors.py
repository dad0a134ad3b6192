"""Cancellation of a task, told apart from that of a call it awaits."""

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


OWN = "RESTOW_PROXY"
OF_THE_WEB = ("grpc_proxy", "https_proxy", "http_proxy")
"""In gRPC's order."""
_SCHEME = "http://"


def proxy_options(environment: Mapping[str, str] = os.environ) -> tuple[tuple[str, int | str], ...]:
    """What a channel is opened with. Raises `AddressInvalidError`."""
    proxy = environment.get(OWN)
    if not proxy:
        return (("grpc.enable_http_proxy", 0),)
    if not proxy.startswith(_SCHEME):
        raise AddressInvalidError(f"{OWN} must be {_SCHEME}HOST:PORT, and begins otherwise")
    return (("grpc.http_proxy", proxy),)


def way_note(environment: Mapping[str, str] = os.environ) -> str:
    """What is to be said of the way; empty: it is direct, and nobody would think otherwise."""
    if environment.get(OWN):
        # What stands before an @ may be a password.
        return f"calls go through {OWN}, {environment[OWN].rpartition('@')[2]}"
    ignored = [name for name in OF_THE_WEB if environment.get(name)]
    if not ignored:
        return ""
    return f"calls go direct: {', '.join(ignored)} is not used, {OWN}={_SCHEME}HOST:PORT would be"


Answer = TypeVar("Answer")

MAY_PASS = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
"""Statuses of refusals that another try may not meet."""


class BrokerCallError(RestowError):
    """The broker refused a call or a message: its status, reason and subject."""

    def __init__(self, status: str, reason: str, message: str, **subject: object) -> None:
        """Carry what the broker said."""
        super().__init__(message, **subject)
        self.status, self.reason = status, reason


class OtherServerError(BrokerCallError, reason="OTHER_SERVER"):
    """A refusal without a reason of ours: of another server, or of a gateway before the broker."""

    def __init__(self, status: str, address: str, details: str) -> None:
        """Quote what was answered at ``address``."""
        super().__init__(
            status,
            type(self).reason,
            f"{address} does not answer as a broker of Restow that knows this call: is the address "
            f"right, does a gateway before the broker let all of its calls through, and is the "
            f"broker as new as this client? ({status}: {details})",
            broker=address,
        )


class BrokerUnreachableError(RestowError, status="UNAVAILABLE", reason="BROKER_UNREACHABLE"):
    """No broker answers at the address: is it started, and is the address right?"""


class ForkedError(RestowError, status="FAILED_PRECONDITION", reason="FORKED"):
    """A process that was forked from one in which sessions, agents or clients had begun."""

    def __init__(self, parent: int, child: int) -> None:
        """Name both."""
        super().__init__(
            f"process {child} was forked from process {parent} after that had begun to use Restow: "
            f"gRPC, NIXL and their threads do not go with a fork. Make sessions, agents and "
            f"clients in the process that uses them, and start processes by `spawn` or "
            f"`forkserver`, or fork before the first of them is made",
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
    """A word said in a `BlockingSession` that was not started, or was closed."""


class NoWelcomeError(RestowError, status="DEADLINE_EXCEEDED", reason="NO_WELCOME"):
    """The other side is there and has not let us in: it may wait for another one to come first."""


def _info(error: grpc.RpcError | grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    """What a broker of ours says of a failed call, if it was one of ours that failed it."""
    info = error_details_pb2.ErrorInfo()
    try:
        status = rpc_status.from_call(error)
        details = () if status is None else status.details
        told = any(detail.Unpack(info) for detail in details) and info.domain == ERROR_DOMAIN
        return info if told else None
    except (ValueError, DecodeError):  # of another status than the one that arrived, or no status
        return None


def decoded(answer: Answer | None, address: str) -> Answer:
    """Return an answer; gRPC's asyncio calls give None for bytes that are no such message.

    Raises `OtherServerError`.
    """
    if answer is None:
        raise OtherServerError("UNKNOWN", address, "its answer can't be decoded")
    return answer


_UNREACHED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_BROKEN = (grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
"""What gRPC says of calls that broke on their way, a few of a thousand that begin at once."""


_TOO_LARGE = "message larger than max"
"""gRPC's words on a message that will never be taken; else its resources are back in a moment."""


def unreachable(address: str, details: str, secure: bool = False) -> BrokerUnreachableError:
    """Nobody answers at the address; ``secure``: he was asked with TLS."""
    # A handshake that fails on either side's certificate looks like nobody's answer.
    certificates = (
        ", or see whether each side's certificate is one that the other accepts (docs/security.md)"
    )
    way = way_note()
    return BrokerUnreachableError(
        f"no broker answers at {address}: start one with `restow serve`, or name another with "
        f"--broker{certificates if secure else ''} ({details}{'; ' + way if way else ''})",
        broker=address,
    )


def from_rpc_error(
    error: grpc.RpcError | grpc.aio.AioRpcError, address: str, secure: bool = False
) -> RestowError:
    """The typed error that a failed call stands for; ``secure``: it was made with TLS."""
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
