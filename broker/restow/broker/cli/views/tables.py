"""Print what a broker tells operators, as tables for terminals of 80 columns and of 200."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from restow.broker.cli.views.listing import Cell, colored, console, listing, put
from restow.broker.display.documents import ENDS, Values, mixed_weights, models_json
from restow.broker.display.rows import COLUMNS, Chart, about, charts, destination_text, timeline
from restow.broker.draw.bytes_and_seconds import duration_text, rate_text, size_text

WIDE = 120
SHORT = 12
"""Letters of a digest or a revision in a terminal that is not `WIDE`."""
CHART_WIDTH = 100
"""Columns of a chart where the length of lines is not limited."""
WEIGHTS = ("model", "adapter", "quantisation")
LABEL = 18
"""Columns before a bar of a chart."""
LEAST_BAR = 10
STYLES = {"warn": "yellow", "bad": "red"}
BARS = {"wait": "bright_black", "grant": "yellow", "stage": "magenta", "read": "blue"}
HANDOFFS = ("handoff", "state", "reason", "from", "to", "age", "read", "tokens")
"""Columns of ``restow handoffs``. A terminal that has room shows the detail too."""
WIDE_HANDOFFS = (*HANDOFFS, "lease", "by", "detail")
LEASES = ("handoff", "lease", "state", "from", "waits for")

Columns = dict[str, str | Callable[[Values], Cell]]
"""Columns by title: each is a field of a document, or a function of the document."""


def show_status(status: Values, wide: bool = False) -> None:
    """Print ``restow status``."""
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
    for cells in rows:
        table.add_row(*cells)
    put(console(wide), table)


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


def show_tenants(value: Values, wide: bool = False) -> None:
    """Print ``restow tenants``: how much each tenant has, and how its handoffs ended."""
    if not value["tenants"]:
        print("No tenant has engines or handoffs.")
        return
    columns: Columns = {
        "tenant": "tenant",
        "engines": "engines",
        "live": "handoffs_live",
        "quarantine": "handoffs_quarantined",
        **{state: _count_of(state) for state in ENDS},
        "read": lambda tenant: size_text(tenant["bytes_read"]),
    }
    _show(value["tenants"], columns, wide)


def _count_of(state: str) -> Callable[[Values], Cell]:
    return lambda tenant: str(tenant["handoffs_ended"][state])


def show_engines(value: Values, wide: bool = False, tenants: bool = False) -> None:
    """Print ``restow engines``, with warnings of two lives, mixed weights and mixed versions."""
    engines = value["engines"]
    if not engines:
        print("No engine is registered.")
        return
    letters = SHORT if console(wide).width < WIDE else None
    columns: Columns = {
        "engine": "engine_id",
        "agents": _agents_cell,
        "session": _session_cell,
        "model": lambda engine: " ".join(filter(None, (engine[name] for name in WEIGHTS))),
        "revision": lambda engine: engine["revision"][:letters] or Text("none", style="yellow"),
        "layout": lambda engine: engine["layout_digest"][:letters],
        "incarnation": "incarnation",
    }
    _show(engines, columns, wide, tenants)
    _warn(
        f"{engine['engine_id']}: this life replaced {', '.join(engine['replaced'])} "
        f"{duration_text(engine['age_s'])} ago: if it still runs, two have one id"
        for engine in engines
        if engine["replaced"]
    )
    _warn(f"Mixed weights: {words}" for words in mixed_weights(models_json(engines)))
    _warn_of_versions((engine["engine_id"], engine["version"]) for engine in engines)


def _agents_cell(engine: Values) -> Cell:
    missing = engine["agents"] < engine["ranks"]
    return Text(f"{engine['agents']} of {engine['ranks']}", style="red" if missing else "")


def _session_cell(engine: Values) -> Cell:
    if engine["draining"]:
        return Text("draining", style="yellow")
    return Text("open") if engine["session"] else Text("none", style="yellow")


def show_agents(value: Values, wide: bool = False, tenants: bool = False) -> None:
    """Print ``restow agents``, with a warning of mixed versions."""
    agents = value["agents"]
    if not agents:
        print("No agent is connected.")
        return
    columns: Columns = {
        "engine": "engine_id",
        "rank": "rank",
        "memory": lambda agent: size_text(agent["region_bytes"]),
        "staging": lambda agent: size_text(agent["staging_bytes"]),
        "regions": "regions",
        "agent": "agent_name",
    }
    _show(agents, columns, wide, tenants)
    _warn_of_versions(
        (f"{agent['engine_id']}.{agent['rank']}", agent["version"]) for agent in agents
    )


def _warn_of_versions(versions: Iterable[tuple[str, str]]) -> None:
    """Print who runs which version, if there are several: 80 columns have no room for them."""
    by_version: dict[str, list[str]] = {}
    for who, version in versions:
        by_version.setdefault(version or "an unknown version", []).append(who)
    if len(by_version) > 1:
        told = "; ".join(
            f"{', '.join(who)} of {label}" for label, who in sorted(by_version.items())
        )
        _warn([f"Mixed versions: {told}"])


def _warn(sentences: Iterable[str]) -> None:
    for words in sentences:
        console(wide=True).print(Text(words, style="yellow"))


def show_handoffs(value: Values, wide: bool = False, tenants: bool = False) -> None:
    """Print ``restow handoffs``."""
    handoffs, to = value["handoffs"], console(wide)
    if not handoffs:
        print("No handoff.")
        return
    titles = WIDE_HANDOFFS if wide else (*HANDOFFS, *(["detail"] if to.is_terminal else []))
    columns = handoff_columns(titles)
    _show(handoffs, columns, wide, tenants, ids="handoff", words="detail", spare=True)
    _say_left_out(value)


def show_leases(value: Values, wide: bool = False, tenants: bool = False) -> None:
    """Print ``restow leases``: who keeps pages for whom, and how long each lease has left."""
    if not value["leases"]:
        print("No lease.")
        return
    columns = handoff_columns(LEASES)
    _show(value["leases"], columns, wide, tenants, ids="handoff", words="waits for")
    _say_left_out(value)


def handoff_columns(titles: Iterable[str]) -> Columns:
    """Return some columns of handoffs, with the state in its color."""
    texts: Columns = {title: COLUMNS[title].text for title in titles}
    return {**texts, "state": lambda handoff: colored(handoff["state"])}


def show_handoff(value: Values, wide: bool = False) -> None:
    """Print ``restow handoff ID``."""
    to = console(wide)
    first, second, *rest = handoff_lines(value, to.width)
    console(wide=True).print(first)
    console(wide=True).print(second)
    put(to, *rest)


def handoff_lines(value: Values, width: int) -> list[RenderableType]:
    """Return the lines that show one handoff, and then the lines of its deliveries."""
    lines: list[RenderableType] = [
        Text.assemble((value["handoff_id"], "bold"), "  ", colored(value["state"])),
        *(Text(words, STYLES.get(style, "")) for words, style in about(value)),
    ]
    if len(value["spans"]) > 1:
        lines.append(Text())
        for chart in charts(value):
            lines += chart_lines(chart, min(width, CHART_WIDTH))
    lines += [Text(), listing(["ms", "event", ""], timeline(value), width, words="")]
    for delivery in value["deliveries"]:
        lines += [Text(), *handoff_lines(delivery, width)]
    return lines


def chart_lines(chart: Chart, width: int) -> list[Text]:
    """Return a chart as a line with its title, and a line for each of its bars."""
    cells = max(LEAST_BAR, width - LABEL - max(len(bar.words) for bar in chart.bars) - 2)
    lines = [Text(chart.title, style="bold")]
    for bar in chart.bars:
        first = min(cells - 1, max(0, int(bar.begin * cells)))
        last = max(first + 1, round(bar.end * cells))
        sign = "\N{FULL BLOCK}" if bar.over else "\N{MEDIUM SHADE}"
        line = Text(f"{bar.label:{LABEL}}")
        line.append(" " * first)
        line.append(sign * (last - first), style=BARS.get(bar.kind, ""))
        line.append(" " * (cells - last) + f"  {bar.words}")
        lines.append(line)
    return lines


def event_line(event: Values, tenants: bool = False) -> str:
    """Return an event in one line; with ``tenants``, the tenant stands before each name."""
    of = f"{event['tenant']}/" if tenants else ""
    if event["event"] == "engine":
        session = "session open" if event["session"] else "no session"
        words = (
            f"engine {event['what']}, {event['agents']} of {event['ranks']} agents, {session}, "
            f"life {event['incarnation']}"
        )
        return f"{event['at']}  ENGINE     {of}{event['engine_id']}  {words}"
    words = f"from {event['source_engine'] or '-'} to {destination_text(event)}"
    if event["bytes"]:
        words += f", {size_text(event['bytes'])} read"
    if event["transfer_s"] is not None:
        words += f" in {duration_text(event['transfer_s'])}"
    if event["reason"]:
        words += f", {event['reason']}: {event['detail']}"
    return f"{event['at']}  {event['state']:9}  {of}{event['handoff_id']}  {words}"


def show_holdings(value: Values, wide: bool = False, tenants: bool = False) -> None:
    """Print ``restow holdings``: a row for each group of an engine, then totals of each tenant."""
    if not value["engines"]:
        print("No engine reports what it holds.")
    else:
        groups = [{**holder, **group} for holder in value["engines"] for group in holder["groups"]]
        columns: Columns = {
            "engine": "engine_id",
            "group": "group",
            "held": "count",
            "of": _blocks_text,
            "quantum": "quantum_tokens",
            "hashes by": "algorithm",
        }
        _show(groups, columns, wide, tenants)
    for engine in value["engines"]:
        if engine["offers"]:
            whose = f"{engine['tenant']} " if tenants else ""
            print(
                f"{whose}{engine['engine_id']}: asked for what it holds {engine['offers']} times, "
                f"declined {engine['offers_declined']}"
            )
    for tenant in value["tenants"]:
        whose = f"tenant {tenant['tenant']}: " if tenants else ""
        forgotten = (
            f", {tenant['forgotten']} were forgotten for want of room"
            if tenant["forgotten"]
            else ""
        )
        print(
            f"{whose}{tenant['hashes']} hashes in {size_text(tenant['bytes'])} of "
            f"{size_text(tenant['limit_bytes'])}{forgotten}"
        )


def _blocks_text(group: Values) -> str:
    if group["block_tokens"] is None:
        return "snapshots"
    window = f", window {group['window_tokens']}" if group["window_tokens"] else ""
    return f"blocks of {group['block_tokens']}{window}"


def show_found(value: Values, wide: bool = False) -> None:
    """Print ``restow find``: a row for each holder, the holders with most tokens first."""
    if not value["holders"]:
        print("Nobody holds any of it.")
        return
    columns: Columns = {
        "engine": "engine_id",
        "tokens": "tokens",
        "open handoffs": "open",
        "draining": lambda holder: "yes" if holder["draining"] else "no",
        "layout": "layout_digest",
    }
    _show(value["holders"], columns, wide, ids="layout")


def show_command(value: Values, wide: bool = False) -> None:
    """Print ``restow state``: how a command stands."""
    words = f"{value['outcome']}: command {value['command_id']}"
    if value["tokens"]:
        words += f", for {value['tokens']} tokens"
    if value["left_s"]:
        words += f", pinned for {value['left_s']:.0f} s more"
    print(words + (f" ({value['reason']}: {value['detail']})" if value["reason"] else ""))


def show_costs(costs: Values, wide: bool = False) -> None:
    """Print ``restow costs``: a row for each pair of hosts, then the costs of all others."""
    columns = ["from", "to", "a read", "reads at", "a copy", "copies at"]
    columns += ["an element", "a launch", "a stage"]
    rows: list[list[Cell]] = []
    for pair in costs["hosts"]:
        hosts = [pair["source_host"], pair["destination_host"]]
        if pair["costs"] is None:
            rows.append([*hosts, pair["failure"] or "measured", *["-"] * 6])
        else:
            rows.append([*hosts, *_prices(pair["costs"])])
    others = ["all others" if costs["hosts"] else "all", "-"]
    rows.append([*others, *_prices(costs["otherwise"])])
    to = console(wide)
    put(to, listing(columns, rows, to.width))


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


def _show(
    items: Sequence[Values], columns: Columns, wide: bool, tenants: bool = False, **options: Any
) -> None:
    """Print a listing of items; with ``tenants``, a column of their tenants comes first."""
    shown: Columns = {**({"tenant": "tenant"} if tenants else {}), **columns}
    rows = [[_cell(item, column) for column in shown.values()] for item in items]
    to = console(wide)
    put(to, listing(list(shown), rows, to.width, **options))


def _say_left_out(value: Values) -> None:
    if value["left_out"]:
        print(f"... and {value['left_out']} more: raise --limit")


def _cell(item: Values, column: str | Callable[[Values], Cell]) -> Cell:
    return str(item[column]) if isinstance(column, str) else column(item)
