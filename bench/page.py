"""Writes the tables of docs/benchmarks.md anew from the JSON files beside it.

    python bench/page.py

Each table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``; the words around them are
written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from goals import BY_NIXL, CONTIGUOUS, table

DOCS = Path(__file__).parent.parent / "docs"
Rows = list[dict[str, Any]]
ALONE = "NIXL alone"
CLIENTS = re.compile(r"(?P<case>.* clients): to the (?P<token>first|second) token, (?P<way>.*)")


def data(rows: Rows) -> list[str]:
    """A line a case: ours, the contiguous READ, NIXL alone (not where a source gathers), memcpy."""
    cases = _by_case(rows, "data")
    columns = ("case", "MB", "ms", "contiguous READ, ms", "ratio", "goal", "NIXL alone, ms")
    lines = _head(*columns, "of memcpy")
    for case, by_reference in cases.items():
        read, copy = by_reference["contiguous READ"], by_reference["memcpy, one thread"]
        lines.append(
            f"| {case} | {read['bytes'] / 1e6:.0f} | {read['seconds'] * 1e3:.1f} "
            f"| {read['reference_seconds'] * 1e3:.1f} | {read['ratio']:.2f} | {_goal(read)} "
            f"| {_ms(by_reference.get(ALONE))} | {copy['ratio']:.2f} |"
        )
    return lines


def pieces(rows: Rows) -> list[str]:
    """A line a size and transport: milliseconds of every way, and of a contiguous READ."""
    return _ways("pieces", "pieces", rows)


def models(rows: Rows) -> list[str]:
    """A line a geometry, TP sizes and pages."""
    return _ways("models", "model", rows)


def gpu(rows: Rows) -> list[str]:
    """A line a case: milliseconds of every way that was forced, and of a contiguous READ."""
    cases = _by_case(rows, "gpu")
    ways = list(dict.fromkeys(way for found in cases.values() for way in found))
    lines = _head("between two processes on one GPU", "MB", *(f"{way}, ms" for way in ways))
    for case, found in cases.items():
        size = next(iter(found.values()))["bytes"] / 1e6
        times = (f"{_ms(found.get(way))}" for way in ways)
        lines.append(f"| {case} | {size:.0f} | {' | '.join(times)} |")
    return lines


def kernels(rows: Rows) -> list[str]:
    """A line a case of the Triton kernels."""
    lines = _head("case", "MB", "ms", "GB/s", "of the device's copy", "of torch", "fresh table, ms")
    for row in rows:
        if "tiles" in row:
            torch = f"{row['ratio_to_torch']:.2f}" if "ratio_to_torch" in row else ""
            lines.append(
                f"| {row['case']} | {row['bytes'] / 1e6:.0f} | {row['seconds'] * 1e3:.3f} "
                f"| {row['bytes'] / row['seconds'] / 1e9:.0f} | {row['ratio']:.2f} | {torch} "
                f"| {row['with_a_fresh_table_seconds'] * 1e3:.1f} |"
            )
    return lines


def _ways(suite: str, what: str, rows: Rows) -> list[str]:
    cases = _by_case(rows, suite)
    ways = list(dict.fromkeys(way for found in cases.values() for way in found))
    forced = [way for way in ways if way not in (CONTIGUOUS, BY_NIXL)]
    columns = ("MB", "samples", "auto by", "auto, ms", *ways, "best of the others", "of READ")
    lines = _head(what, *columns)
    for case, found in cases.items():
        own = next(iter(found.values()))
        times = [
            f"{found[way]['reference_seconds'] * 1e3:.1f}" if way in found else "" for way in ways
        ]
        best = min(row["ratio"] for way, row in found.items() if way in forced)
        lines.append(
            f"| {case} | {own['bytes'] / 1e6:.0f} | {own['samples']} | {own['note']} "
            f"| {own['seconds'] * 1e3:.1f} | {' | '.join(times)} | {best:.2f} "
            f"| {found[CONTIGUOUS]['ratio']:.2f} |"
        )
    return lines


def _ms(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['reference_seconds'] * 1e3:.1f}"


def control(rows: Rows) -> list[str]:
    """A line a reference."""
    lines = _head("case", "us", "reference", "us", "ratio", "goal")
    for row in rows:
        if row["suite"] == "control":
            lines.append(
                f"| {row['case']} ({row['note']}) | {row['seconds'] * 1e6:.0f} "
                f"| {row['reference']} | {row['reference_seconds'] * 1e6:.0f} "
                f"| {row['ratio']:.2f} | {_goal(row)} |"
            )
    return lines


def engines(rows: Rows) -> list[str]:
    """A line a case of a real vLLM."""
    return _compared([row for row in rows if not CLIENTS.match(row["case"])], "replies")


def clients(rows: Rows) -> list[str]:
    """A line a pair of engines and number of clients: each way's milliseconds to two tokens."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if named := CLIENTS.match(row["case"]):
            times = found.setdefault(named["case"], {}).setdefault(named["token"], {})
            times |= {named["way"]: row["seconds"], row["reference"]: row["reference_seconds"]}
    references = {row["reference"] for row in rows}
    every = dict.fromkeys(way for one in found.values() for way in one["first"])
    ways = sorted(every, key=lambda way: way in references)
    lines = _head("to the first / second token, ms", *ways)
    for case, tokens in found.items():
        both = (f"{_three(tokens['first'][one])} / {_three(tokens['second'][one])}" for one in ways)
        lines.append(f"| {case} | {' | '.join(both)} |")
    return lines


def early(rows: Rows) -> list[str]:
    """A line a pair of engines, and what is measured of it."""
    return _compared(rows, "of it")


def parts(rows: Rows) -> list[str]:
    """A line a part of a handoff."""
    lines = _head("agents", "part", "ms", "reference", "ms", "times as long")
    for row in rows:
        agents, part = row["case"].split(": ", 1)
        note = f" ({row['note']})" if row["note"] else ""
        ours, theirs = (f"{row[one] * 1e3:.2f}" for one in ("seconds", "reference_seconds"))
        lines.append(
            f"| {agents} | {part} | {ours} | {row['reference']}{note} | {theirs} "
            f"| {1 / row['ratio']:.1f} |"
        )
    return lines


def turns(rows: Rows) -> list[str]:
    """A line a model, a place of its state, and a reference."""
    return _compared(rows, "tokens of the prompt that were not computed")


def beside(rows: Rows) -> list[str]:
    """A line a reference, with what was going on."""
    return _compared(rows, "beside")


def _compared(rows: Rows, note: str) -> list[str]:
    lines = _head("case", "ms", "reference", "ms", "ratio", "goal", note)
    for row in rows:
        lines.append(
            f"| {row['case']} | {_three(row['seconds'])} | {row['reference']} "
            f"| {_three(row['reference_seconds'])} | {row['ratio']:.2f} | {_goal(row)} "
            f"| {row['note']} |"
        )
    return lines


def _three(seconds: float) -> str:
    """Milliseconds to three digits."""
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def returns(rows: Rows) -> list[str]:
    """A line for each thing that is to be back."""
    lines = _head("what", "s", "budget, s", "ratio", "beside")
    for row in rows:
        lines.append(
            f"| {row['case']} | {row['seconds']:.2f} | {row['reference_seconds']:g} "
            f"| {row['ratio']:.2f} | {row['note']} |"
        )
    return lines


def outages(rows: Rows) -> list[str]:
    """A line a trouble: how handoffs ended."""
    lines = _head("what", "s", "beside", "s", "ends")
    for row in rows:
        lines.append(
            f"| {row['case']} | {row['seconds']:.2f} | {row['reference']} "
            f"| {row['reference_seconds']:.2f} | {row['note']} |"
        )
    return lines


def failover(rows: Rows) -> list[str]:
    """A line a trouble, and what is measured of it."""
    return _compared(rows, "of it")


def first(rows: Rows) -> list[str]:
    """A line a pair of engines."""
    lines = _head("the first handoff", "ms", "a later one, ms", "of it")
    for row in rows:
        lines.append(
            f"| {row['case'].removeprefix('the first handoff, ')} | {row['seconds'] * 1e3:.0f} "
            f"| {row['reference_seconds'] * 1e3:.0f} | {row['note']} |"
        )
    return lines


def digests(rows: Rows) -> list[str]:
    """A line a case: all handoffs checked, and none."""
    lines = _head("case", "MB", "all checked, ms", "none, ms", "ratio")
    for row in rows:
        lines.append(
            f"| {row['case']} | {row['bytes'] / 1e6:.0f} | {row['seconds'] * 1e3:.1f} "
            f"| {row['reference_seconds'] * 1e3:.1f} | {row['ratio']:.2f} |"
        )
    return lines


def prefixes(rows: Rows) -> list[str]:
    """A line a case and reference."""
    lines = _head("case", "", "reference", "", "ratio", "goal")
    for row in rows:
        note = f" ({row['note']})" if row["note"] else ""
        cells = (_us_or_gb(row["case"], row[one]) for one in ("seconds", "reference_seconds"))
        ours, theirs = cells
        lines.append(
            f"| {row['case']}{note} | {ours} | {row['reference']} | {theirs} "
            f"| {row['ratio']:.2f} | {_goal(row)} |"
        )
    return lines


def offers(rows: Rows) -> list[str]:
    """A line a case."""
    lines = _head("case", "ms", "reference", "ms", "ratio", "goal")
    for row in rows:
        ours, theirs = (f"{row[one] * 1e3:.2f}" for one in ("seconds", "reference_seconds"))
        lines.append(
            f"| {row['case']} | {ours} | {row['reference']} | {theirs} "
            f"| {row['ratio']:.2f} | {_goal(row)} |"
        )
    return lines


def kept(rows: Rows) -> list[str]:
    """A line a case and reference."""
    return offers(rows)


def sessions(rows: Rows) -> list[str]:
    """A line a case and what was counted."""
    lines = _head("case", "with Find, and without", "ratio")
    for row in rows:
        ours, theirs = (row[one] * 1e3 for one in ("seconds", "reference_seconds"))
        words = row["note"] or f"{ours:.1f} ms, without Find {theirs:.1f} ms"
        lines.append(f"| {row['case']} | {words} | {row['ratio']:.2f} |")
    return lines


def _us_or_gb(case: str, value: float) -> str:
    return f"{value:.2f} GB" if case.startswith("memory") else f"{value * 1e6:.0f} us"


def planning(rows: Rows) -> list[str]:
    """A line a geometry and a step."""
    lines = _head("case", "ms", "budget, ms")
    for row in rows:
        if row["suite"] == "planning":
            note = f" ({row['note']})" if row["note"] else ""
            lines.append(
                f"| {row['case']}{note} | {row['seconds'] * 1e3:.2f} "
                f"| {row['reference_seconds'] * 1e3:.0f} |"
            )
    return lines


def _by_case(rows: Rows, suite: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The rows of a suite by case and reference; those of `pack` alone are no case."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["suite"] == suite and not row["case"].endswith(": pack"):
            cases.setdefault(row["case"], {})[row["reference"]] = row
    return cases


def _head(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _goal(row: dict[str, Any]) -> str:
    return "" if row["goal"] is None else f"{row['goal']:.2f}"


TABLES: dict[str, tuple[Callable[[Rows], list[str]], ...]] = {
    "benchmarks.json": (data,),
    "control.json": (control,),
    "ways.json": (pieces, models, planning),
    "vllm.json": (engines, clients),
    "early.json": (early,),
    "parts.json": (parts,),
    "turns.json": (turns,),
    "returns.json": (returns,),
    "outages.json": (outages,),
    "failover.json": (failover,),
    "beside.json": (beside,),
    "first.json": (first,),
    "digests.json": (digests,),
    "prefixes.json": (prefixes,),
    "offers.json": (offers,),
    "kept.json": (kept,),
    "kernels.json": (kernels,),
    "gpu.json": (gpu,),
    "sessions.json": (sessions,),
}
"""Which table is made from which file: suites that take long are not always measured together."""


GOALS = ("ways.json", "ways-epyc.json")
"""What was measured on several machines: of all there are the goals, of the first one all rows."""


def main() -> None:
    """Rewrite the page."""
    page = DOCS / "benchmarks.md"
    page.write_text(fresh(page.read_text()))


def fresh(page: str) -> str:
    """The page with all its tables as the files have them."""
    files = {file: json.loads((DOCS / file).read_text()) for file in {*TABLES, *GOALS}}
    for file, tables in TABLES.items():
        measured = files[file]
        about = f"Measured on {measured['date']}, {measured['machine']}."
        page = _put(page, f"machine of {file}", [about])
        for made in tables:
            page = _put(page, made.__name__, made(measured["rows"]))
    return _put(page, "goals", table([(_name(files[one]), files[one]["rows"]) for one in GOALS]))


def _name(measured: dict[str, Any]) -> str:
    """The processors and the day."""
    return f"{measured['machine'].split(',')[0]}, {measured['date']}"


def _put(page: str, name: str, lines: list[str]) -> str:
    """The page with one table in its place."""
    text = "\n".join(lines)
    page, found = re.subn(
        rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
        lambda match: f"{match[1]}{text}\n{match[2]}",
        page,
        flags=re.DOTALL,
    )
    if found != 1:
        raise ValueError(f"docs/benchmarks.md has {found} places for {name}, not one")
    return page


if __name__ == "__main__":
    main()
