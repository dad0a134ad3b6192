"""The ways in which rows travel: `Way` is their interface, and `recompute` has another way.

`Slices` reads rows into place, `WholeSpans` reads whole pages and extracts rows, and `Pack` gathers
rows.
`Interleave` sends a state in an order in which each reader's part of a source is a single run: the
source groups the columns of a state by destination rank and writes each rank's *chunk* in the order
of the fields' axes, with the last axis innermost. A conv window ``[tap][channel]`` becomes channel
after channel, each with its taps: ``x0 x0' x0'' x1 ... B0 B0' B0'' ... C0 ...``. This order depends
on neither layout; the destination applies the inverse of its own order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeAlias

import numpy as np

from restow.broker.errors import StrategyRefusedError
from restow.broker.layout import DType, RankLayout
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.layout.values import ITEM_BYTES
from restow.broker.planner.costs import CostModel, PricedRows, Seconds, descriptors, row_costs
from restow.broker.planner.plan import Move, Place, Plan
from restow.broker.planner.program import (
    GATHER_IN_ORDER,
    GATHER_PLACED,
    READ_PAGES,
    READ_SPANS,
    SCATTER_PLACED,
    SCATTER_SPANS,
    Column,
    GroupPair,
    Step,
    aligned,
    no_rows,
    split_rows,
)
from restow.broker.planner.table import Cutter, RowTable
from restow.broker.strategy import Strategy
from restow.broker.words import Worded


@dataclass(frozen=True, slots=True)
class Sent(Worded):
    """What is sent to a destination rank, and the strategy that the operator requested.

    ``readers`` has the number of destination ranks that read from each source rank.
    """

    strategy: Strategy
    moves: tuple[Move, ...]
    table: RowTable
    priced: PricedRows
    cutter: Cutter
    readers: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Work:
    """The work of agents for a share of a program.

    ``gathering`` has the source ranks that must gather; a rank gathers once for all shares, with a
    launch on both sides and a single read. ``launches`` and ``reads`` count other work, and
    ``seconds`` is the time of copying and computing.
    """

    bytes: int = 0
    reads: int = 0
    launches: int = 0
    gathering: frozenset[int] = frozenset()
    seconds: float = 0.0


class Share(Protocol):
    """The part of a rank's program that travels in one way."""

    @property
    def strategy(self) -> Strategy:
        """Return the strategy of this way."""

    def steps(self, first_span: int) -> Sequence[Step]:
        """Return the share's steps of a `Program`; its spans are numbered from ``first_span`` on.

        Raises `TooManyPiecesError`.
        """

    def work(self, pairs: Sequence[GroupPair], tokens: int, costs: CostModel) -> Work:
        """Return the work for a prompt of ``tokens``. Raises `TooManyPiecesError`."""


class Spared(Share, Protocol):
    """A share that replaces moves."""

    @property
    def moves(self) -> tuple[Move, ...]:
        """Return the replaced moves."""


Sparing: TypeAlias = Callable[[RankLayout, Cutter], Spared]
"""Finds the moves to a destination rank that can be replaced. Raises `TooManyPiecesError`."""


class Way:
    """A way for rows to travel; it gets rows by price, or takes them over from other ways."""

    strategy: ClassVar[Strategy]

    def demanded(self, sent: Sent) -> Int64s | None:
        """Return a strategy number per row for a requested way; None if the cost model decides.

        Raises `StrategyRefusedError`.
        """
        return np.full(len(sent.table.rows), self.strategy.number, np.int64)

    def seconds(self, priced: PricedRows) -> Seconds | None:
        """Return each row's cost, infinite if it cannot go this way; None without a price."""
        return None

    def once_s(self, costs: CostModel) -> float:
        """Return the fixed cost of the first row."""
        return 0.0

    def takes_over(self, sent: Sent, ways: Int64s) -> Int64s:
        """Return the rows that together cost less this way than by the ``ways`` chosen singly."""
        return np.zeros(0, np.int64)

    def share(self, sent: Sent, mine: Bools) -> Share | None:
        """Return the share of the rows under a mask; None if the way never gets rows."""
        return None

    def sparing(self, plan: Plan, strategy: Strategy) -> Sparing | None:
        """Return a function that finds moves that this way can replace; None if there are none.

        Raises `StrategyRefusedError` if this way is requested but cannot serve, and
        `TooManyPiecesError`.
        """
        return None


def src_ranks(rows: Int64s) -> frozenset[int]:
    """Return the source ranks of rows."""
    return frozenset(np.unique(rows[:, Column.SRC_RANK]).tolist())


@dataclass(frozen=True, slots=True)
class Sliced:
    """Rows that are read into place."""

    rows: Int64s

    strategy: ClassVar[Strategy] = Strategy.SLICES

    def steps(self, first_span: int) -> Sequence[Step]:
        """Return a READ for each run of bytes."""
        return (Step(READ_PAGES, split_rows(self.rows)),)

    def work(self, pairs: Sequence[GroupPair], tokens: int, costs: CostModel) -> Work:
        """Count a descriptor per piece."""
        rows = split_rows(self.rows)
        _, sizes = row_costs(rows, pairs, tokens)
        pieces = descriptors(rows, pairs, tokens).sum()
        return Work(bytes=int(sizes.sum()), reads=math.ceil(pieces.round(6)))


class Slices(Way):
    """Read rows into place; this way cannot cast."""

    strategy = Strategy.SLICES

    def demanded(self, sent: Sent) -> Int64s | None:
        """Assign all rows. Raises `StrategyRefusedError` if a row changes its type."""
        casts = sent.priced.casts
        if casts.any():
            row = sent.table.rows[int(np.argmax(casts))]
            raise StrategyRefusedError(
                f"slices cannot convert {DType(row[Column.SRC_DTYPE]).label} to "
                f"{DType(row[Column.DST_DTYPE]).label}: use whole, pack or auto",
                strategy=self.strategy,
            )
        return super().demanded(sent)

    def seconds(self, priced: PricedRows) -> Seconds:
        """Return the cost of descriptors and bytes."""
        return np.where(priced.casts, np.inf, priced.into_place_s)

    def share(self, sent: Sent, mine: Bools) -> Sliced:
        """Return the rows unchanged."""
        return Sliced(sent.table.rows[mine])


SPAN_ALIGN_BYTES = 16
"""Alignment of spans, so that elements in staging are aligned to their size as in their page."""

_SAME_PAGE = [Column.SRC_RANK, Column.GROUP_PAIR, Column.SRC_REGION]


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans (``table``, int64 ``[spans, len(Column)]``); row ``i`` lies in ``span_of[i]``."""

    table: Int64s
    span_of: Int64s

    @classmethod
    def of(cls, rows: Int64s, pairs: Sequence[GroupPair], max_gap_bytes: int | None) -> Spans:
        """Cover ``rows`` with spans; a gap of more than ``max_gap_bytes`` begins a new span.

        If ``max_gap_bytes`` is None, each region of a source rank has a single span.
        """
        if not len(rows):
            return cls(no_rows(), np.zeros(0, np.int64))
        order = np.lexsort((rows[:, Column.SRC_OFFSET_BYTES], *rows[:, _SAME_PAGE].T[::-1]))
        rows = rows[order]
        start = rows[:, Column.SRC_OFFSET_BYTES] // SPAN_ALIGN_BYTES * SPAN_ALIGN_BYTES
        stop = _stops(rows, pairs)
        begins = np.ones(len(rows), np.bool_)
        begins[1:] = (rows[1:, _SAME_PAGE] != rows[:-1, _SAME_PAGE]).any(axis=1)
        if max_gap_bytes is not None:
            begins[1:] |= start[1:] - _reached(stop, begins)[:-1] > max_gap_bytes
        first = np.flatnonzero(begins)
        length = np.maximum.reduceat(stop, first) - start[first]
        span_of = np.empty(len(rows), np.int64)
        span_of[order] = np.cumsum(begins) - 1
        return cls(span_rows(rows[first][:, _SAME_PAGE], start[first], length), span_of)

    def extracted(self, rows: Int64s) -> Int64s:
        """Return the rows at their places in the spans, sorted by span."""
        if not len(rows):
            return no_rows()
        rows = rows.copy()
        rows[:, Column.SRC_REGION] = self.span_of
        rows[:, Column.SRC_OFFSET_BYTES] -= self.table[self.span_of, Column.SRC_OFFSET_BYTES]
        return rows[np.argsort(self.span_of, kind="stable")]


def span_rows(pages: Int64s, offset_bytes: Int64s, length_bytes: Int64s) -> Int64s:
    """Return rows that read stretches of ``pages``: source ranks, pairs of lists and regions.

    `read_spans` assigns the span that each row fills.
    """
    rows = np.zeros((len(pages), len(Column)), np.int64)
    rows[:, _SAME_PAGE] = pages
    rows[:, Column.SRC_OFFSET_BYTES] = offset_bytes
    rows[:, Column.COUNT] = length_bytes
    rows[:, [Column.SRC_STEP_BYTES, Column.DST_STEP_BYTES]] = 1
    rows[:, [Column.SRC_DTYPE, Column.DST_DTYPE]] = DType.UINT8
    return rows


def read_spans(rows: Int64s, first_span: int) -> Step:
    """Return the step that reads spans, numbered from ``first_span`` on."""
    rows = rows.copy()
    rows[:, Column.DST_REGION] = np.arange(first_span, first_span + len(rows))
    return Step(READ_SPANS, rows)


def span_pages(spans: Int64s, pairs: Sequence[GroupPair], tokens: int) -> Int64s:
    """Return how many source pages each span is read from for a prompt of ``tokens``."""
    counts = np.array([len(pair.src_pages(0, tokens)) for pair in pairs], np.int64)
    pages: Int64s = counts[spans[:, Column.GROUP_PAIR]]
    return pages


def _stops(rows: Int64s, pairs: Sequence[GroupPair]) -> Int64s:
    """Return the end of the last byte that each row touches in a page."""
    page_tokens = np.array([max(pair.src.page_tokens, 1) for pair in pairs], np.int64)
    tokens = page_tokens[rows[:, Column.GROUP_PAIR]]
    stops: Int64s = rows[:, Column.SRC_OFFSET_BYTES] + ITEM_BYTES[rows[:, Column.SRC_DTYPE]]
    stops += (tokens - 1) * rows[:, Column.SRC_TOKEN_STRIDE_BYTES]
    stops += (rows[:, Column.COUNT] - 1) * rows[:, Column.SRC_STEP_BYTES]
    return stops


def _reached(stop: Int64s, begins: Bools) -> Int64s:
    """Return the furthest ``stop`` so far within each page; ``begins`` marks first rows."""
    values, rank = np.unique(stop, return_inverse=True)
    page = (np.cumsum(begins) - 1) * len(values)
    reached: Int64s = values[np.maximum.accumulate(rank + page) - page]
    return reached


@dataclass(frozen=True, slots=True)
class Extracted:
    """Rows, and the spans that cover them."""

    rows: Int64s
    spans: Spans

    strategy: ClassVar[Strategy] = Strategy.WHOLE

    def steps(self, first_span: int) -> Sequence[Step]:
        """Return a step that reads spans, and a step that copies rows out of them."""
        extracted = self.spans.extracted(self.rows)
        extracted[:, Column.SRC_REGION] += first_span
        return read_spans(self.spans.table, first_span), Step(SCATTER_SPANS, extracted)

    def work(self, pairs: Sequence[GroupPair], tokens: int, costs: CostModel) -> Work:
        """Count a descriptor per page, and a copy at the destination."""
        table = self.spans.table
        pages = span_pages(table, pairs, tokens)
        return Work(
            bytes=int((pages * table[:, Column.COUNT]).sum()),
            reads=int(pages.sum()),
            launches=int(pages.any()),
            seconds=float(PricedRows(self.rows, pairs, tokens, costs).copy_s.sum()),
        )


class WholeSpans(Way):
    """Read whole spans with unneeded bytes, so that there are fewer reads."""

    strategy = Strategy.WHOLE

    def seconds(self, priced: PricedRows) -> Seconds:
        """Return the cost of a copy and a share of the span's read."""
        seconds = np.full(len(priced.rows), np.inf)
        # A piece is read into place if copying it costs more than its descriptor.
        small = priced.casts | (priced.into_place_s > priced.read_s + priced.copy_s)
        seconds[small] = priced.copy_s[small] + _shared(priced, small)
        return seconds

    def once_s(self, costs: CostModel) -> float:
        """Return the cost of a launch at the destination."""
        return costs.seconds_per_launch

    def share(self, sent: Sent, mine: Bools) -> Extracted:
        """Cover rows by spans without long gaps; if requested as strategy, by a span per region."""
        rows, costs = sent.table.rows[mine], sent.priced.costs
        gap_bytes = None if sent.strategy is self.strategy else costs.gap_bytes
        return Extracted(rows, Spans.of(rows, sent.priced.pairs, gap_bytes))


def _shared(priced: PricedRows, small: Bools) -> Seconds:
    """Return each row's share of its span's read, proportional to the row's cost on its own.

    All rows of a span therefore gain or lose together.
    """
    costs, weights = priced.costs, priced.into_place_s[small]
    spans = Spans.of(priced.rows[small], priced.pairs, costs.gap_bytes)
    pages = span_pages(spans.table, priced.pairs, priced.tokens)
    lengths = spans.table[:, Column.COUNT]
    seconds = costs.seconds_per_descriptor + lengths / costs.read_bytes_per_second
    total = np.bincount(spans.span_of, weights, minlength=len(spans.table))
    # A row costs nothing if none of its tokens moves in this prompt.
    per_weight = np.divide(pages * seconds, total, out=np.zeros(len(total)), where=total > 0)
    shares: Seconds = weights * per_weight[spans.span_of]
    return shares


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows that are gathered and scattered."""

    rows: Int64s

    strategy: ClassVar[Strategy] = Strategy.PACK

    def steps(self, first_span: int) -> Sequence[Step]:
        """Return a step that gathers row after row into the run."""
        return (Step(GATHER_IN_ORDER, self.rows),)

    def work(self, pairs: Sequence[GroupPair], tokens: int, costs: CostModel) -> Work:
        """Count a copy on both sides."""
        priced = PricedRows(self.rows, pairs, tokens, costs)
        return Work(
            bytes=int(priced.wire_bytes.sum()),
            # A rank that holds none of the tokens is not asked to gather.
            gathering=src_ranks(self.rows[priced.wire_bytes > 0]),
            seconds=2 * float(priced.packing_s.sum()),
        )


class Pack(Way):
    """Send exactly the needed bytes, whatever their form."""

    strategy = Strategy.PACK

    def seconds(self, priced: PricedRows) -> Seconds:
        """Return the cost of the bytes sent and of two copies."""
        sent_s: Seconds = priced.wire_bytes / priced.costs.read_bytes_per_second
        return sent_s + 2 * priced.packing_s

    def once_s(self, costs: CostModel) -> float:
        """Return the cost of a request to the source and a launch on both sides."""
        return costs.seconds_per_stage + 2 * costs.seconds_per_launch

    def share(self, sent: Sent, mine: Bools) -> Packed:
        """Return the rows unchanged."""
        return Packed(sent.table.rows[mine])


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of a destination rank, one per source rank.

    ``interleaved`` rows copy from a source's pages to its chunk, ``restored`` rows from the chunk
    to the destination's pages. Offsets on the chunk's side count from the beginning of the chunk.
    """

    interleaved: Int64s
    restored: Int64s

    @classmethod
    def of(cls, moves: Sequence[Move], cutter: Cutter) -> Chunks:
        """Return the rows through chunks for ``moves``, which all move snapshots."""
        return cls(*cutter.through(moves, chunk_places(moves)))

    strategy: ClassVar[Strategy] = Strategy.INTERLEAVE

    def steps(self, first_span: int) -> Sequence[Step]:
        """Return a step that writes the chunk, and a step that applies the inverse order."""
        return Step(GATHER_PLACED, self.interleaved), Step(SCATTER_PLACED, self.restored)

    def work(self, pairs: Sequence[GroupPair], tokens: int, costs: CostModel) -> Work:
        """Count a copy on both sides, each side with its own rows; bytes travel as in `Packed`."""
        there = PricedRows(self.interleaved, pairs, tokens, costs)
        back = PricedRows(self.restored, pairs, tokens, costs)
        return Work(
            bytes=int(there.wire_bytes.sum()),
            gathering=src_ranks(self.interleaved),
            seconds=float(there.packing_s.sum()) + float(back.packing_s.sum()),
        )


class Interleave(Way):
    """Permute states for all readers at once; rows are never assigned to this way singly."""

    strategy = Strategy.INTERLEAVE

    def demanded(self, sent: Sent) -> Int64s | None:
        """Take all snapshots and pack the rest. Raises `StrategyRefusedError` without snapshots."""
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


def whole_moves(table: RowTable, rows: Bools) -> Bools:
    """Return a mask of the moves that travel only in ``rows`` and share no row with others."""
    while True:
        moves = np.ones(int(table.piece_move.max(initial=-1)) + 1, np.bool_)
        moves[table.piece_move[~rows[table.piece_row]]] = False
        fewer = rows.copy()
        fewer[table.piece_row[~moves[table.piece_move]]] = False
        if (fewer == rows).all():
            return moves
        rows = fewer
