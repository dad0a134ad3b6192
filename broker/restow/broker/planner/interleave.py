"""Interleave: send a state in an order in which each reader's part of a source is a single run.

The source groups the columns of a state by destination rank and writes each rank's *chunk* in the
order of the fields' axes, with the last axis innermost. A conv window ``[tap][channel]`` becomes
channel after channel, each with its taps: ``x0 x0' x0'' x1 ... B0 B0' B0'' ... C0 ...``. This order
depends on neither layout; the destination applies the inverse of its own order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from restow.broker.errors import StrategyRefusedError
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.costs import CostModel, PricedRows
from restow.broker.planner.plan import Move, Place
from restow.broker.planner.program import (
    GATHER_PLACED,
    SCATTER_PLACED,
    Column,
    GroupPair,
    Step,
    aligned,
)
from restow.broker.planner.table import Cutter, Table
from restow.broker.planner.way import Sent, Way, Work, src_ranks
from restow.broker.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of a destination rank, one per source rank.

    ``interleaved`` rows copy from a source's pages to its chunk, ``restored`` rows from there to
    the destination's pages. Offsets on the chunk's side count from the beginning of the chunk.
    """

    interleaved: Int64s
    restored: Int64s

    @classmethod
    def of(cls, moves: Sequence[Move], cutter: Cutter) -> Chunks:
        """Return the rows through chunks for ``moves``, which are all of snapshots."""
        return cls(*cutter.through(moves, chunk_places(moves)))

    strategy: ClassVar[Strategy] = Strategy.INTERLEAVE

    def steps(self, first_span: int) -> Sequence[Step]:
        """Return a step that writes the chunk, and a step that applies the inverse order."""
        return Step(GATHER_PLACED, self.interleaved), Step(SCATTER_PLACED, self.restored)

    def work(self, pairs: Sequence[GroupPair], tokens: int, costs: CostModel) -> Work:
        """Count a copy on both sides, each with its own rows; bytes travel as when packed."""
        there = PricedRows(self.interleaved, pairs, tokens, costs)
        back = PricedRows(self.restored, pairs, tokens, costs)
        return Work(
            bytes=int(there.wire_bytes.sum()),
            gathering=src_ranks(self.interleaved),
            seconds=float(there.packing_s.sum()) + float(back.packing_s.sum()),
        )


class Interleave(Way):
    """Permutes states for all readers at once; rows are never assigned to it singly."""

    strategy = Strategy.INTERLEAVE

    def demanded(self, sent: Sent) -> Int64s | None:
        """Take all snapshots and pack the rest. Raises `StrategyRefusedError` without any."""
        if all(pair.per_token for pair in sent.priced.pairs):
            raise StrategyRefusedError(
                "interleave permutes snapshots, but no snapshot is moved: use pack or auto",
                strategy=self.strategy,
            )
        return np.where(_snapshots(sent.priced), self.strategy.number, Strategy.PACK.number)

    def takes_over(self, sent: Sent, ways: Int64s) -> Int64s:
        """Return rows of states that would be packed per reader, if they cost less this way."""
        table = sent.table
        packed = (ways == Strategy.PACK.number) & _snapshots(sent.priced)
        if not packed.any():
            return super().takes_over(sent, ways)
        chosen = whole_moves(table, packed)
        through = [sent.moves[index] for index in np.flatnonzero(chosen).tolist()]
        readers = max((sent.readers[move.src_rank] for move in through), default=1)
        rows = np.unique(table.piece_row[chosen[table.piece_move]])
        if readers > 1 and _pays(sent, rows, Chunks.of(through, sent.cutter), readers):
            return rows
        return super().takes_over(sent, ways)

    def share(self, sent: Sent, mine: Bools) -> Chunks:
        """Return the chunks of the rows' moves."""
        moves = np.unique(sent.table.piece_move[mine[sent.table.piece_row]])
        return Chunks.of([sent.moves[index] for index in moves.tolist()], sent.cutter)


def _snapshots(priced: PricedRows) -> Bools:
    """Return a mask of the rows that are copied once, whatever the prompt's length."""
    per_token = np.array([pair.per_token for pair in priced.pairs], np.bool_)
    mask: Bools = ~per_token[priced.rows[:, Column.GROUP_PAIR]]
    return mask


def _pays(sent: Sent, rows: Int64s, chunks: Chunks, readers: int) -> bool:
    """Return whether ``rows`` cost less through ``chunks`` than packed for each of ``readers``.

    A source gathers for its readers one after the other, so the last reader waits for all.
    """
    priced = sent.priced
    packed_s, there_s, back_s = (
        float(replace(priced, rows=table).copy_s.sum())
        for table in (priced.rows[rows], chunks.interleaved, chunks.restored)
    )
    once_s = priced.costs.seconds_per_launch
    return once_s + readers * there_s + back_s < readers * (once_s + packed_s) + packed_s


def chunk_places(moves: Sequence[Move]) -> list[Place]:
    """Return the place of each move's box in its source's chunk; the narrower type travels.

    >>> from restow.broker.layout import DType, Span
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


def whole_moves(table: Table, rows: Bools) -> Bools:
    """Return a mask of the moves that travel only in ``rows``, and share none with other moves."""
    while True:
        moves = np.ones(int(table.piece_move.max(initial=-1)) + 1, np.bool_)
        moves[table.piece_move[~rows[table.piece_row]]] = False
        fewer = rows.copy()
        fewer[table.piece_row[~moves[table.piece_move]]] = False
        if (fewer == rows).all():
            return moves
        rows = fewer
