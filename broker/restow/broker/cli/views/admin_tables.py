"""These functions print what a broker tells operators, in tables for 80 columns and for 200."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from restow.broker.cli.views.handoff_columns import HANDOFFS, LEASES, NUMBERS, handoff_row
from restow.broker.draw.bytes_and_seconds import duration_text, size_text

WIDE = 120
SHORT = 12
"""Letters of a digest or a revision in a narrower terminal."""
GAP = 2
COLORS = {"DONE": "green", "FAILED": "red", "EXPIRED": "yellow", "CANCELLED": "yellow"}


def _console() -> Console:
    return Console(highlight=False, markup=False)


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=True,
            overflow="ellipsis",
        )
    return table


def _state(state: str) -> Text:
    return Text(state, style=COLORS.get(state, "cyan"))


def _cells(columns: Sequence[str], row: Sequence[str]) -> list[str | Text]:
    return [
        _state(text) if name == "state" else text for name, text in zip(columns, row, strict=True)
    ]


def show_status(status: dict[str, Any]) -> None:
    """Print ``restow status``."""
    ended = "   ".join(f"{count} {state}" for state, count in status["handoffs_ended"].items())
    table = _table("", "")
    table.show_header = False
    for name, value in (
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
    ):
        table.add_row(Text(name, style="bold"), value)
    if status["draining"]:
        table.add_row(Text("draining", style="bold red"), "nothing is granted: restow drain --off")
    _console().print(table)


def show_leases(value: dict[str, Any]) -> None:
    """Print ``restow leases``: who holds pages for whom, and for how long still."""
    console = _console()
    if not value["leases"]:
        console.print("No lease.")
        return
    table = _table(*LEASES, right=NUMBERS)
    waits_for = table.columns[LEASES.index("waits for")]
    waits_for.no_wrap, waits_for.overflow = False, "fold"
    for one in value["leases"]:
        table.add_row(*_cells(LEASES, handoff_row(one, LEASES)))
    console.print(table)
    if value["left_out"]:
        console.print(f"... and {value['left_out']} more: raise --limit")


def show_costs(costs: dict[str, Any]) -> None:
    """Print ``restow costs``: a line a pair of hosts, then what stands for all others."""
    table = _table(
        "from", "to", "a read", "GB/s", "a copy", "an element", "GB/s ", "a launch", "a stage"
    )
    for one in costs["hosts"]:
        if one["costs"] is None:
            table.add_row(one["source_host"], one["destination_host"], one["failure"] or "measured")
        else:
            table.add_row(one["source_host"], one["destination_host"], *_prices(one["costs"]))
    table.add_row("all others" if costs["hosts"] else "all", "", *_prices(costs["otherwise"]))
    _console().print(table)


def _prices(costs: dict[str, float]) -> list[str]:
    return [
        f"{costs['seconds_per_descriptor'] * 1e6:.2f} us",
        f"{costs['read_bytes_per_second'] / 1e9:.1f}",
        f"{costs['seconds_per_copy'] * 1e6:.2f} us",
        f"{costs['seconds_per_element'] * 1e9:.1f} ns",
        f"{costs['copy_bytes_per_second'] / 1e9:.1f}",
        f"{costs['seconds_per_launch'] * 1e6:.0f} us",
        f"{costs['seconds_per_stage'] * 1e6:.0f} us",
    ]


def show_engines(value: dict[str, Any]) -> None:
    """Print ``restow engines``."""
    console, engines = _console(), value["engines"]
    if not engines:
        console.print("No engine is registered.")
        return
    table = _table("engine", "model", "revision", "agents", "session", "layout", "incarnation")
    wide = console.width >= WIDE
    for one in engines:
        missing = one["agents"] < one["ranks"]
        table.add_row(
            one["engine_id"],
            _with_weights(one),
            one["revision"][: None if wide else SHORT] or Text("none", style="yellow"),
            Text(f"{one['agents']} of {one['ranks']}", style="red" if missing else ""),
            Text("open" if one["session"] else "none", style="" if one["session"] else "yellow"),
            one["layout_digest"] if wide else one["layout_digest"][:SHORT],
            one["incarnation"],
        )
    console.print(table)
    for one in engines:
        if one["replaced"]:
            words = (
                f"{one['engine_id']}: this life replaced {', '.join(one['replaced'])} "
                f"{duration_text(one['age_s'])} ago: if it still runs, two have one id"
            )
            console.print(Text(words, style="yellow"), soft_wrap=True)
    _say_versions(console, ((one["engine_id"], one["version"]) for one in engines))


def _say_versions(console: Console, versions: Iterable[tuple[str, str]]) -> None:
    """Print who runs what, if that is not one version: too long for a column at 80."""
    by_version: dict[str, list[str]] = {}
    for who, version in versions:
        by_version.setdefault(version or "a version that they do not tell", []).append(who)
    if len(by_version) > 1:
        words = "; ".join(f"{', '.join(who)} of {one}" for one, who in sorted(by_version.items()))
        console.print(Text(f"Mixed versions: {words}", style="yellow"), soft_wrap=True)


def _with_weights(engine: dict[str, Any]) -> str:
    """Return the model's name, and what is done to its weights."""
    return " ".join(filter(None, (engine["model"], engine["adapter"], engine["quantisation"])))


def show_agents(value: dict[str, Any]) -> None:
    """Print ``restow agents``."""
    console = _console()
    if not value["agents"]:
        console.print("No agent is connected.")
        return
    numbers = ("regions", "memory", "staging")
    table = _table("engine", "rank", "agent", *numbers, right=("rank", *numbers))
    for one in value["agents"]:
        table.add_row(
            one["engine_id"],
            str(one["rank"]),
            one["agent_name"],
            str(one["regions"]),
            size_text(one["region_bytes"]),
            size_text(one["staging_bytes"]),
        )
    console.print(table)
    named = ((f"{one['engine_id']}.{one['rank']}", one["version"]) for one in value["agents"])
    _say_versions(console, named)


def handoffs_table(value: dict[str, Any], width: int) -> RenderableType:
    """Return the table of ``restow handoffs`` for a terminal of ``width`` columns."""
    if not value["handoffs"]:
        return Text("No handoff.")
    columns = (*HANDOFFS, "detail") if width >= WIDE else HANDOFFS
    rows = [handoff_row(one, columns) for one in value["handoffs"]]
    # Ids may be long: what is left of the width is theirs, so that no column is pushed out.
    others = sum(
        max(len(name), *(len(row[index]) for row in rows)) + GAP
        for index, name in enumerate(HANDOFFS)
        if index
    )
    table = _table(*columns, right=NUMBERS)
    table.columns[0].max_width = max(12, width - others - GAP)
    for row in rows:
        table.add_row(*_cells(columns, row))
    if not value["left_out"]:
        return table
    return Group(table, Text(f"... and {value['left_out']} more: raise --limit", style="dim"))


def show_handoffs(value: dict[str, Any]) -> None:
    """Print ``restow handoffs``."""
    console = _console()
    console.print(handoffs_table(value, console.width))


@contextlib.contextmanager
def live_handoffs(value: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show ``restow handoffs --watch``; the function given shows the next figures."""
    console = _console()
    with Live(handoffs_table(value, console.width), console=console, auto_refresh=False) as live:
        yield lambda new: live.update(handoffs_table(new, console.width), refresh=True)


def show_handoff(value: dict[str, Any]) -> None:
    """Print ``restow handoff ID``."""
    console = _console()
    head = Text.assemble((value["handoff_id"], "bold"), "  ", _state(value["state"]))
    console.print(head, soft_wrap=True)
    console.print(
        f"from {value['source_engine'] or '-'} to {value['destination_engine'] or '-'}, "
        f"position {value['position_tokens'] or '-'}, {size_text(value['bytes'])} read, "
        f"first heard of {duration_text(value['age_s'])} ago",
        soft_wrap=True,
    )
    console.print(f"content {value['content']}")
    if value["waits_for"]:
        console.print(Text(f"waits: {value['waits_for']}", style="yellow"))
    if value["reason"]:
        console.print(Text(f"{value['reason']}: {value['detail']}", style="red"))
        console.print(f"{value['meaning']}\nNext: {value['next_step']}", highlight=False)
    console.print()
    table = _table("ms", "event", "", right=("ms",))
    table.columns[2].no_wrap = False
    table.columns[2].overflow = "fold"
    for entry in value["timeline"]:
        table.add_row(f"{entry['at_ms']:.1f}", entry["event"], entry["detail"] or "")
    console.print(table)
