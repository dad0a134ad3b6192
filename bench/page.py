"""Write the tables of docs/benchmarks.md anew from the files in bench/results.

    PYTHONPATH=.:tests python -m bench.page

Each table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``; the words around it are written
by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.report import amount

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs" / "benchmarks.md", ROOT / "bench" / "results"
Row = dict[str, Any]
Rows = Sequence[Row]
CLIENTS = re.compile(r"(?P<case>.* clients): to the (?P<token>first|second) token, (?P<way>.*)")
CONTIGUOUS, BY_NIXL = "contiguous READ", "by NIXL"
PACK = ": pack"
WITHIN = 1 / 1.10


def plain(rows: Rows) -> list[str]:
    """Make a line for each row: the case, both medians, their ratio, the goal and the note."""
    goals = any(row["goal"] is not None for row in rows)
    notes = any(row["note"] for row in rows)
    lines = _head("case", "median", "reference", "median", "ratio", "goal" * goals, "note" * notes)
    for row in rows:
        cells = [
            *(row["case"], amount(row["value"], row["unit"])),
            *(row["reference"], amount(row["reference_value"], row["unit"])),
            f"{row['ratio']:.2f}",
            *([_goal(row)] * goals),
            *([row["note"]] * notes),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def handoff(rows: Rows) -> list[str]:
    """Make a line for each case, with all three references."""
    columns = ("case", "MB", "ms", "contiguous READ, ms", "ratio", "goal", "NIXL alone, ms")
    lines = _head(*columns, "of memcpy")
    for case, by_reference in _by_case(rows).items():
        read, copy = by_reference[CONTIGUOUS], by_reference["memcpy, one thread"]
        lines.append(
            f"| {case} | {read['bytes'] / 1e6:.0f} | {read['value'] * 1e3:.1f} "
            f"| {_ms(read)} | {read['ratio']:.2f} | {_goal(read)} "
            f"| {_ms(by_reference.get('NIXL alone'))} | {copy['ratio']:.2f} |"
        )
    return lines


def strategies(rows: Rows) -> list[str]:
    """Make a line for each case: the milliseconds of `auto` and of every forced strategy."""
    cases = _by_case(rows)
    ways = list(dict.fromkeys(way for by_way in cases.values() for way in by_way))
    forced = [way for way in ways if way not in (CONTIGUOUS, BY_NIXL)]
    columns = ("MB", "samples", "auto by", "auto, ms", *ways, "best of the others", "of READ")
    lines = _head("case", *columns)
    for case, by_way in cases.items():
        own = next(iter(by_way.values()))
        best = min(row["ratio"] for way, row in by_way.items() if way in forced)
        lines.append(
            f"| {case} | {own['bytes'] / 1e6:.0f} | {own['samples']} | {own['note']} "
            f"| {own['value'] * 1e3:.1f} | {' | '.join(_ms(by_way.get(way)) for way in ways)} "
            f"| {best:.2f} | {by_way[CONTIGUOUS]['ratio']:.2f} |"
        )
    return lines


def forced_strategies(rows: Rows) -> list[str]:
    """Make a line for each case: the milliseconds of every forced strategy."""
    cases = _by_case(rows)
    ways = list(dict.fromkeys(way for by_way in cases.values() for way in by_way))
    lines = _head("case", "MB", *(f"{way}, ms" for way in ways))
    for case, by_way in cases.items():
        size = next(iter(by_way.values()))["bytes"] / 1e6
        times = (_ms(by_way.get(way)) for way in ways)
        lines.append(f"| {case} | {size:.0f} | {' | '.join(times)} |")
    return lines


def without_clients(rows: Rows) -> list[str]:
    """Make a line for each row of vLLM that is not about several clients."""
    return plain([row for row in rows if not CLIENTS.match(row["case"])])


def clients(rows: Rows) -> list[str]:
    """Make a line for each pair of engines and number of clients, with the times to two tokens."""
    by_case: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if named := CLIENTS.match(row["case"]):
            times = by_case.setdefault(named["case"], {}).setdefault(named["token"], {})
            times |= {named["way"]: row["value"], row["reference"]: row["reference_value"]}
    references = {row["reference"] for row in rows}
    every = dict.fromkeys(way for tokens in by_case.values() for way in tokens["first"])
    ways = sorted(every, key=lambda way: way in references)
    lines = _head("to the first / second token, ms", *ways)
    for case, tokens in by_case.items():
        cells = (
            f"{tokens['first'][way] * 1e3:.3g} / {tokens['second'][way] * 1e3:.3g}" for way in ways
        )
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return lines


def _by_case(rows: Rows) -> dict[str, dict[str, Row]]:
    """Return rows by case and reference, without those of `pack` alone."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        if not row["case"].endswith(PACK):
            cases.setdefault(row["case"], {})[row["reference"]] = row
    return cases


def _head(*columns: str) -> list[str]:
    named = [column for column in columns if column]
    return [f"| {' | '.join(named)} |", "|---" * len(named) + "|"]


def _goal(row: Row) -> str:
    return "" if row["goal"] is None else f"{row['goal']:.2f}"


def _ms(row: Row | None) -> str:
    return "" if row is None else f"{row['reference_value'] * 1e3:.1f}"


@dataclass(frozen=True)
class Goal:
    """A ratio that every case is to reach; without ``wanted`` it is only shown."""

    words: str
    wanted: float | None
    ratios: Callable[[Rows], list[float]]

    def cell(self, rows: Rows) -> str:
        """Show the least and the greatest ratio of a machine, and how many reach the goal."""
        ratios = self.ratios(rows)
        if not ratios:
            return ""
        text = f"{min(ratios):.2f}"
        if len(ratios) > 1:
            text += f" to {max(ratios):.2f}"
        if self.wanted is None:
            return text
        reached = sum(ratio >= self.wanted for ratio in ratios)
        return f"{text}, {reached} of {len(ratios)}"


def goals() -> Iterator[Goal]:
    """Yield the goals of strategies and planning, in the order of their table."""
    for equal, page_tokens, wanted in (
        (True, 16, 0.90),
        (True, 64, 0.90),
        (False, 16, 0.50),
        (False, 64, 0.75),
    ):
        words = "equal layouts" if equal else "TP differs, SD to DS"
        words = f"{words}, pages of {page_tokens}: of a contiguous READ"
        ratios = partial(_of_contiguous, equal=equal, page_tokens=page_tokens)
        yield Goal(words, wanted, partial(ratios, nixl=False))
        yield Goal(f"{words}, agents leave all reads to NIXL", None, partial(ratios, nixl=True))
    yield Goal("`auto` of the best forced strategy, models and pieces", WITHIN, _of_the_best)
    for size_bytes, wanted in ((256, 6.0), (1024, 2.5)):
        words = f"`pack` of `slices` at {size_bytes} bytes"
        for transport, counts in (
            ("shared memory by NIXL", wanted),
            ("TCP", None),
            ("shared memory", None),
        ):
            name = f"pieces of {size_bytes} bytes, {transport}"
            yield Goal(f"{words}, {transport}", counts, partial(_of_slices, name=name))
    yield Goal("planning and binding, of their budgets", 1.0, _of_budgets)


def goals_by_machine(machines: Mapping[str, Rows]) -> list[str]:
    """Make a line for each goal, with a column for each machine."""
    lines = _head("what", "wanted", *machines)
    for goal in goals():
        wanted = "" if goal.wanted is None else f"{goal.wanted:.2f}"
        cells = (goal.cell(rows) for rows in machines.values())
        lines.append(f"| {' | '.join((goal.words, wanted, *cells))} |")
    return lines


def _of_contiguous(rows: Rows, equal: bool, page_tokens: int, nixl: bool) -> list[float]:
    by = {
        (row["case"], row["reference"]): row
        for row in rows
        if row["suite"] == "models"
        and ("P1 to D1" in row["case"]) == equal
        and f"of {page_tokens}," in row["case"]
    }
    runs = {case: row for (case, reference), row in by.items() if reference == CONTIGUOUS}
    if not nixl:
        return [run["ratio"] for run in runs.values()]
    return [
        run["reference_value"] / by[case, BY_NIXL]["reference_value"]
        for case, run in runs.items()
        if (case, BY_NIXL) in by
    ]


def _of_the_best(rows: Rows) -> list[float]:
    best: dict[str, float] = {}
    for row in rows:
        forced = row["suite"] in ("models", "pieces") and not row["case"].endswith(PACK)
        if forced and row["reference"] not in (CONTIGUOUS, BY_NIXL):
            best[row["case"]] = min(best.get(row["case"], row["ratio"]), row["ratio"])
    return list(best.values())


def _of_slices(rows: Rows, name: str) -> list[float]:
    by = {row["reference"]: row["reference_value"] for row in rows if row["case"] == name}
    return [by["slices"] / by["pack"]] if by else []


def _of_budgets(rows: Rows) -> list[float]:
    return [row["ratio"] for row in rows if row["suite"] == "planning" and row["goal"] is not None]


Table = Callable[[Rows], list[str]]
SPECIAL: dict[str, dict[str, Table]] = {
    "handoff": {"handoff": handoff},
    "gpu-strategies": {"gpu-strategies": forced_strategies},
    "vllm-handover": {"vllm-handover": without_clients, "vllm-clients": clients},
}
"""Tables other than `plain`, by file and by the table's name."""
STRATEGIES: dict[str, Table] = {"pieces": strategies, "models": strategies, "planning": plain}
"""Tables of strategies.json, each of the rows of one suite."""
MACHINES = ("strategies", "strategies-epyc")
"""Files of the same suites from several machines: the first has all tables, all have the goals."""


def fresh(page: str) -> str:
    """Return the page with the machine, the date and the tables that the results hold."""
    files = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    del files["peers"]  # its page is docs/peers.md
    machines = {_machine(files[name]): files[name]["rows"] for name in MACHINES}
    page = _put(page, "goals", goals_by_machine(machines))
    for name in MACHINES[1:]:
        del files[name]
    for name, measured in files.items():
        rows = measured["rows"]
        about = f"Measured on {measured['date']}, {measured['machine']}."
        page = _put(page, f"machine of {name}", [about])
        if name == MACHINES[0]:
            for suite, table in STRATEGIES.items():
                page = _put(page, suite, table([row for row in rows if row["suite"] == suite]))
            continue
        for table_name, made in SPECIAL.get(name, {name: plain}).items():
            page = _put(page, table_name, made(rows))
    return page


def _machine(measured: dict[str, Any]) -> str:
    """Return the processors and the date."""
    return f"{measured['machine'].split(',')[0]}, {measured['date']}"


def _put(page: str, name: str, lines: list[str]) -> str:
    """Return the page with one table in its place."""
    text = "\n".join(lines)
    page, count = re.subn(
        rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
        lambda match: f"{match[1]}{text}\n{match[2]}",
        page,
        flags=re.DOTALL,
    )
    if count != 1:
        raise ValueError(f"{PAGE.name} has {count} places for {name}, not one")
    return page


if __name__ == "__main__":
    PAGE.write_text(fresh(PAGE.read_text()))
