"""Print tables that fit a terminal, and that are whole where there is no terminal.

A narrow terminal leaves the last columns out, so columns that matter come first. Ids are shortened
to beginnings that still tell them apart.
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
"""Least number of letters of an id."""
LEAST_FOLDED = 24
"""Least width of a column of words, which is folded then."""
UNCUT = 100_000
"""Width where there is no terminal."""
NUMBERS = frozenset(
    {"tokens", "read", "age", "lease", "rank", "regions", "memory", "staging", "ms"}
)
"""Columns that are aligned to the right."""
COLORS = {"DONE": "green", "FAILED": "red", "EXPIRED": "yellow", "CANCELLED": "yellow"}


def colored(state: str) -> Text:
    """Return a state in its color."""
    return Text(state, style=COLORS.get(state, "cyan"))


def console(wide: bool = False) -> Console:
    """Return the console of stdout, with unlimited lines if ``wide`` or without a terminal."""
    made = Console(highlight=False, markup=False)
    if made.is_terminal and not wide:
        return made
    return Console(highlight=False, markup=False, width=UNCUT)


def put(to: Console, *shown: RenderableType) -> None:
    """Print and flush, without spaces at the ends of lines."""
    with to.capture() as captured:
        for renderable in shown:
            to.print(renderable, crop=False)
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
    """Return a table for ``width`` columns, with a last line that names what was left out.

    ``ids`` is a column that may be shortened, and ``words`` a last column that may be folded. With
    ``spare``, the column of words is shown only if whole ids have room beside it.
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
    if needed > width:  # the terminal breaks lines, so nothing is lost
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
    """Return how many letters tell ids apart, `LEAST_ID` at least.

    >>> least_width(["request-00001-a", "request-00002-b"]), least_width(["a", "b"])
    (13, 12)
    """
    shared = (len(commonprefix(pair)) + 1 for pair in pairwise(sorted(set(ids))))  # noqa: RUF071
    return max([LEAST_ID, *shared])


def shortened(ids: Sequence[str], width: int) -> list[str]:
    """Return beginnings of ids that fit ``width`` columns, or longer beginnings to tell them apart.

    >>> shortened(["request-00001-a", "request-00002-b"], 5)
    ['request-00001', 'request-00002']
    """
    letters = max(width, least_width(ids))
    return [text[:letters] for text in ids]


def _plain(cell: Cell) -> str:
    return cell.plain if isinstance(cell, Text) else cell


def _fitting(widths: Sequence[int], width: int) -> int:
    taken = -GAP
    for count, column_width in enumerate(widths):
        taken += column_width + GAP
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
    notes = []
    if shortened:
        notes.append("beginnings of ids are enough for every command")
    if shortened or columns:
        more = ", ".join([*(["whole ids"] if shortened else []), *columns])
        notes.append(f"-o wide shows {more}")
    return "; ".join(notes)
