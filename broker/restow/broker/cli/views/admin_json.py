"""These functions put what a broker tells operators into the form that scripts rely on.

Null means not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import Message

from restow.broker.cli.views.fleet_views import membership_json
from restow.broker.reasons import advice_for
from restow.v1 import admin_pb2 as pb
from restow.v1 import broker_pb2

ENDS = ("DONE", "FAILED", "EXPIRED", "CANCELLED")


def _state(number: int) -> str:
    return broker_pb2.HandoffState.Name(broker_pb2.HandoffState.ValueType(number)).removeprefix(
        "HANDOFF_STATE_"
    )


def _values(message: Message, *names: str) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names}


def _ended(counts: Iterable[pb.StateCount]) -> dict[str, int]:
    ended = {_state(one.state): one.count for one in counts}
    return {state: ended.get(state, 0) for state in ENDS}


def tenants_json(tenants: Iterable[pb.TenantInfo]) -> dict[str, Any]:
    """Return what ``restow tenants --json`` prints."""
    return {
        "tenants": [
            {
                **_values(one, "tenant", "engines", "handoffs_live", "handoffs_quarantined"),
                "handoffs_ended": _ended(one.ended),
                "bytes_read": one.bytes_read,
            }
            for one in tenants
        ]
    }


def status_json(status: pb.GetStatusResponse, address: str) -> dict[str, Any]:
    """Return what ``restow status --json`` prints."""
    return {
        "broker": address,
        **_values(status, "version", "broker_epoch"),
        "uptime_s": round(status.uptime_s, 3),
        **_values(status, "engines", "agents", "plans", "handoffs_live", "handoffs_quarantined"),
        "handoffs_ended": _ended(status.ended),
        **_values(status, "bytes_read", "handoffs_checked", "digest_mismatches"),
        **_values(status, "draining", "requires_content"),
        "membership": membership_json(status),
    }


def traffic_json(status: pb.GetStatusResponse) -> dict[str, Any]:
    """Return what ended in the last quarter of an hour; of an older broker, nothing."""
    return {
        "step_s": status.step_s,
        "steps": [_step_json(one) for one in status.steps],
        "pairs": [
            {
                **_values(one, "tenant", "source_engine", "destination_engine"),
                **_step_json(one.traffic),
                "bytes_per_second": _if_set(one, "bytes_per_second"),
            }
            for one in status.pairs
        ],
        "pairs_left_out": status.pairs_left_out,
    }


def _step_json(step: pb.TrafficStep) -> dict[str, Any]:
    counts = _values(step, "done", "failed", "cancelled", "bytes")
    return {**counts, "p50_s": _if_set(step, "p50_s"), "p99_s": _if_set(step, "p99_s")}


def _if_set(message: Message, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


def engines_json(engines: Iterable[pb.EngineInfo]) -> dict[str, Any]:
    """Return what ``restow engines --json`` prints."""
    return {
        "engines": [
            {
                **_values(one, "engine_id", "incarnation"),
                **_values(one, "model", "revision", "adapter", "quantisation", "layout_digest"),
                **_values(one, "ranks", "agents", "session", "draining", "open", "version"),
                "replaced": list(one.replaced),
                "age_s": round(one.age_s, 3),
                "tenant": one.tenant,
                "broker": one.broker or None,
            }
            for one in engines
        ]
    }


def agents_json(agents: Iterable[pb.AgentInfo]) -> dict[str, Any]:
    """Return what ``restow agents --json`` prints."""
    shown = "engine_id", "rank", "agent_name", "regions", "region_bytes", "staging_bytes", "tenant"
    return {
        "agents": [
            {**_values(one, *shown, "version"), "broker": one.broker or None} for one in agents
        ]
    }


def handoffs_json(response: pb.ListHandoffsResponse) -> dict[str, Any]:
    """Return what ``restow handoffs --json`` prints."""
    return {
        "handoffs": [_info_json(one) for one in response.handoffs],
        "left_out": response.left_out,
    }


def leases_json(response: pb.ListHandoffsResponse, limit: int) -> dict[str, Any]:
    """Return what ``restow leases --json`` prints: those that end first come first."""
    leases = [one for one in map(_info_json, response.handoffs) if one["lease_s"] is not None]
    leases.sort(key=lambda one: one["lease_s"])
    return {"leases": leases[:limit], "left_out": max(0, len(leases) - limit)}


def handoff_json(response: pb.GetHandoffResponse) -> dict[str, Any]:
    """Return what ``restow handoff ID --json`` prints."""
    reason = response.handoff.reason
    advice = advice_for(reason) if reason else None
    return {
        **_info_json(response.handoff),
        "meaning": advice.meaning if advice else None,
        "next_step": advice.next_step if advice else None,
        "timeline": [
            {"at_ms": round(one.at_ms, 3), "event": one.event, "detail": one.detail or None}
            for one in response.timeline
        ],
        "spans": [
            {
                "kind": one.kind,
                "begin_ms": round(one.begin_ms, 3),
                "end_ms": round(one.end_ms, 3),
                **{name: _if_set(one, name) for name in ("rank", "source_rank", "bytes")},
                "over": one.over,
            }
            for one in response.spans
        ],
        "deliveries": [handoff_json(one) for one in response.deliveries],
    }


COSTS = (
    *("seconds_per_descriptor", "read_bytes_per_second", "copy_bytes_per_second"),
    *("seconds_per_launch", "seconds_per_copy", "seconds_per_element", "seconds_per_stage"),
    *("seconds_per_weight_byte", "nominal_tokens"),
)


def costs_json(response: pb.ListCostsResponse) -> dict[str, Any]:
    """Return what ``restow costs --json`` prints; ``--costs`` of other commands takes ``costs``."""
    return {
        "measured": not response.fixed,
        "otherwise": _values(response.otherwise, *COSTS),
        "hosts": [
            {
                "source_host": one.source_host,
                "destination_host": one.destination_host,
                "costs": _values(one.costs, *COSTS) if one.HasField("costs") else None,
                "failure": one.failure or None,
            }
            for one in response.hosts
        ],
    }


def _info_json(info: pb.HandoffInfo) -> dict[str, Any]:
    return {
        "handoff_id": info.handoff_id,
        "number": info.number,
        "state": _state(info.state),
        "source_engine": info.source_engine or None,
        "destination_engine": info.destination_engine or None,
        "position_tokens": info.position_tokens or None,
        "bytes": info.bytes,
        "reason": info.reason or None,
        "detail": info.detail or None,
        "age_s": round(info.age_s, 3),
        "waits_for": info.waits_for or None,
        "lease_s": round(info.lease_s, 3) if info.HasField("lease_s") else None,
        "patience_s": round(info.patience_s, 3) if info.HasField("patience_s") else None,
        "transfer_s": round(info.transfer_s, 6) if info.HasField("transfer_s") else None,
        "strategies": list(info.strategies),
        "content": info.content,
        "tenant": info.tenant,
        "ended_ago_s": round(info.ended_ago_s, 3) if info.HasField("ended_ago_s") else None,
        "expected_bytes": info.expected_bytes if info.reading_ranks else None,
        "reading_ranks": info.reading_ranks or None,
        "settled_ranks": info.settled_ranks if info.reading_ranks else None,
        "readers": info.readers or None,
        "delivered": info.delivered,
        "prefix_tokens": info.prefix_tokens or None,
        "offers": info.offers if info.prefix_tokens else None,
        "offers_declined": info.offers_declined if info.prefix_tokens else None,
        "broker": info.broker or None,
    }
