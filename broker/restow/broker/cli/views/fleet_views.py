"""Show several brokers to operators, as documents and tables."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from restow.broker.cli.views.listing import Cell, console, listing, put
from restow.broker.draw.bytes_and_seconds import duration_text
from restow.v1 import admin_pb2 as pb

Values = dict[str, Any]


def membership_json(status: pb.GetStatusResponse | pb.ListBrokersResponse) -> Values | None:
    """Return the state of a broker among others; None if it is the only broker."""
    if not status.HasField("membership"):
        return None
    membership = status.membership
    trouble = {"reason": membership.trouble_reason, "message": membership.trouble}
    return {
        "address": membership.address,
        "fleet": membership.fleet,
        "brokers": membership.brokers,
        "expected": membership.expected or None,
        "leads": membership.leads,
        "leader": membership.leader or None,
        "epoch": membership.epoch or None,
        "leaderless_s": round(membership.leaderless_s, 3)
        if membership.HasField("leaderless_s")
        else None,
        "let_in": membership.let_in,
        "lease_s": membership.lease_s or None,
        "unanswered_s": round(membership.unanswered_s, 3)
        if membership.HasField("unanswered_s")
        else None,
        "still_s": round(membership.still_s, 3) if membership.HasField("still_s") else None,
        "trouble": trouble if membership.trouble_reason else None,
        "warnings": list(membership.warnings),
    }


def brokers_json(told: pb.ListBrokersResponse) -> Values:
    """Return what ``restow brokers --json`` prints."""
    return {
        "membership": membership_json(told),
        "brokers": [
            {"address": broker.address, "asked": broker.asked, "leads": broker.leads}
            for broker in told.brokers
        ],
    }


def show_brokers(value: Values, wide: bool = False) -> None:
    """Print ``restow brokers``: all brokers, and the state of the broker that was asked."""
    to, membership = console(wide), value["membership"]
    if membership is None:
        print("This is the only broker. `restow serve --etcd` makes it one of several.")
        return
    rows: list[list[Cell]] = [
        [
            broker["address"],
            "leads" if broker["leads"] else "standby",
            "asked" if broker["asked"] else "",
        ]
        for broker in value["brokers"]
    ]
    if rows:
        put(to, listing(["broker", "", " "], rows, to.width, words=""))
    put(to, Text(), Text.assemble(f"{membership['address']} ", standing_text(membership)))


def standing_text(membership: Values) -> Text:
    """Return the state of a broker among others, in words."""
    trouble = membership["trouble"]
    why = f" ({trouble['reason']}: {trouble['message']})" if trouble else ""
    if not membership["let_in"]:
        return Text(f"is not let in by the brokers' registry{why}", style="red")
    if membership["still_s"] is not None:
        still = duration_text(membership["still_s"])
        words = f"has stood still for {still}: its lease may have ended, so it grants nothing"
        return Text(f"{words}{why}", style="red")
    if membership["leader"] is None:
        since = duration_text(membership["leaderless_s"] or 0.0)
        return Text(f"knows no leader since {since}{why}", style="red")
    leads = f"leads in epoch {membership['epoch']}"
    does = leads if membership["leads"] else f"stands by, {membership['leader']} {leads}"
    brokers, expected = membership["brokers"], membership["expected"]
    missing = expected is not None and brokers < expected
    count = f"{brokers} of {expected}" if expected is not None else str(brokers)
    words = f"{does}; there are {count} brokers"
    words += "".join(f"; etcd {warning}" for warning in membership["warnings"])
    bad = missing or bool(trouble) or bool(membership["warnings"])
    return Text(f"{words}{why}", style="yellow" if bad else "")
