"""Open handoffs of a session: what the engine said of each handoff, until the handoff ends."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from restow.broker.block_ids import ID_BYTES
from restow.broker.client.connection.errors import BrokerCallError, PagesNotFreeError
from restow.broker.client.engine.handoff_futures import Delivery, HandoffEnded, HandoffFuture
from restow.broker.errors import HandoffConflictError, RestowError
from restow.broker.logs import get_logger
from restow.broker.rpc.status import cut
from restow.v1 import broker_pb2 as pb


@dataclass(slots=True, eq=False)
class Said:
    """A message, and the future that its caller waits for."""

    message: pb.EngineMessage
    end: HandoffFuture
    """A `Delivery` for messages of D."""
    sent: bool
    """Whether the message may have been sent."""
    patient_until_s: float
    """Time at which D, or P's last lease, stops waiting."""
    cancellation: pb.EngineMessage | None = None
    """Cancellation of this demand, if the caller gave it up."""
    untold: bool = False
    """Whether the broker may not know this demand, and so never tell when its pages are free."""

    def finish(self, ended: HandoffEnded) -> None:
        """Tell the end, after which no rank works on the handoff any more."""
        self.end.tell(ended)
        if isinstance(self.end, Delivery):
            self.end.free()

    def fail(self, error: Exception, free: bool = False) -> None:
        """Fail the caller with ``error``; ``free`` says that a refused message had no effect."""
        self.end.fail(error)
        if isinstance(self.end, Delivery):
            self.end.free(None if free else error)

    def begin_again(self, now_s: float) -> None:
        """Mark a message that is sent again on another stream."""
        if not self.sent:
            self.sent = True
        elif self.message.HasField("request"):
            self.message.request.repeated = True
            left_s = self.patient_until_s - now_s
            self.message.request.timeout_ms = max(1, int(left_s * 1000))
        elif self.message.HasField("publish"):
            self.message.publish.repeated = True


@dataclass(slots=True)
class OpenHandoff:
    """All messages about one handoff, and P's lease."""

    said: list[Said] = field(default_factory=list)
    cancellation: pb.EngineMessage | None = None
    lease_ms: int = 0
    renew_at_s: float = 0.0
    hold_until_s: float = 0.0


def cancellation_of(handoff_id: str, detail: str, demand: int = 0) -> pb.EngineMessage:
    """Return the message that gives up D's demand of that number, or with 0 the whole handoff."""
    cancellation = pb.Cancellation(handoff_id=handoff_id, detail=cut(detail), demand=demand)
    return pb.EngineMessage(cancel=cancellation)


def contradicts(first: pb.Publication, second: pb.Publication) -> bool:
    """Return whether two chunks name different blocks for a place, and so belong to two states."""
    return any(
        _differ(said, more)
        for said in first.blocks
        for more in second.blocks
        if said.group == more.group
    )


def _differ(left: pb.BlockList, right: pb.BlockList) -> bool:
    first, second = sorted((left, right), key=lambda blocks: blocks.first_block)
    behind = ID_BYTES * (second.first_block - first.first_block)
    both = min(len(first.block_ids) - behind, len(second.block_ids))
    return both > 0 and first.block_ids[behind : behind + both] != second.block_ids[:both]


def is_same(first: pb.Publication, second: pb.Publication) -> bool:
    """Return whether two messages publish the same state."""
    names = ("final", "position_tokens", "content", "readers", "revision", "sampled_token")
    return (
        all(getattr(first, name) == getattr(second, name) for name in names)
        and first.HasField("sampled_token") == second.HasField("sampled_token")
        and list(first.blocks) == list(second.blocks)
    )


RENEWALS_PER_LEASE = 3
DEFAULT_TIMEOUT_S = 30.0
"""Timeout of a demand that names none (`Limits.timeout_s`)."""
SILENT = "BROKER_SILENT"
"""Reason of an end that the broker did not tell in time."""
LATE = "the broker has not ended it in time"
SILENCE_S = 50.0
"""Time after P's or D's own patience for which an agent may work on a handoff, with a margin.

The broker counts patience and leases from the time at which it receives them, and a message may be
under way for as long as it takes to notice two dead connections (`rpc.sizes.NOTICED_S`, 14 s each).
Grants end before both. But the lane of a read that does not end is closed only after
`AgentSettings.quarantine_s` (6 s) and the other reads on it, which end within
`agents.reading.reader.RETIRED_S` (10 s).
"""
MAX_USED = 1 << 16
"""Number of remembered ids of publications that ended or were given up."""
KNOWN_S = 60.0
MAX_KNOWN = 1024
"""Time for which ends are remembered, and their number.

The next broker is told of them, because the last broker may have died before it told the other
side.
"""


class OpenHandoffs:
    """The open handoffs of a session. Belongs to one event loop."""

    def __init__(
        self,
        send: Callable[[pb.EngineMessage], bool],
        clock: Callable[[], float] = lambda: time.monotonic(),
        first_number: int = 0,
    ) -> None:
        """Begin empty. ``send`` sends a message on the stream, or returns False if none is open.

        Messages are numbered after ``first_number``.
        """
        self._send = send
        self.revision = ""
        """Revision of the engine's weights after they were replaced; empty before."""
        self._open: dict[str, OpenHandoff] = {}
        self._emptied = asyncio.Event()
        self._used: OrderedDict[str, None] = OrderedDict()
        """Ids that must not be published again, because ranks may have fenced them.

        They belong to publications that ended, and to handoffs that were given up.
        """
        self._known_ends: deque[tuple[float, pb.Ended]] = deque(maxlen=MAX_KNOWN)
        """The latest ends that a broker told, with their time."""
        self._last_message = first_number
        self._closed: RestowError | None = None
        self._clock = clock
        self._log = get_logger("restow.client")

    def publish(self, message: pb.EngineMessage, hold_ms: int) -> HandoffFuture:
        """Publish a state, and renew its lease for ``hold_ms``.

        Raises `HandoffConflictError` for an id that this session has given up; that it has
        published before, if the publication has ended; or that it has published, completely or in
        part, as another state. A fence of the second state would count for the first, which may not
        be computed yet.
        """
        publication = message.publish
        handoff_id = publication.handoff_id
        if handoff_id in self._used or self._is_another(handoff_id, publication):
            raise HandoffConflictError(
                f"handoff {handoff_id} was published or given up before: an id names one state, so "
                f"use a new id",
                handoff=handoff_id,
            )
        publication.anew = any(entry.message.publish.anew for entry in self._said_of(handoff_id))
        end = HandoffFuture()
        lease_ms, now_s = publication.lease_ms, self._clock()
        until_s = now_s + (hold_ms + lease_ms) / 1000
        if self._say(handoff_id, message, end, until_s):
            known = self._open[handoff_id]
            known.lease_ms = lease_ms
            known.renew_at_s = now_s + lease_ms / 1000 / RENEWALS_PER_LEASE
            known.hold_until_s = now_s + hold_ms / 1000
            for said in known.said:  # the pages of earlier chunks are held equally long
                if not isinstance(said.end, Delivery):
                    said.patient_until_s = max(said.patient_until_s, until_s)
        return end

    def _is_another(self, handoff_id: str, publication: pb.Publication) -> bool:
        said = [entry.message.publish for entry in self._said_of(handoff_id)]
        if any(contradicts(chunk, publication) for chunk in said):
            return True
        whole = [chunk for chunk in said if chunk.final]
        return bool(whole) and not any(is_same(publication, chunk) for chunk in whole)

    def ask(self, handoff_id: str, message: pb.EngineMessage) -> Delivery:
        """Send a demand or a decline."""
        delivery = Delivery(partial(self._give_up, handoff_id))
        timeout_s = message.request.timeout_ms / 1000 or DEFAULT_TIMEOUT_S
        self._say(handoff_id, message, delivery, self._clock() + timeout_s)
        return delivery

    def _say(
        self, handoff_id: str, message: pb.EngineMessage, end: HandoffFuture, patient_until_s: float
    ) -> bool:
        said = Said(message, end, False, patient_until_s)
        if self._closed is not None:
            said.fail(self._closed, free=True)
            return False
        self._open.setdefault(handoff_id, OpenHandoff()).said.append(said)
        self._emptied.clear()
        said.sent = self._send_numbered(message)
        return True

    def cancel(self, handoff_id: str, detail: str) -> None:
        """Give a handoff up, unless its publication has ended; its id is not published again.

        Ranks may have fenced a handoff of which nothing was sent; the broker forgets these fences.
        """
        message = cancellation_of(handoff_id, detail)
        known = self._open.get(handoff_id)
        if known is not None:
            known.cancellation = message
        elif handoff_id in self._used:
            return
        self._use_up(handoff_id)
        self._send_numbered(message)

    def take_back(self, handoff_id: str, detail: str) -> None:
        """Take back the chunks of a publication, unless it has ended.

        A complete publication is given up, because nobody may read its pages any more.
        """
        said = [entry.message.publish for entry in self._said_of(handoff_id)]
        chunks = [chunk for chunk in said if chunk.handoff_id]
        if any(chunk.final for chunk in chunks):
            self.cancel(handoff_id, detail)
            return
        for chunk in chunks:  # if they are sent again after a reconnect, they are taken back too
            chunk.ClearField("blocks")
            chunk.anew = True
        if chunks:
            again = pb.EngineMessage()
            again.publish.CopyFrom(chunks[-1])
            self._send_numbered(again)

    def _give_up(self, handoff_id: str, delivery: Delivery) -> None:
        """Give up one demand; other demands of the handoff continue."""
        said = next((entry for entry in self._said_of(handoff_id) if entry.end is delivery), None)
        if said is None:
            return
        if said.sent:
            why, demand = "the caller no longer waits", said.message.message_id
            said.cancellation = cancellation_of(handoff_id, why, demand)
            self._send_numbered(said.cancellation)
        else:
            self._drop(handoff_id, said)
            delivery.free()

    def _send_numbered(self, message: pb.EngineMessage) -> bool:
        """Send a message with its own number; return False if no stream is open."""
        self._last_message += 1
        message.message_id = self._last_message
        return self._send(message)

    def _said_of(self, handoff_id: str) -> list[Said]:
        return self._open[handoff_id].said if handoff_id in self._open else []

    def _drop(self, handoff_id: str, said: Said) -> None:
        left = self._said_of(handoff_id)
        left.remove(said)
        if not left:
            del self._open[handoff_id]
            if not self._open:
                self._emptied.set()

    def everything(self) -> Iterator[pb.EngineMessage]:
        """Yield the latest known ends, then all messages about open handoffs, in order.

        Demands that were given up are not repeated, because their pages may be in other use by
        then. They are cancelled, and a broker that knows them tells when their pages are free.
        """
        now_s = self._clock()
        for heard_s, ended in self._known_ends:
            if now_s - heard_s < KNOWN_S:
                yield pb.EngineMessage(known_end=ended)
        for handoff_id, known in self._open.items():
            for said in known.said:
                if isinstance(said.end, Delivery) and said.end.done():
                    said.untold = True
                    said.cancellation = said.cancellation or cancellation_of(
                        handoff_id, LATE, said.message.message_id
                    )
                else:
                    said.begin_again(now_s)
                    yield said.message
                if said.cancellation is not None:
                    yield said.cancellation
            if known.cancellation is not None:
                yield known.cancellation

    @property
    def empty(self) -> bool:
        """Whether no handoff is open, so that no time has to be kept."""
        return not self._open

    async def wait_ended(self) -> None:
        """Return when no handoff is open."""
        if self._open:
            await self._emptied.wait()

    def _all_said(self) -> Iterator[tuple[str, Said]]:
        """Yield all messages, each with the id of its handoff."""
        for handoff_id, known in self._open.items():
            for said in known.said:
                yield handoff_id, said

    @property
    def demands(self) -> list[tuple[str, Delivery]]:
        """The demands whose pages may still be written to."""
        return [
            (handoff_id, said.end)
            for handoff_id, said in self._all_said()
            if isinstance(said.end, Delivery)
        ]

    def renew(self) -> None:
        """Renew the leases that are due."""
        now_s = self._clock()
        for handoff_id, known in self._open.items():
            if known.lease_ms and known.renew_at_s <= now_s < known.hold_until_s:
                known.renew_at_s = now_s + known.lease_ms / 1000 / RENEWALS_PER_LEASE
                renewal = pb.Renewal(handoff_id=handoff_id, lease_ms=known.lease_ms)
                self._send(pb.EngineMessage(renew=renewal))

    def give_up_late(self, connected: bool) -> None:
        """End waits that the broker has not ended in time.

        A D that cannot reach the broker waits no longer than its patience. Its pages are free when
        the broker says so: the broker holds them for ranks that have not reported, because an agent
        that was stopped may begin late, after any time. Without a broker, or if it may not know the
        demand, they are free after `SILENCE_S`.
        """
        now_s = self._clock()
        for handoff_id, said in list(self._all_said()):
            late_s = now_s - said.patient_until_s
            by_d = isinstance(said.end, Delivery)
            silent = late_s >= SILENCE_S
            if late_s < 0 or not (silent or (by_d and not connected)):
                continue
            why = f"the broker has not told its end, and its time limit passed {late_s:.1f} s ago"
            ended = HandoffEnded(handoff_id, "EXPIRED", SILENT, why, 0, 0)
            may_be_written_to = by_d and (connected and not said.untold if silent else said.sent)
            if may_be_written_to:
                said.end.tell(ended)
            else:
                self._drop(handoff_id, said)
                said.finish(ended)
            if silent:
                self._cancel_late(handoff_id, said, by_d)

    def _cancel_late(self, handoff_id: str, said: Said, by_d: bool) -> None:
        """Cancel a late handoff at the broker, now and again on each new stream."""
        if said.cancellation is None:
            demand = said.message.message_id if by_d else 0
            said.cancellation = cancellation_of(handoff_id, LATE, demand)
            self._send(said.cancellation)

    def hear_end(self, ended: pb.Ended) -> None:
        """Handle an end that the broker told."""
        if ended.counterparts:
            self._known_ends.append((self._clock(), ended))
        self.finish(HandoffEnded.of(ended), ended.demand)

    def finish(self, ended: HandoffEnded, demand: int = 0) -> None:
        """End a handoff for the caller of message ``demand``, or with 0 for the publishers."""
        handoff_id = ended.handoff_id
        said = self._said_of(handoff_id)
        if demand:
            mine = [entry for entry in said if entry.message.message_id == demand]
        else:
            mine = [entry for entry in said if not isinstance(entry.end, Delivery)]
            if handoff_id in self._open:
                self._open[handoff_id].lease_ms = 0
            if any(entry.message.publish.final for entry in mine):
                self._use_up(handoff_id)
        for entry in mine:
            self._drop(handoff_id, entry)
            entry.finish(self._of_revision(ended, entry))

    def _of_revision(self, ended: HandoffEnded, said: Said) -> HandoffEnded:
        """Return D's end, which fails if the weights were replaced in the meantime."""
        if not (ended.done and said.message.HasField("request") and self.revision):
            return ended
        if said.message.request.revision == self.revision:
            return ended
        words = (
            f"the weights were replaced in the meantime, and now have revision {self.revision!r}"
        )
        return replace(ended, state="FAILED", reason="REVISION_CHANGED", detail=words)

    def sampled(self, sampled: pb.Sampled) -> None:
        """Pass on the token that P sampled, to the demand that takes it."""
        for said in self._said_of(sampled.handoff_id):
            if said.message.message_id != sampled.demand or not isinstance(said.end, Delivery):
                continue
            if not said.end.sampled.done():
                said.end.sampled.set_result(sampled.token)

    def _use_up(self, handoff_id: str) -> None:
        self._used[handoff_id] = None
        if len(self._used) > MAX_USED:
            self._used.popitem(last=False)

    def refuse(self, refused: pb.Refused) -> None:
        """Handle the refusal of one message; other callers of the handoff keep waiting."""
        handoff_id = refused.handoff_id
        numbered = {entry.message.message_id: entry for entry in self._said_of(handoff_id)}
        said = numbered.get(refused.message_id)
        if said is None:
            self._log.warning(
                "message refused",
                handoff=handoff_id,
                reason=refused.reason,
                detail=refused.detail,
            )
            return
        error = BrokerCallError(refused.status, refused.reason, refused.detail, handoff=handoff_id)
        if said.message.request.repeated:
            # Ranks may still work on it for an earlier broker, and nobody will tell.
            said.end.fail(error)
            said.untold = True
            return
        known = self._open[handoff_id]
        self._drop(handoff_id, said)
        if not any(entry.message.publish.final for entry in known.said):
            # The publication can't become complete any more, so its lease is not renewed.
            known.lease_ms = 0
        said.fail(error, free=True)

    def close(self, error: RestowError) -> None:
        """Fail every caller, including later callers."""
        for _, said in self._take_all(error):
            said.fail(error, free=not said.sent)

    def cancel_all(self, reason: str, detail: str) -> None:
        """End every handoff as CANCELLED, and refuse later handoffs."""
        for handoff_id, said in self._take_all(BrokerCallError("CANCELLED", reason, detail)):
            ended = HandoffEnded(handoff_id, "CANCELLED", reason, detail, 0, 0)
            if isinstance(said.end, Delivery) and said.sent:
                said.end.tell(ended)
                said.end.free(PagesNotFreeError(handoff_id))
            else:
                said.finish(ended)

    def _take_all(self, error: RestowError) -> list[tuple[str, Said]]:
        """Forget and return all messages; later callers hear ``error``."""
        taken = list(self._all_said())
        self._open = {}
        self._emptied.set()
        self._closed = self._closed or error
        return taken
