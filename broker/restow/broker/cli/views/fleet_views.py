"""What operators see of several brokers: documents and tables."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from restow.broker.cli.views.listing import Cell, console, listing, put
from restow.broker.draw.bytes_and_seconds import duration_text
from restow.v1 import admin_pb2 as pb

Values = dict[str, Any]


def membership_json(status: pb.GetStatusResponse | pb.ListBrokersResponse) -> Values | None:
    """Return how a broker stands among others; None: it is the only one."""
    if not status.HasField("membership"):
        return None
    one = status.membership
    trouble = {"reason": one.trouble_reason, "message": one.trouble}
    return {
        "address": one.address,
        "fleet": one.fleet,
        "brokers": one.brokers,
        "expected": one.expected or None,
        "leads": one.leads,
        "leader": one.leader or None,
        "epoch": one.epoch or None,
        "leaderless_s": round(one.leaderless_s, 3) if one.HasField("leaderless_s") else None,
        "let_in": one.let_in,
        "lease_s": one.lease_s or None,
        "unanswered_s": round(one.unanswered_s, 3) if one.HasField("unanswered_s") else None,
        "still_s": round(one.still_s, 3) if one.HasField("still_s") else None,
        "trouble": trouble if one.trouble_reason else None,
        "warnings": list(one.warnings),
    }


def brokers_json(told: pb.ListBrokersResponse) -> Values:
    """Return what ``restow brokers --json`` prints."""
    return {
        "membership": membership_json(told),
        "brokers": [
            {"address": one.address, "asked": one.asked, "leads": one.leads} for one in told.brokers
        ],
    }


def show_brokers(value: Values, wide: bool = False) -> None:
    """Print ``restow brokers``: all brokers, and how the broker stands that was asked."""
    to, membership = console(wide), value["membership"]
    if membership is None:
        print("This is the only broker. `restow serve --etcd` makes it one of several.")
        return
    rows: list[list[Cell]] = [
        [one["address"], "leads" if one["leads"] else "standby", "asked" if one["asked"] else ""]
        for one in value["brokers"]
    ]
    if rows:
        put(to, listing(["broker", "", " "], rows, to.width, words=""))
    put(to, Text(), Text.assemble(f"{membership['address']} ", standing_text(membership)))


def standing_text(membership: Values) -> Text:
    """Return how a broker stands among others, in words."""
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
    words += "".join(f"; etcd {one}" for one in membership["warnings"])
    bad = missing or bool(trouble) or bool(membership["warnings"])
    return Text(f"{words}{why}", style="yellow" if bad else "")
