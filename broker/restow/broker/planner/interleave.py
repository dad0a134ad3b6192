"""A state in chunk-interleaved order, in which what a reader takes of a source is one run.

The source groups the columns of a state by destination rank, and writes each rank's *chunk* in the
order of the fields' axes, the last one innermost: a conv window ``[tap][channel]`` becomes channel
after channel, each with its taps, ``x0 x0' x0'' x1 ... B0 B0' B0'' ... C0 ...``. The order says
nothing of either side's layout; the destination applies the inverse of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.move import Move, Place
from restow.broker.planner.program import Column
from restow.broker.planner.table import ITEM_BYTES, Cutter, Table

CHUNK_ALIGN_BYTES = 16
"""Every field of a chunk begins at a multiple of this, and every chunk ends at one."""

INTERLEAVED_TO = (Column.DST_OFFSET_BYTES, Column.DST_STEP_BYTES, Column.DST_DTYPE)
RESTORED_FROM = (Column.SRC_OFFSET_BYTES, Column.SRC_STEP_BYTES, Column.SRC_DTYPE)
"""Where rows say what lies in a chunk."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of one destination rank, one a source rank.

    ``interleaved`` rows go from a source's pages to its chunk, ``restored`` rows from there to the
    destination's pages; the chunk's side counts from the chunk's beginning.
    """

    interleaved: Int64s
    restored: Int64s

    @classmethod
    def of(cls, moves: Sequence[Move], cutter: Cutter) -> Chunks:
        """Through chunks with all of these moves, which are of snapshots."""
        return cls(*cutter.through(moves, chunk_places(moves)))


def chunk_places(moves: Sequence[Move]) -> list[Place]:
    """Where the box of each move lies in the chunk of its source rank; the narrower type travels.

    >>> from restow.broker.layout import Span
    >>> src = Place("r", 0, (2, 8), None, DType.BFLOAT16)
    >>> box = (Span(0, 4), Span(0, 3))
    >>> [place] = chunk_places([Move("layers.0.conv.x", 0, 0, box, src, src)])
    >>> place.offset_bytes, place.strides_bytes
    (0, (6, 2))
    """
    ends: Counter[int] = Counter()
    places = []
    for move in moves:
        src, dst = move.src.dtype, move.dst.dtype
        dtype = dst if dst.itemsize_bytes <= src.itemsize_bytes else src
        size_bytes, strides = dtype.itemsize_bytes, []
        for span in reversed(move.box):
            strides.append(size_bytes)
            size_bytes *= span.size
        places.append(Place("chunk", ends[move.src_rank], tuple(strides[::-1]), None, dtype))
        ends[move.src_rank] += aligned(size_bytes)
    return places


def chunk_bytes(rows: Int64s, side: tuple[Column, Column, Column] = RESTORED_FROM) -> int:
    """Length of the chunk that ``rows`` of one source rank touch on the given side."""
    if not len(rows):
        return 0
    offset, step, dtype = (rows[:, column] for column in side)
    ends = offset + (rows[:, Column.COUNT] - 1) * step + ITEM_BYTES[dtype]
    return aligned(int(ends.max()))


def whole_moves(table: Table, rows: Bools) -> Bools:
    """Mask of the moves that travel in ``rows`` alone, and share none of them with other moves."""
    while True:
        moves = np.ones(int(table.piece_move.max(initial=-1)) + 1, np.bool_)
        moves[table.piece_move[~rows[table.piece_row]]] = False
        fewer = rows.copy()
        fewer[table.piece_row[~moves[table.piece_move]]] = False
        if (fewer == rows).all():
            return moves
        rows = fewer


def aligned(length_bytes: int) -> int:
    """The next multiple of `CHUNK_ALIGN_BYTES`."""
    return -(-length_bytes // CHUNK_ALIGN_BYTES) * CHUNK_ALIGN_BYTES
