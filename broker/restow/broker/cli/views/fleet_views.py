"""What operators see of several brokers and their pools: documents and tables."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from restow.broker.cli.views.listing import Cell, console, listing, put
from restow.broker.draw.bytes_and_seconds import duration_text
from restow.v1 import admin_pb2 as pb

Values = dict[str, Any]
WIDE, SHORT = 120, 12
"""Columns of a terminal below which a revision is shown by so many letters."""
MODEL = ("model", "revision", "adapter", "quantisation")


def membership_json(status: pb.GetStatusResponse | pb.ListBrokersResponse) -> Values | None:
    """Return how a broker stands among others; None: it is alone."""
    if not status.HasField("membership"):
        return None
    one = status.membership
    trouble = {"reason": one.trouble_reason, "message": one.trouble}
    return {
        "address": one.address,
        "fleet": one.fleet or None,
        "brokers": one.brokers,
        "pools_owned": one.pools_owned,
        "let_in": one.let_in,
        "lease_s": one.lease_s or None,
        "unanswered_s": round(one.unanswered_s, 3) if one.HasField("unanswered_s") else None,
        "still_s": round(one.still_s, 3) if one.HasField("still_s") else None,
        "trouble": trouble if one.trouble_reason else None,
    }


def brokers_json(told: pb.ListBrokersResponse) -> Values:
    """Return what ``restow brokers --json`` prints."""
    return {
        "membership": membership_json(told),
        "brokers": [
            {"address": one.address, "asked": one.asked, "age_s": _age_s(one)}
            for one in told.brokers
        ],
        "pools": [
            {
                "tenant": one.tenant,
                **{name: getattr(one, name) for name in MODEL},
                "owner": one.owner or None,
                "epoch": one.epoch or None,
                "age_s": _age_s(one),
                "own": one.own,
                "leaving": one.leaving,
                "engines": one.engines,
                "agents": one.agents,
                "handoffs_live": one.handoffs_live,
            }
            for one in told.pools
        ],
        "pools_left_out": told.pools_left_out,
    }


def _age_s(one: pb.BrokerMember | pb.PoolInfo) -> float | None:
    return round(one.age_s, 3) if one.HasField("age_s") else None


def show_brokers(value: Values, wide: bool = False) -> None:
    """Print ``restow brokers``: who there is, how the one stands that was asked, and all pools."""
    to, membership = console(wide), value["membership"]
    if membership is None:
        print(
            "This broker is alone: it has all pools. `restow serve --etcd` makes it one of several."
        )
    else:
        rows: list[list[Cell]] = [
            [one["address"], _since(one), "was asked" if one["asked"] else ""]
            for one in value["brokers"]
        ]
        if rows:
            put(to, listing(["broker", "since", ""], rows, to.width, words=""))
        put(to, Text(), Text.assemble(f"{membership['address']} ", standing_text(membership)))
    if value["pools"]:
        put(to, Text(), _pools(value, to.width))
    elif membership is None or membership["let_in"]:
        print("No pool: no engine has registered.")
    if value["pools_left_out"]:
        print(f"... and {value['pools_left_out']} pools more")


def _pools(value: Values, width: int) -> Any:
    alone, letters = value["membership"] is None, SHORT if width < WIDE else None
    columns = ["tenant", "model", "engines", "agents", "live"]
    columns[2:2] = [] if alone else ["owner", "epoch", "since"]
    rows: list[list[Cell]] = []
    for one in value["pools"]:
        parts = {**one, "revision": one["revision"][:letters]}
        row: list[Cell] = [one["tenant"], " ".join(filter(None, (parts[name] for name in MODEL)))]
        if not alone:
            owner = one["owner"] or Text("nobody", style="red")
            row += [owner, str(one["epoch"] or "-"), _since(one)]
        here = [str(one[name]) for name in ("engines", "agents", "handoffs_live")]
        elsewhere = not one["own"] and one["owner"] and not one["engines"]
        rows.append([*row, *(["-"] * 3 if elsewhere else here)])
    return listing(columns, rows, width)


def _since(one: Values) -> str:
    """Return how long ago it began, if the broker that was asked was there."""
    if "epoch" in one and one["epoch"] is None:
        return "-"
    return "before it came" if one["age_s"] is None else f"{duration_text(one['age_s'])} ago"


def standing_text(membership: Values) -> Text:
    """Return how a broker stands among others, in words."""
    trouble = membership["trouble"]
    why = f" ({trouble['reason']}: {trouble['message']})" if trouble else ""
    if membership["still_s"] is not None:
        still = duration_text(membership["still_s"])
        words = (
            f"has stood still for {still}: its lease may have ended, so it grants and ends nothing"
        )
        return Text(f"{words}{why}", style="red")
    if not membership["let_in"]:
        return Text(f"is not let in by the brokers' registry: it owns nothing{why}", style="red")
    pools, brokers = membership["pools_owned"], membership["brokers"]
    answered = duration_text(membership["unanswered_s"] or 0.0)
    words = (
        f"is one of {brokers} and owns {pools} pools; its lease of {membership['lease_s']:g} s was "
        f"kept {answered} ago"
    )
    return Text(f"{words}{why}", style="yellow" if trouble else "")
