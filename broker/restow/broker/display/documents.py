"""Turn a broker's answers to operators into documents: what ``--json`` prints.

Scripts rely on this form. Tables, ``restow top`` and the status page are made of it too, by `rows`.
Null means not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import Message

from restow.broker.reasons import advice_for
from restow.v1 import admin_pb2 as pb
from restow.v1 import broker_pb2

Values = dict[str, Any]
ENDS = ("DONE", "FAILED", "EXPIRED", "CANCELLED")


def _state(number: int) -> str:
    return broker_pb2.HandoffState.Name(broker_pb2.HandoffState.ValueType(number)).removeprefix(
        "HANDOFF_STATE_"
    )


def _values(message: Message, *names: str) -> Values:
    return {name: getattr(message, name) for name in names}


def _or_null(message: Message, *names: str) -> Values:
    return {name: getattr(message, name) or None for name in names}


def _if_set(message: Message, *names: str, digits: int | None = None) -> Values:
    """Return optional fields, rounded; null: the broker does not know."""
    set_ = {name: getattr(message, name) if message.HasField(name) else None for name in names}
    return {
        name: round(value, digits) if value is not None and digits else value
        for name, value in set_.items()
    }


def _ended(counts: Iterable[pb.StateCount]) -> dict[str, int]:
    ended = {_state(one.state): one.count for one in counts}
    return {state: ended.get(state, 0) for state in ENDS}


def tenants_json(tenants: Iterable[pb.TenantInfo]) -> Values:
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


def status_json(status: pb.GetStatusResponse, address: str) -> Values:
    """Return what ``restow status --json`` prints."""
    return {
        "broker": address,
        **_values(status, "version", "broker_epoch"),
        "uptime_s": round(status.uptime_s, 3),
        **_values(status, "engines", "agents", "plans", "handoffs_live", "handoffs_quarantined"),
        "handoffs_ended": _ended(status.ended),
        **_values(status, "bytes_read", "handoffs_checked", "digest_mismatches"),
        **_values(status, "draining", "requires_content"),
    }


def traffic_json(status: pb.GetStatusResponse) -> Values:
    """Return what ended in the last quarter of an hour; of an older broker, nothing."""
    return {
        "step_s": status.step_s,
        "steps": [_step_json(one) for one in status.steps],
        "pairs": [
            {
                **_values(one, "tenant", "source_engine", "destination_engine"),
                **_step_json(one.traffic),
                **_if_set(one, "bytes_per_second"),
            }
            for one in status.pairs
        ],
        "pairs_left_out": status.pairs_left_out,
    }


def _step_json(step: pb.TrafficStep) -> Values:
    counts = _values(step, "done", "failed", "cancelled", "bytes")
    return {**counts, **_if_set(step, "p50_s", "p99_s")}


def engines_json(engines: Iterable[pb.EngineInfo]) -> Values:
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


def agents_json(agents: Iterable[pb.AgentInfo]) -> Values:
    """Return what ``restow agents --json`` prints."""
    shown = "engine_id", "rank", "agent_name", "regions", "region_bytes", "staging_bytes", "tenant"
    return {
        "agents": [
            {**_values(one, *shown, "version"), "broker": one.broker or None} for one in agents
        ]
    }


def handoffs_json(response: pb.ListHandoffsResponse) -> Values:
    """Return what ``restow handoffs --json`` prints."""
    return {
        "handoffs": [_info_json(one) for one in response.handoffs],
        "left_out": response.left_out,
    }


def leases_json(response: pb.ListHandoffsResponse, limit: int) -> Values:
    """Return what ``restow leases --json`` prints: those that end first come first."""
    leases = [one for one in map(_info_json, response.handoffs) if one["lease_s"] is not None]
    leases.sort(key=lambda one: one["lease_s"])
    return {"leases": leases[:limit], "left_out": max(0, len(leases) - limit)}


def handoff_json(response: pb.GetHandoffResponse) -> Values:
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
                **_if_set(one, "rank", "source_rank", "bytes"),
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


def costs_json(response: pb.ListCostsResponse) -> Values:
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


def _info_json(info: pb.HandoffInfo) -> Values:
    read = _values(info, "expected_bytes", "reading_ranks", "settled_ranks")
    asked = _values(info, "prefix_tokens", "offers", "offers_declined")
    return {
        **_values(info, "handoff_id", "number"),
        "state": _state(info.state),
        **_or_null(info, "source_engine", "destination_engine", "position_tokens"),
        "bytes": info.bytes,
        **_or_null(info, "reason", "detail"),
        "age_s": round(info.age_s, 3),
        **_or_null(info, "waits_for"),
        **_if_set(info, "lease_s", "patience_s", digits=3),
        **_if_set(info, "transfer_s", digits=6),
        "strategies": list(info.strategies),
        **_values(info, "content", "tenant"),
        **_if_set(info, "ended_ago_s", digits=3),
        **(read if info.reading_ranks else dict.fromkeys(read)),
        "readers": info.readers or None,
        "delivered": info.delivered,
        **(asked if info.prefix_tokens else dict.fromkeys(asked)),
        "broker": info.broker or None,
    }


def holdings_json(told: pb.ListHoldingsResponse, beginning: str = "") -> Values:
    """Return what ``restow holdings --json`` prints: of engines whose ids begin so."""
    return {
        "engines": [
            _engine_holdings_json(one)
            for one in told.engines
            if one.engine_id.startswith(beginning)
        ],
        "tenants": [
            _values(one, "tenant", "hashes", "bytes", "limit_bytes", "forgotten")
            for one in told.tenants
        ],
    }


def _engine_holdings_json(one: pb.EngineHoldings) -> Values:
    return {
        **_values(one, "tenant", "engine_id"),
        "broker": one.broker or None,
        **_values(one.form, "algorithm", "quantum_tokens", "hash_bytes"),
        **_values(one, "batches", "offers", "offers_declined"),
        "groups": [_group_json(group) for group in one.groups],
    }


def _group_json(group: pb.GroupHoldings) -> Values:
    held = _values(group, "group", "count")
    return {**held, **_or_null(group, "block_tokens", "window_tokens")}


IDENTITY = ("tenant", "model", "revision", "adapter", "quantisation")


def models_json(engines: Iterable[Values]) -> list[Values]:
    """Return each model with the ids of its engines, from what ``restow engines`` has of them."""
    found: dict[tuple[str, ...], list[str]] = {}
    for one in engines:
        found.setdefault(tuple(one[name] for name in IDENTITY), []).append(one["engine_id"])
    return [
        {**dict(zip(IDENTITY, model, strict=True)), "engines": sorted(ids)}
        for model, ids in sorted(found.items())
    ]


def mixed_weights(models: Iterable[Values]) -> list[str]:
    """Return a sentence for each model whose engines have different weights."""
    by_name: dict[tuple[str, str], list[str]] = {}
    for one in models:
        words = [one["revision"] or "no revision", one["adapter"], one["quantisation"]]
        who = f"{', '.join(one['engines'])} of {' '.join(filter(None, words))}"
        by_name.setdefault((one["tenant"], one["model"]), []).append(who)
    return [
        f"{name}: {'; '.join(who)}: nothing is handed over between these"
        for (_, name), who in by_name.items()
        if len(who) > 1
    ]
