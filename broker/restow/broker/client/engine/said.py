"""What an engine has said of one handoff that has not ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from restow.broker.block_ids import ID_BYTES
from restow.broker.client.engine.delivery import Delivery, HandoffEnded, HandoffFuture
from restow.broker.rpc.status import cut
from restow.v1 import broker_pb2 as pb


@dataclass(slots=True, eq=False)
class Said:
    """One message and what its caller waits for."""

    message: pb.EngineMessage
    end: HandoffFuture
    """A `Delivery`, if D said it."""
    sent: bool
    """Whether it may have been sent."""
    patient_until_s: float
    """When D, or P's last lease, waits no longer."""
    cancellation: pb.EngineMessage | None = None
    """Of this demand, if it was given up."""
    untold: bool = False
    """A demand that the broker may not know any more: nobody tells when its pages are free."""

    def finish(self, ended: HandoffEnded) -> None:
        """No rank is at work on it any more."""
        self.end.tell(ended)
        if isinstance(self.end, Delivery):
            self.end.free()

    def fail(self, error: Exception, free: bool = False) -> None:
        """It has no end: it was refused (``free``: nothing came of it), or nobody can say."""
        self.end.fail(error)
        if isinstance(self.end, Delivery):
            self.end.free(None if free else error)

    def begin_again(self, now_s: float) -> None:
        """Mark a message that is said on another stream."""
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
    """All that was said of one, and P's lease."""

    said: list[Said] = field(default_factory=list)
    cancellation: pb.EngineMessage | None = None
    lease_ms: int = 0
    renew_at_s: float = 0.0
    hold_until_s: float = 0.0


def cancellation_of(handoff_id: str, detail: str, demand: int = 0) -> pb.EngineMessage:
    """Make the message that gives up D's demand of that number; 0: the whole handoff."""
    cancellation = pb.Cancellation(handoff_id=handoff_id, detail=cut(detail), demand=demand)
    return pb.EngineMessage(cancel=cancellation)


def contradicts(one: pb.Publication, other: pb.Publication) -> bool:
    """Whether two chunks give one place in a list to different blocks, so are of two states."""
    return any(
        _differ(said, more)
        for said in one.blocks
        for more in other.blocks
        if said.group == more.group
    )


def _differ(one: pb.BlockList, other: pb.BlockList) -> bool:
    first, second = sorted((one, other), key=lambda each: each.first_block)
    behind = ID_BYTES * (second.first_block - first.first_block)
    both = min(len(first.block_ids) - behind, len(second.block_ids))
    return both > 0 and first.block_ids[behind : behind + both] != second.block_ids[:both]


def is_same(one: pb.Publication, other: pb.Publication) -> bool:
    """Whether two messages publish the same state."""
    return (
        one.final == other.final
        and one.position_tokens == other.position_tokens
        and one.content == other.content
        and one.readers == other.readers
        and one.revision == other.revision
        and one.HasField("sampled_token") == other.HasField("sampled_token")
        and one.sampled_token == other.sampled_token
        and list(one.blocks) == list(other.blocks)
    )
