"""Into how many contiguous pieces the state of a layer falls between two ranks' pages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from restow.broker.layout.dtype import ITEM_BYTES
from restow.broker.layout.rows import Int64s
from restow.broker.planner.costs import page_runs
from restow.broker.planner.move import Move
from restow.broker.planner.plan import Plan
from restow.broker.planner.program import Column
from restow.broker.planner.program.rows import strided
from restow.broker.planner.table import Cutter


class Per(StrEnum):
    """How often pieces are read."""

    LAYER = "layer"
    TOKEN = "token"  # noqa: S105
    PAGE = "page"
    """Tokens that follow each other on both sides, as many as a page of the smaller side has."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """``count`` pieces of ``bytes`` that a rank reads; ``names`` share one piece if several.

    ``elements``: they are single elements, because the two sides order their axes differently.
    """

    names: tuple[str, ...]
    count: int
    bytes: int
    per: Per
    elements: bool
    sources: tuple[int, ...]


class Counter:
    """Counts the pieces of moves of one plan."""

    def __init__(self, plan: Plan) -> None:
        """Prepare to cut moves as `compile_programs` cuts them."""
        self._cutter = Cutter(plan)

    def pieces(self, moves: Sequence[Move], names: dict[str, str]) -> tuple[Pieces, ...]:
        """What the moves to one rank fall into, in the order of the moves."""
        table = self._cutter.table(moves)
        members: dict[int, dict[str, None]] = defaultdict(dict)
        for move, row in zip(table.piece_move.tolist(), table.piece_row.tolist(), strict=True):
            members[row][names[moves[move].field]] = None
        rows = table.rows
        item = ITEM_BYTES[rows[:, Column.SRC_DTYPE]]
        wide = strided(rows) & (
            (rows[:, Column.SRC_STEP_BYTES] != item)
            | (rows[:, Column.DST_STEP_BYTES] != ITEM_BYTES[rows[:, Column.DST_DTYPE]])
        )
        counts = np.where(wide, rows[:, Column.COUNT], 1)
        sizes = np.where(wide, 1, rows[:, Column.COUNT]) * item
        found: dict[tuple[tuple[str, ...], int, Per, bool], list[int]] = {}
        sources: dict[object, dict[int, None]] = defaultdict(dict)
        for run in _runs(page_runs(rows, self._cutter.pairs)):
            first, size, per = run[0], int(sizes[run].sum()), Per.LAYER
            if int(rows[first, Column.SRC_TOKEN_STRIDE_BYTES]):
                per, one = self._of_tokens(rows[first], int(sizes[first]), bool(wide[first]))
                size = one * len(run)
            held = tuple(dict.fromkeys(name for index in run for name in members[index]))
            key = (held, size, per, bool(wide[first]))
            found.setdefault(key, []).append(int(counts[first]))
            sources[key][int(rows[first, Column.SRC_RANK])] = None
        order = {name: index for index, name in enumerate(dict.fromkeys(names.values()))}
        return tuple(
            Pieces(key[0], sum(found[key]), key[1], key[2], key[3], tuple(sorted(sources[key])))
            for key in sorted(found, key=lambda key: (order[key[0][0]], key[1]))
        )

    def _of_tokens(self, row: np.ndarray, size: int, wide: bool) -> tuple[Per, int]:
        steps = {
            int(row[Column.SRC_TOKEN_STRIDE_BYTES]),
            int(row[Column.DST_TOKEN_STRIDE_BYTES]),
        }
        if wide or steps != {size}:
            return Per.TOKEN, size
        pair = self._cutter.pairs[int(row[Column.GROUP_PAIR])]
        return Per.PAGE, size * min(pair.src.page_tokens, pair.dst.page_tokens)


def _runs(numbers: Int64s) -> list[list[int]]:
    """The rows of each run, in the order of their first ones."""
    found: dict[int, list[int]] = {}
    for index, number in enumerate(numbers.tolist()):
        found.setdefault(number, []).append(index)
    return list(found.values())
