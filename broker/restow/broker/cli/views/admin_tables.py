"""These functions print what a broker tells operators, in tables for 80 columns and for 200."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from restow.broker.cli.views.fleet_views import standing_text
from restow.broker.cli.views.gantt import gantt_lines
from restow.broker.cli.views.handoff_columns import (
    HANDOFFS,
    LEASES,
    WIDE_HANDOFFS,
    handoff_cells,
    offers_text,
    progress_text,
    readers_text,
)
from restow.broker.cli.views.listing import Cell, colored, console, listing, put
from restow.broker.cli.views.models_served import mixed_weights, models_json
from restow.broker.draw.bytes_and_seconds import duration_text, rate_text, size_text

WIDE = 120
GANTT_WIDTH = 100
"""Columns of a chart where a line has no end."""
SHORT = 12
"""Letters of a digest or a revision in a narrower terminal."""
Values = dict[str, Any]


def show_status(status: Values, wide: bool = False) -> None:
    """Print ``restow status``, of each broker that was asked."""
    for at, one in enumerate(status.get("brokers", [status])):
        if at:
            print()
        _show_one_status(one, wide)
    if "brokers" in status:
        for words in mixed_weights(status["models"]):
            console(wide=True).print(Text(f"Mixed weights: {words}", style="yellow"))


def _show_one_status(status: Values, wide: bool) -> None:
    ended = "   ".join(f"{count} {state}" for state, count in status["handoffs_ended"].items())
    rows: list[Sequence[str | Text]] = [
        ("broker", f"{status['broker']}, restow {status['version']}"),
        ("epoch", f"{status['broker_epoch']}, up {duration_text(status['uptime_s'])}"),
        ("engines", f"{status['engines']}, with {status['agents']} agents"),
        ("plans", str(status["plans"])),
        (
            "live",
            f"{status['handoffs_live']} handoffs under way, and "
            f"{status['handoffs_quarantined']} whose pages may still be written to",
        ),
        ("ended", ended),
        ("read", size_text(status["bytes_read"])),
        (
            "checked",
            f"{status['handoffs_checked']} by digests, {status['digest_mismatches']} differed",
        ),
    ]
    if status["membership"]:
        rows.insert(2, ("among", standing_text(status["membership"])))
    for words in mixed_weights(status.get("models", [])):
        rows.append((Text("weights", "bold yellow"), words))
    if status["draining"]:
        rows.append((Text("draining", "bold red"), "nothing is granted: restow drain --off"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    put(console(wide), table)


def show_tenants(value: Values, wide: bool = False) -> None:
    """Print ``restow tenants``: what each has, and how its handoffs ended."""
    if not value["tenants"]:
        print("No tenant has engines or handoffs.")
        return
    ends = list(value["tenants"][0]["handoffs_ended"])
    rows = [
        [
            one["tenant"],
            *(str(one[name]) for name in ("engines", "handoffs_live", "handoffs_quarantined")),
            *(str(one["handoffs_ended"][state]) for state in ends),
            size_text(one["bytes_read"]),
        ]
        for one in value["tenants"]
    ]
    columns = ["tenant", "engines", "live", "quarantine", *ends, "read"]
    _show(columns, rows, wide)


def show_leases(value: Values, wide: bool = False, tenants: bool = False) -> None:
    """Print ``restow leases``: who holds pages for whom, and for how long still."""
    if not value["leases"]:
        print("No lease.")
        return
    columns = (*_before(value["leases"], tenants), *LEASES)
    rows = [handoff_cells(one, columns) for one in value["leases"]]
    _show(columns, rows, wide, ids="handoff", words="waits for")
    _say_left_out(value)


def show_costs(costs: Values, wide: bool = False) -> None:
    """Print ``restow costs``: a line a pair of hosts, then what stands for all others."""
    columns = ["from", "to", "a read", "reads at", "a copy", "copies at"]
    columns += ["an element", "a launch", "a stage"]
    rows = []
    for one in costs["hosts"]:
        hosts = [one["source_host"], one["destination_host"]]
        if one["costs"] is None:
            rows.append([*hosts, one["failure"] or "measured", *["-"] * 6])
        else:
            rows.append([*hosts, *_prices(one["costs"])])
    others = ["all others" if costs["hosts"] else "all", "-"]
    rows.append([*others, *_prices(costs["otherwise"])])
    _show(columns, rows, wide)


def _prices(costs: dict[str, float]) -> list[str]:
    return [
        f"{costs['seconds_per_descriptor'] * 1e6:.2f} us",
        rate_text(costs["read_bytes_per_second"]),
        f"{costs['seconds_per_copy'] * 1e6:.2f} us",
        rate_text(costs["copy_bytes_per_second"]),
        f"{costs['seconds_per_element'] * 1e9:.1f} ns",
        f"{costs['seconds_per_launch'] * 1e6:.0f} us",
        f"{costs['seconds_per_stage'] * 1e6:.0f} us",
    ]


def show_engines(value: Values, wide: bool = False, tenants: bool = False) -> None:
    """Print ``restow engines``."""
    engines = value["engines"]
    if not engines:
        print("No engine is registered.")
        return
    to = console(wide)
    letters = SHORT if to.width < WIDE else None
    before = _before(engines, tenants)
    rows: list[list[Cell]] = []
    for one in engines:
        missing = one["agents"] < one["ranks"]
        rows.append(
            [
                *(one[name] for name in before),
                one["engine_id"],
                Text(f"{one['agents']} of {one['ranks']}", style="red" if missing else ""),
                _session(one),
                _with_weights(one),
                one["revision"][:letters] or Text("none", style="yellow"),
                one["layout_digest"][:letters],
                one["incarnation"],
            ]
        )
    columns = [*before, "engine", "agents", "session", "model", "revision", "layout", "incarnation"]
    put(to, listing(columns, rows, to.width))
    for one in engines:
        if one["replaced"]:
            words = (
                f"{one['engine_id']}: this life replaced {', '.join(one['replaced'])} "
                f"{duration_text(one['age_s'])} ago: if it still runs, two have one id"
            )
            console(wide=True).print(Text(words, style="yellow"))
    for words in mixed_weights(models_json(engines)):
        console(wide=True).print(Text(f"Mixed weights: {words}", style="yellow"))
    _say_versions((one["engine_id"], one["version"]) for one in engines)


def _say_versions(versions: Iterable[tuple[str, str]]) -> None:
    """Print who runs what, if that is not one version: too long for a column at 80."""
    by_version: dict[str, list[str]] = {}
    for who, version in versions:
        by_version.setdefault(version or "a version that they do not tell", []).append(who)
    if len(by_version) > 1:
        words = "; ".join(f"{', '.join(who)} of {one}" for one, who in sorted(by_version.items()))
        console(wide=True).print(Text(f"Mixed versions: {words}", style="yellow"))


def _session(engine: Values) -> Text:
    if engine["draining"]:
        return Text("draining", style="yellow")
    return Text("open") if engine["session"] else Text("none", style="yellow")


def _with_weights(engine: Values) -> str:
    """Return the model's name, and what is done to its weights."""
    return " ".join(filter(None, (engine["model"], engine["adapter"], engine["quantisation"])))


def show_agents(value: Values, wide: bool = False, tenants: bool = False) -> None:
    """Print ``restow agents``."""
    if not value["agents"]:
        print("No agent is connected.")
        return
    before = _before(value["agents"], tenants)
    rows = [
        [
            *(one[name] for name in before),
            one["engine_id"],
            str(one["rank"]),
            size_text(one["region_bytes"]),
            size_text(one["staging_bytes"]),
            str(one["regions"]),
            one["agent_name"],
        ]
        for one in value["agents"]
    ]
    _show([*before, "engine", "rank", "memory", "staging", "regions", "agent"], rows, wide)
    _say_versions((f"{one['engine_id']}.{one['rank']}", one["version"]) for one in value["agents"])


def handoffs_table(
    value: Values, to: Console, wide: bool = False, tenants: bool = False
) -> RenderableType:
    """Return the table of ``restow handoffs``."""
    if not value["handoffs"]:
        return Text("No handoff.")
    columns = WIDE_HANDOFFS if wide else (*HANDOFFS, *(["detail"] if to.is_terminal else []))
    columns = (*_before(value["handoffs"], tenants), *columns)
    rows = [handoff_cells(one, columns) for one in value["handoffs"]]
    table = listing(columns, rows, to.width, ids="handoff", words="detail", spare=True)
    if not value["left_out"]:
        return table
    return Group(table, Text(f"... and {value['left_out']} more: raise --limit", style="dim"))


def show_handoffs(value: Values, wide: bool = False, tenants: bool = False) -> None:
    """Print ``restow handoffs``."""
    to = console(wide)
    put(to, handoffs_table(value, to, wide, tenants))


def show_handoff(value: Values, wide: bool = False) -> None:
    """Print ``restow handoff ID``."""
    to = console(wide)
    first, second, *rest = handoff_lines(value, to.width)
    console(wide=True).print(first)
    console(wide=True).print(second)
    put(to, *rest)


def handoff_lines(value: Values, width: int) -> list[RenderableType]:
    """Return one handoff: what it is of, how its time was spent, and what happened to it."""
    lines: list[RenderableType] = [
        Text.assemble((value["handoff_id"], "bold"), "  ", colored(value["state"])),
        Text(
            f"from {value['source_engine'] or '-'} to "
            f"{value['destination_engine'] or readers_text(value) or '-'}, "
            f"position {value['position_tokens'] or '-'}, {size_text(value['bytes'])} read, "
            f"first heard of {duration_text(value['age_s'])} ago"
        ),
        Text(f"content {value['content']}"),
    ]
    if value["prefix_tokens"]:
        lines.append(Text(offers_text(value)))
    if value["reading_ranks"]:
        lines.append(Text(f"reads {progress_text(value)}"))
    if value["waits_for"]:
        lines.append(Text(f"waits: {value['waits_for']}", style="yellow"))
    if value["reason"]:
        lines.append(Text(f"{value['reason']}: {value['detail']}", style="red"))
        lines.append(Text(f"{value['meaning']}\nNext: {value['next_step']}"))
    if len(value["spans"]) > 1:
        lines += [Text(), *gantt_lines(value, min(width, GANTT_WIDTH))]
    rows = [
        [f"{entry['at_ms']:.1f}", entry["event"], entry["detail"] or ""]
        for entry in value["timeline"]
    ]
    lines += [Text(), listing(["ms", "event", ""], rows, width, words="")]
    for one in value["deliveries"]:
        lines += [Text(), *handoff_lines(one, width)]
    return lines


def _show(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    wide: bool,
    *,
    ids: str = "",
    words: str | None = None,
) -> None:
    to = console(wide)
    put(to, listing(columns, rows, to.width, ids=ids, words=words))


def _say_left_out(value: Values) -> None:
    if value["left_out"]:
        print(f"... and {value['left_out']} more: raise --limit")


def _before(rows: Sequence[Values], tenants: bool) -> list[str]:
    several = any(one["broker"] for one in rows)
    return [name for name, shown in (("tenant", tenants), ("broker", several)) if shown]
