"""What operators see of prefixes: who holds how much, as documents and as tables."""

from __future__ import annotations

from typing import Any

from restow.broker.cli.views.listing import console, listing, put
from restow.broker.client.engine.chains import PrefixHolder
from restow.broker.draw.bytes_and_seconds import size_text
from restow.v1 import admin_pb2 as pb

Values = dict[str, Any]


def holdings_json(told: pb.ListHoldingsResponse, beginning: str = "") -> Values:
    """Return what ``restow holdings --json`` prints: of engines whose ids begin so."""
    return {
        "engines": [
            {
                "tenant": one.tenant,
                "engine_id": one.engine_id,
                "broker": one.broker or None,
                "algorithm": one.form.algorithm,
                "quantum_tokens": one.form.quantum_tokens,
                "hash_bytes": one.form.hash_bytes,
                "batches": one.batches,
                "offers": one.offers,
                "offers_declined": one.offers_declined,
                "groups": [
                    {
                        "group": group.group,
                        "count": group.count,
                        "block_tokens": group.block_tokens or None,
                        "window_tokens": group.window_tokens or None,
                    }
                    for group in one.groups
                ],
            }
            for one in told.engines
            if one.engine_id.startswith(beginning)
        ],
        "tenants": [
            {
                "tenant": one.tenant,
                "hashes": one.hashes,
                "bytes": one.bytes,
                "limit_bytes": one.limit_bytes,
                "forgotten": one.forgotten,
            }
            for one in told.tenants
        ],
    }


def show_holdings(value: Values, wide: bool = False, tenants: bool = False) -> None:
    """Print ``restow holdings``: a line a group of an engine, then what a tenant's take."""
    if not value["engines"]:
        print("No engine tells what it holds.")
    else:
        brokers = ["broker"] if any(one["broker"] for one in value["engines"]) else []
        before = [*(["tenant"] if tenants else []), *brokers]
        rows = [
            [
                *(one[name] for name in before),
                one["engine_id"],
                group["group"],
                str(group["count"]),
                _kind(group),
                str(one["quantum_tokens"]),
                one["algorithm"],
            ]
            for one in value["engines"]
            for group in one["groups"]
        ]
        columns = [*before, "engine", "group", "held", "of", "quantum", "hashes by"]
        to = console(wide)
        put(to, listing(columns, rows, to.width))
    for one in value["engines"]:
        if one["offers"]:
            whose = f"{one['tenant']} " if tenants else ""
            print(
                f"{whose}{one['engine_id']}: asked for what it holds {one['offers']} times, "
                f"declined {one['offers_declined']}"
            )
    for one in value["tenants"]:
        whose = f"tenant {one['tenant']}: " if tenants else ""
        lost = f", {one['forgotten']} were forgotten for want of room" if one["forgotten"] else ""
        print(
            f"{whose}{one['hashes']} hashes in {size_text(one['bytes'])} of "
            f"{size_text(one['limit_bytes'])}{lost}"
        )


def held_text(one: Values) -> str:
    """Return how much an engine says that it holds, in a few words.

    >>> attention = {"count": 3, "block_tokens": 16, "window_tokens": None}
    >>> state = {"count": 2, "block_tokens": None, "window_tokens": None}
    >>> held_text({"groups": [attention, state]})
    '48 tokens, 2 snapshots'
    """
    whole = [group for group in one["groups"] if group["window_tokens"] is None]
    tokens = [group["count"] * group["block_tokens"] for group in whole if group["block_tokens"]]
    snapshots = [group["count"] for group in whole if not group["block_tokens"]]
    told = (
        (min(some), what) for some, what in ((tokens, "token"), (snapshots, "snapshot")) if some
    )
    return ", ".join(f"{count} {what}{'s' * (count != 1)}" for count, what in told)


def _kind(group: Values) -> str:
    if group["block_tokens"] is None:
        return "snapshots"
    window = f", window {group['window_tokens']}" if group["window_tokens"] else ""
    return f"blocks of {group['block_tokens']}{window}"


def find_json(holders: list[PrefixHolder], hashes: int, below_tokens: int) -> Values:
    """Return what ``restow find --json`` prints."""
    return {
        "hashes": hashes,
        "below_tokens": below_tokens or None,
        "holders": [
            {
                "engine_id": one.engine_id,
                "tokens": one.tokens,
                "layout_digest": one.layout_digest,
                "open": one.open,
                "draining": one.draining,
            }
            for one in holders
        ],
    }


def show_found(value: Values, wide: bool = False) -> None:
    """Print ``restow find``: a line a holder, those with most first."""
    if not value["holders"]:
        print("Nobody holds any of it.")
        return
    rows = [
        [
            one["engine_id"],
            str(one["tokens"]),
            str(one["open"]),
            "yes" if one["draining"] else "no",
            one["layout_digest"],
        ]
        for one in value["holders"]
    ]
    to = console(wide)
    columns = ["engine", "tokens", "open handoffs", "draining", "layout"]
    put(to, listing(columns, rows, to.width, ids="layout"))
