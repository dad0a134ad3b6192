"""What operators are told of a handoff, and how many there are."""

from __future__ import annotations

from collections.abc import Mapping

from restow.broker.core.actions import State
from restow.broker.core.granting import Granting
from restow.broker.core.handoffs.demand import content_compared
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.server.orders import STATE_NUMBERS
from restow.v1 import admin_pb2 as pb
from restow.v1 import broker_pb2

MAX_INT64 = (1 << 63) - 1


def state_counts(ended: Mapping[State, int]) -> list[pb.StateCount]:
    """How many ended in which state."""
    return [
        pb.StateCount(state=STATE_NUMBERS[state], count=count)
        for state, count in sorted(ended.items())
    ]


def handoff_info(handoff: Handoff, granting: Granting, now_s: float) -> pb.HandoffInfo:
    """One handoff, as it stands."""
    failure = handoff.failure
    state: broker_pb2.HandoffState.ValueType = STATE_NUMBERS[handoff.state]
    info = pb.HandoffInfo(
        tenant=handoff.tenant,
        handoff_id=handoff.handoff_id,
        number=handoff.number,
        state=state,
        source_engine=handoff.source.key.engine_id if handoff.source else "",
        destination_engine=handoff.destination.key.engine_id if handoff.destination else "",
        position_tokens=handoff.publication.position_tokens,
        bytes=handoff.bytes_read,
        reason=failure.reason if failure else "",
        detail=failure.detail if failure else "",
        age_s=now_s - handoff.born_s,
        strategies=handoff.strategies,
        content=content_compared(handoff.publication, handoff.demand),
    )
    if handoff.ended:
        info.ended_ago_s = now_s - handoff.ended_s
        if handoff.granted_s:
            info.transfer_s = handoff.ended_s - handoff.granted_s
    else:
        info.waits_for = granting.waits_for(handoff)
        if handoff.lease.until_s:
            info.lease_s = handoff.lease.until_s - now_s
        if handoff.lease.patience_until_s:
            info.patience_s = handoff.lease.patience_until_s - now_s
    return info
