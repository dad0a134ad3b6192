"""What was to be reached, beside what was, machine by machine: the first table of "Which way"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

CONTIGUOUS, BY_NIXL = "contiguous READ", "by NIXL"
WITHIN = 1 / 1.10
PACK = ": pack"

Row = dict[str, Any]
Ratios = Callable[[Sequence[Row]], list[float]]


@dataclass(frozen=True)
class Goal:
    """A ratio that every case is to reach; None: it is shown beside one that is."""

    words: str
    wanted: float | None
    ratios: Ratios

    def cell(self, rows: Sequence[Row]) -> str:
        """From the least to the greatest ratio of a machine's rows, and how many reach the goal."""
        found = self.ratios(rows)
        if not found:
            return ""
        text = f"{min(found):.2f}"
        if len(found) > 1:
            text += f" to {max(found):.2f}"
        if self.wanted is None:
            return text
        reached = sum(ratio >= self.wanted for ratio in found)
        return f"{text}, {reached} of {len(found)}"


def goals() -> Iterator[Goal]:
    """All, in the order of the table."""
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
        yield Goal(f"{words}, where agents leave all to NIXL", None, partial(ratios, nixl=True))
    yield Goal("`auto` of the best forced way, models and pieces", WITHIN, _of_the_best)
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


def table(machines: Sequence[tuple[str, Sequence[Row]]]) -> list[str]:
    """Lines of Markdown; each machine by its name and rows."""
    columns = ("what", "wanted", *(name for name, _ in machines))
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for goal in goals():
        wanted = "" if goal.wanted is None else f"{goal.wanted:.2f}"
        cells = (goal.cell(rows) for _, rows in machines)
        lines.append(f"| {' | '.join((goal.words, wanted, *cells))} |")
    return lines


def _of_contiguous(rows: Sequence[Row], equal: bool, page_tokens: int, nixl: bool) -> list[float]:
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
        run["reference_seconds"] / by[case, BY_NIXL]["reference_seconds"]
        for case, run in runs.items()
        if (case, BY_NIXL) in by
    ]


def _of_the_best(rows: Sequence[Row]) -> list[float]:
    best: dict[str, float] = {}
    for row in rows:
        forced = row["suite"] in ("models", "pieces") and not row["case"].endswith(PACK)
        if forced and row["reference"] not in (CONTIGUOUS, BY_NIXL):
            best[row["case"]] = min(best.get(row["case"], row["ratio"]), row["ratio"])
    return list(best.values())


def _of_slices(rows: Sequence[Row], name: str) -> list[float]:
    by = {row["reference"]: row["reference_seconds"] for row in rows if row["case"] == name}
    return [by["slices"] / by["pack"]] if by else []


def _of_budgets(rows: Sequence[Row]) -> list[float]:
    return [row["ratio"] for row in rows if row["suite"] == "planning" and row["goal"] is not None]
