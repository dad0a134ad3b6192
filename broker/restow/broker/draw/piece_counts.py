"""Into how many contiguous pieces the state of a layer falls between two ranks' pages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from restow.broker.layout.values import ITEM_BYTES
from restow.broker.planner.costs import page_runs
from restow.broker.planner.plan import Move
from restow.broker.planner.program import Column
from restow.broker.planner.program.programs import strided
from restow.broker.planner.table import Cutter


class Per(StrEnum):
    """How often pieces are read."""

    LAYER = "layer"
    TOKEN = "token"  # noqa: S105
    PAGE = "page"
    """Tokens that follow each other on both sides, as many as a page of the smaller side has."""


@dataclass(frozen=True, slots=True)
class PieceCount:
    """``count`` pieces of ``bytes`` that a rank reads; ``names`` share one piece if several.

    ``elements``: they are single elements, because the two sides order their axes differently.
    """

    names: tuple[str, ...]
    count: int
    bytes: int
    per: Per
    elements: bool
    sources: tuple[int, ...]


def count_pieces(
    cutter: Cutter, moves: Sequence[Move], names: dict[str, str]
) -> tuple[PieceCount, ...]:
    """What the moves to one rank fall into, in the order of the moves."""
    table = cutter.table(moves)
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
    runs: dict[int, list[int]] = defaultdict(list)
    for index, number in enumerate(page_runs(rows, cutter.pairs).tolist()):
        runs[number].append(index)
    found: Counter[tuple[tuple[str, ...], int, Per, bool]] = Counter()
    sources: dict[object, set[int]] = defaultdict(set)
    for run in runs.values():
        first, size, per = rows[run[0]], int(sizes[run].sum()), Per.LAYER
        elements = bool(wide[run[0]])
        if token_step := int(first[Column.SRC_TOKEN_STRIDE_BYTES]):
            one, per = int(sizes[run[0]]), Per.TOKEN
            if not elements and token_step == int(first[Column.DST_TOKEN_STRIDE_BYTES]) == one:
                pair = cutter.pairs[int(first[Column.GROUP_PAIR])]
                # Where ranks share tokens out in another way, tokens do not follow each other.
                if pair.alike:
                    per, one = Per.PAGE, one * min(pair.src.page_tokens, pair.dst.page_tokens)
            size = one * len(run)
        key = (
            tuple(dict.fromkeys(name for row in run for name in members[row])),
            size,
            per,
            elements,
        )
        found[key] += int(counts[run[0]])
        sources[key].add(int(first[Column.SRC_RANK]))
    order = {name: index for index, name in enumerate(dict.fromkeys(names.values()))}
    return tuple(
        PieceCount(key[0], found[key], *key[1:], tuple(sorted(sources[key])))
        for key in sorted(found, key=lambda key: (order[key[0][0]], key[1]))
    )
