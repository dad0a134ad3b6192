"""Turn a broker's answers to operators into documents: what ``--json`` prints.

Scripts rely on this form. Tables, ``restow top`` and the status page are made of it too, by `rows`.
Every field of a message stands in its document under its own name, and null means unknown or
absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from restow.broker.reasons import advice_for
from restow.v1 import admin_pb2 as pb

Values = dict[str, Any]
ENDS: Final = ("DONE", "FAILED", "EXPIRED", "CANCELLED")
NULL_IF_EMPTY: Final = frozenset(
    {
        *("source_engine", "destination_engine", "position_tokens", "reason", "detail"),
        *("waits_for", "readers", "block_tokens", "window_tokens", "failure"),
    }
)
"""Fields without presence whose zero value means that the thing is absent."""
READING: Final = ("expected_bytes", "reading_ranks", "settled_ranks")
"""Fields of a handoff that is granted and has not ended; else null."""
BY_PREFIX: Final = ("prefix_tokens", "offers", "offers_declined")
"""Fields of a handoff that is asked for by prefix; else null."""
DIGITS: Final = {
    **dict.fromkeys(("uptime_s", "age_s", "lease_s", "patience_s", "ended_ago_s"), 3),
    **dict.fromkeys(("at_ms", "begin_ms", "end_ms"), 3),
    **dict.fromkeys(("leaderless_s", "unanswered_s", "still_s"), 3),
    "transfer_s": 6,
}
"""Decimal places to which a field is rounded."""
STATUS: Final = (
    *("version", "broker_epoch", "uptime_s", "engines", "agents", "plans", "handoffs_live"),
    *("handoffs_quarantined", "handoffs_ended", "bytes_read", "handoffs_checked"),
    *("digest_mismatches", "draining", "requires_content"),
)
IDENTITY: Final = ("tenant", "model", "revision", "adapter", "quantisation")


def document(message: Message) -> Values:
    """Return the fields of a message by name; messages inside it become documents too.

    >>> document(pb.TrafficStep(done=2, p50_s=0.1))
    {'done': 2, 'failed': 0, 'cancelled': 0, 'bytes': 0, 'p50_s': 0.1, 'p99_s': None}
    """
    return {name: convert(message, name) for name, convert in _converters(message.DESCRIPTOR)}


@cache
def _converters(message: Descriptor) -> list[tuple[str, Callable[[Message, str], Any]]]:
    return [(field.name, _converter(field)) for field in message.fields]


def _converter(field: FieldDescriptor) -> Callable[[Message, str], Any]:
    """Return a function that converts a field of a message, by its name."""
    convert: Callable[[Any], Any] = document if field.message_type else _scalar_converter(field)
    if field.is_repeated:
        return lambda message, name: [convert(value) for value in getattr(message, name)]
    if field.has_presence:
        return lambda message, name: (
            convert(getattr(message, name)) if message.HasField(name) else None
        )
    return lambda message, name: convert(getattr(message, name))


def _scalar_converter(field: FieldDescriptor) -> Callable[[Any], Any]:
    if field.enum_type:
        names = {value.number: value.name for value in field.enum_type.values}
        return lambda number: names[number].removeprefix("HANDOFF_STATE_")
    if field.name in DIGITS:
        return partial(round, ndigits=DIGITS[field.name])
    return (lambda value: value or None) if field.name in NULL_IF_EMPTY else (lambda value: value)


def _with_ends(told: Values) -> Values:
    """Replace the counts of states by a count of each state in which handoffs end."""
    counts = {count["state"]: count["count"] for count in told.pop("ended")}
    return {**told, "handoffs_ended": {state: counts.get(state, 0) for state in ENDS}}


def tenants_json(tenants: Iterable[pb.TenantInfo]) -> Values:
    """Return what ``restow tenants --json`` prints."""
    return {"tenants": [_with_ends(document(tenant)) for tenant in tenants]}


def status_json(status: pb.GetStatusResponse, address: str) -> Values:
    """Return what ``restow status --json`` prints."""
    told = _with_ends(document(status))
    return {"broker": address, **{name: told[name] for name in STATUS}}


def membership_json(told: pb.GetStatusResponse | pb.ListBrokersResponse) -> Values | None:
    """Return the state of a broker among others; None if it is the only broker."""
    if not told.HasField("membership"):
        return None
    state = document(told.membership)
    trouble = {"reason": state.pop("trouble_reason"), "message": state.pop("trouble")}
    unknown = ("expected", "leader", "epoch", "lease_s")
    return {
        **state,
        **{name: state[name] or None for name in unknown},
        "trouble": trouble if trouble["reason"] else None,
    }


def brokers_json(told: pb.ListBrokersResponse) -> Values:
    """Return what ``restow brokers --json`` prints."""
    brokers = [document(broker) for broker in told.brokers]
    return {"membership": membership_json(told), "brokers": brokers}


def traffic_json(status: pb.GetStatusResponse) -> Values:
    """Return what ended in the last quarter of an hour, by step and by pair of engines.

    An older broker reports none.
    """
    told = document(status)
    return {
        "step_s": told["step_s"],
        "steps": told["steps"],
        "pairs": [{**pair.pop("traffic"), **pair} for pair in told["pairs"]],
        "pairs_left_out": told["pairs_left_out"],
    }


def engines_json(engines: Iterable[pb.EngineInfo]) -> Values:
    """Return what ``restow engines --json`` prints."""
    return {"engines": [document(engine) for engine in engines]}


def agents_json(agents: Iterable[pb.AgentInfo]) -> Values:
    """Return what ``restow agents --json`` prints."""
    return {"agents": [document(agent) for agent in agents]}


def _info_json(info: pb.HandoffInfo) -> Values:
    told = document(info)
    unknown = (() if info.reading_ranks else READING) + (() if info.prefix_tokens else BY_PREFIX)
    return told | dict.fromkeys(unknown)


def handoffs_json(response: pb.ListHandoffsResponse) -> Values:
    """Return what ``restow handoffs --json`` prints."""
    return {
        "handoffs": [_info_json(handoff) for handoff in response.handoffs],
        "left_out": response.left_out,
    }


def leases_json(response: pb.ListHandoffsResponse, limit: int) -> Values:
    """Return what ``restow leases --json`` prints: leases that end first come first."""
    leases = [
        handoff for handoff in map(_info_json, response.handoffs) if handoff["lease_s"] is not None
    ]
    leases.sort(key=lambda handoff: handoff["lease_s"])
    return {"leases": leases[:limit], "left_out": max(0, len(leases) - limit)}


def handoff_json(response: pb.GetHandoffResponse) -> Values:
    """Return what ``restow handoff ID --json`` prints."""
    reason = response.handoff.reason
    advice = advice_for(reason) if reason else None
    return {
        **_info_json(response.handoff),
        "meaning": advice.meaning if advice else None,
        "next_step": advice.next_step if advice else None,
        "timeline": [document(event) for event in response.timeline],
        "spans": [document(span) for span in response.spans],
        "deliveries": [handoff_json(delivery) for delivery in response.deliveries],
    }


def costs_json(response: pb.ListCostsResponse) -> Values:
    """Return what ``restow costs --json`` prints; ``--costs`` of other commands takes ``costs``."""
    told = document(response)
    return {"measured": not told["fixed"], "otherwise": told["otherwise"], "hosts": told["hosts"]}


def holdings_json(response: pb.ListHoldingsResponse, beginning: str = "") -> Values:
    """Return what ``restow holdings --json`` prints.

    Only engines whose ids start with ``beginning`` are listed.
    """
    told = document(response)
    return {
        "engines": [
            {**engine.pop("form"), **engine}
            for engine in told["engines"]
            if engine["engine_id"].startswith(beginning)
        ],
        "tenants": told["tenants"],
    }


def models_json(engines: Iterable[Values]) -> list[Values]:
    """Return each model with the ids of its engines, from the engines of ``restow engines``."""
    engines_of: dict[tuple[str, ...], list[str]] = {}
    for engine in engines:
        engines_of.setdefault(tuple(engine[name] for name in IDENTITY), []).append(
            engine["engine_id"]
        )
    return [
        {**dict(zip(IDENTITY, model, strict=True)), "engines": sorted(ids)}
        for model, ids in sorted(engines_of.items())
    ]


def mixed_weights(models: Iterable[Values]) -> list[str]:
    """Return a sentence for each model whose engines have different weights."""
    by_name: dict[tuple[str, str], list[str]] = {}
    for model in models:
        words = [model["revision"] or "no revision", model["adapter"], model["quantisation"]]
        who = f"{', '.join(model['engines'])} of {' '.join(filter(None, words))}"
        by_name.setdefault((model["tenant"], model["model"]), []).append(who)
    return [
        f"{name}: {'; '.join(who)}: nothing is handed over between these"
        for (_, name), who in by_name.items()
        if len(who) > 1
    ]
