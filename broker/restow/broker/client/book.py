"""What an engine has said of its live handoffs: to be said again after a reconnect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import structlog

from restow.broker.client.errors import BrokerCallError
from restow.broker.errors import RestowError
from restow.v1 import broker_pb2 as pb

RENEWALS_PER_LEASE = 3
_STATES = {number: name.removeprefix("HANDOFF_STATE_") for name, number in pb.HandoffState.items()}
"""By number: a newer broker may know more of them."""


@dataclass(frozen=True, slots=True)
class HandoffEnded:
    """How a handoff ended. D may use its pages only if ``done``; P's pages are free either way."""

    handoff_id: str
    state: str
    reason: str
    detail: str
    bytes: int
    transfer_us: int

    @classmethod
    def of(cls, ended: pb.Ended) -> HandoffEnded:
        """As the broker told it."""
        state = _STATES.get(ended.state, _STATES[pb.HANDOFF_STATE_UNSPECIFIED])
        told = (ended.handoff_id, state, ended.reason, ended.detail)
        return cls(*told, ended.bytes, ended.transfer_us)

    @property
    def done(self) -> bool:
        """Whether D holds the state, whole."""
        return self.state == "DONE"


@dataclass(slots=True)
class _Said:
    """One message and the future of its caller."""

    message: pb.EngineMessage
    end: asyncio.Future[HandoffEnded]
    sent: bool
    """Whether it may have been sent."""


@dataclass(slots=True)
class _Open:
    """A handoff that has not ended."""

    said: list[_Said] = field(default_factory=list)
    cancellation: pb.EngineMessage | None = None
    lease_ms: int = 0
    renew_at_s: float = 0.0
    hold_until_s: float = 0.0


class Book:
    """The live handoffs of a session. Belongs to one event loop."""

    def __init__(self) -> None:
        """Start empty."""
        self._open: dict[str, _Open] = {}
        self._last_message = 0
        self._closed: RestowError | None = None
        self._log = structlog.get_logger("restow.client")

    def say(
        self, handoff_id: str, message: pb.EngineMessage, *, sent: bool
    ) -> asyncio.Future[HandoffEnded]:
        """Note a publication or a demand, ``sent`` if a stream is open; its future is the end."""
        future: asyncio.Future[HandoffEnded] = asyncio.get_running_loop().create_future()
        # A caller may not care for the end: then a refusal is no unhandled error.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self._closed is not None:
            future.set_exception(self._closed)
            return future
        self._number(message)
        self._open.setdefault(handoff_id, _Open()).said.append(_Said(message, future, sent))
        return future

    def lease(self, handoff_id: str, lease_ms: int, hold_ms: int) -> None:
        """Renew a handoff's lease from now on, for ``hold_ms``."""
        known = self._open.get(handoff_id)
        if known is not None:
            now_s = time.monotonic()
            known.lease_ms = lease_ms
            known.renew_at_s = now_s + lease_ms / 1000 / RENEWALS_PER_LEASE
            known.hold_until_s = now_s + hold_ms / 1000

    def cancel(self, handoff_id: str, message: pb.EngineMessage) -> bool:
        """Note that a handoff is given up; False if it has ended."""
        known = self._open.get(handoff_id)
        if known is None:
            return False
        self._number(message)
        known.cancellation = message
        return True

    def _number(self, message: pb.EngineMessage) -> None:
        self._last_message += 1
        message.message_id = self._last_message

    def everything(self) -> Iterator[pb.EngineMessage]:
        """All that has been said of live handoffs, in order."""
        for known in self._open.values():
            for said in known.said:
                body = said.message.WhichOneof("body")
                if said.sent and body == "request":
                    said.message.request.repeated = True
                elif said.sent and body == "publish":
                    said.message.publish.repeated = True
                said.sent = True
                yield said.message
            if known.cancellation is not None:
                yield known.cancellation

    @property
    def has_leases(self) -> bool:
        """Whether any lease may have to be renewed."""
        return any(known.lease_ms for known in self._open.values())

    def renewals(self) -> Iterator[pb.EngineMessage]:
        """The leases that are to be renewed now."""
        now_s = time.monotonic()
        for handoff_id, known in self._open.items():
            if known.lease_ms and known.renew_at_s <= now_s < known.hold_until_s:
                known.renew_at_s = now_s + known.lease_ms / 1000 / RENEWALS_PER_LEASE
                renewal = pb.Renewal(handoff_id=handoff_id, lease_ms=known.lease_ms)
                yield pb.EngineMessage(renew=renewal)

    def finish(self, ended: HandoffEnded) -> None:
        """A handoff has ended: tell every caller."""
        known = self._open.pop(ended.handoff_id, None)
        for said in known.said if known is not None else ():
            if not said.end.done():
                said.end.set_result(ended)

    def refuse(self, refused: pb.Refused) -> None:
        """The broker refused one message: its caller hears why, other callers wait on."""
        known = self._open.get(refused.handoff_id)
        said = next(
            (s for s in known.said if s.message.message_id == refused.message_id)
            if known is not None
            else iter(()),
            None,
        )
        if known is None or said is None:
            self._log.warning(
                "message refused",
                handoff=refused.handoff_id,
                reason=refused.reason,
                detail=refused.detail,
            )
            return
        known.said.remove(said)
        if not any(s.message.publish.final for s in known.said):
            # What can't become whole any more is not held for long.
            known.lease_ms = 0
        if not known.said:
            del self._open[refused.handoff_id]
        if not said.end.done():
            said.end.set_exception(
                BrokerCallError(
                    refused.status, refused.reason, refused.detail, handoff=refused.handoff_id
                )
            )

    def close(self, error: RestowError) -> None:
        """Fail every caller, those to come as well."""
        self._closed = error
        known, self._open = self._open, {}
        for handoff in known.values():
            for said in handoff.said:
                if not said.end.done():
                    said.end.set_exception(error)

    def cancel_all(self, reason: str, detail: str) -> None:
        """End every handoff as CANCELLED, and refuse those to come."""
        for handoff_id in list(self._open):
            self.finish(HandoffEnded(handoff_id, "CANCELLED", reason, detail, 0, 0))
        self._closed = self._closed or BrokerCallError("CANCELLED", reason, detail)
