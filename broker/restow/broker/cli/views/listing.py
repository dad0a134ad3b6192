"""A listing is a table that fits a terminal, and of which nothing is cut anywhere else.

Columns that matter come first: a narrow terminal leaves the last ones out. Ids are shortened to
beginnings that still name one each.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from os.path import commonprefix

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

Cell = str | Text

GAP = 2
LEAST_ID = 12
"""Letters of an id that are shown at least."""
LEAST_FOLDED = 24
"""Columns of a terminal that words need before they are folded into them."""
UNCUT = 100_000
"""Columns of what is no terminal."""
NUMBERS = frozenset(
    {"tokens", "read", "age", "lease", "rank", "regions", "memory", "staging", "ms"}
)
"""Columns that stand to the right."""
COLORS = {"DONE": "green", "FAILED": "red", "EXPIRED": "yellow", "CANCELLED": "yellow"}


def colored(state: str) -> Text:
    """Return a state in its color."""
    return Text(state, style=COLORS.get(state, "cyan"))


def console(wide: bool = False) -> Console:
    """Return the console of stdout; ``wide``, or no terminal: lines are as long as they are."""
    made = Console(highlight=False, markup=False)
    if made.is_terminal and not wide:
        return made
    return Console(highlight=False, markup=False, width=UNCUT)


def put(to: Console, *shown: RenderableType) -> None:
    """Print, and have it out at once; with nothing at the ends of lines where no terminal is."""
    with to.capture() as captured:
        for one in shown:
            to.print(one, crop=False)
    lines = captured.get().removesuffix("\n").split("\n")
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in lines))
    sys.stdout.flush()


def listing(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    width: int,
    *,
    ids: str = "",
    words: str | None = None,
    spare: bool = False,
) -> RenderableType:
    """Return a table for ``width`` columns; with a last line where that left anything out.

    ``ids``: the column that may be shortened. ``words``: the last column, which may be folded;
    ``spare``: it is shown only where there is room for whole ids beside it.
    """
    texts = [[_plain(cell) for cell in row] for row in rows]
    widths = [
        max([cell_len(name), *(cell_len(row[at]) for row in texts)])
        for at, name in enumerate(columns)
    ]
    full = dict(zip(columns, widths, strict=True))
    if columns[-1] == words:
        widths[-1] = min(widths[-1], LEAST_FOLDED)
        if spare and _fitting(widths, width) < len(columns):
            columns, widths = columns[:-1], widths[:-1]
    if ids:
        at = columns.index(ids)
        widths[at] = min(widths[at], least_width([row[at] for row in texts]))
    shown = _fitting(widths, width)
    needed = sum(widths[:shown]) + GAP * (shown - 1)
    if ids:
        widths[columns.index(ids)] += max(0, width - needed)
    table = _empty(columns[:shown], words)
    if needed > width:  # then a terminal breaks lines, and nothing is lost
        table.width = needed
    for row in rows:
        table.add_row(
            *(
                _plain(cell)[: widths[at]] if ids and name == ids else cell
                for at, (name, cell) in enumerate(zip(columns[:shown], row, strict=False))
            )
        )
    note = _left_out(
        ids and full[ids] > widths[columns.index(ids)],
        [name for name in columns[shown:] if name != words],
    )
    return Group(table, Text(note, style="dim")) if note else table


def least_width(ids: Sequence[str]) -> int:
    """Return how many letters tell some ids apart, `LEAST_ID` at least.

    >>> least_width(["request-00001-a", "request-00002-b"]), least_width(["a", "b"])
    (13, 12)
    """
    shared = (len(commonprefix(two)) + 1 for two in pairwise(sorted(set(ids))))  # noqa: RUF071
    return max([LEAST_ID, *shared])


def shortened(ids: Sequence[str], width: int) -> list[str]:
    """Return beginnings of ids that have room in ``width`` columns, or as long as they must be.

    >>> shortened(["request-00001-a", "request-00002-b"], 5)
    ['request-00001', 'request-00002']
    """
    letters = max(width, least_width(ids))
    return [one[:letters] for one in ids]


def _plain(cell: Cell) -> str:
    return cell.plain if isinstance(cell, Text) else cell


def _fitting(widths: Sequence[int], width: int) -> int:
    taken = -GAP
    for count, one in enumerate(widths):
        taken += one + GAP
        if taken > width:
            return max(1, count)
    return len(widths)


def _empty(columns: Sequence[str], words: str | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in NUMBERS else "left",
            no_wrap=name != words,
            overflow="fold",
        )
    return table


def _left_out(shortened: object, columns: Sequence[str]) -> str:
    said = []
    if shortened:
        said.append("beginnings of ids are enough for every command")
    if shortened or columns:
        more = ", ".join([*(["whole ids"] if shortened else []), *columns])
        said.append(f"-o wide shows {more}")
    return "; ".join(said)
