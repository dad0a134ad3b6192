"""Bind the rows of GATHER and SCATTER, grouped so that numpy handles many rows at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from restow.agents.binding.operands import BoundOperand, SideColumns, in_order, one_if_alike
from restow.agents.binding.pages import SNAPSHOT, Stretches, TokenRange, cut_tokens
from restow.broker.layout.rows import Int64s
from restow.broker.layout.values import ITEM_BYTES
from restow.broker.planner.program import Column, GroupPair, cut_shared


@dataclass(frozen=True, slots=True)
class AlikeRows:
    """Rows of one pair of page lists, as ``index`` ``[rows, 1]`` or ``[regions, 1, rows]``.

    ``whole`` says that the rows' tokens follow each other without a gap on all ``sides``. The
    pages of these sides cut the tokens.
    """

    pair: GroupPair
    sides: tuple[SideColumns, ...]
    whole: bool
    index: Int64s

    def stretches(self, tokens: TokenRange) -> Stretches:
        """Return stretches inside pages of all sides, or of single tokens, or of a snapshot."""
        pair = self.pair
        if not pair.per_token:
            return SNAPSHOT
        forms = [side.form(pair) for side in self.sides]
        if not self.whole:
            forms = [replace(form, page_tokens=1) for form in forms]
        if not pair.alike:
            return Stretches(*cut_shared(pair, tokens.start, tokens.stop, forms))
        held = pair.src.tokens
        first = held.before(pair.first_token(tokens.start, tokens.stop))
        places = cut_tokens(
            TokenRange(first, held.before(tokens.stop)), [form.page_tokens for form in forms]
        )
        if held.parts == 1:
            return places
        return replace(places, first=held.first_tokens(places.first))

    def by_region(self, rows: Int64s) -> Iterator[AlikeRows]:
        """Yield the same rows, once for each number of rows that regions have."""
        index = self.index.ravel()
        regions = rows[index][:, [Column.SRC_REGION, Column.DST_REGION]]
        begins = np.concatenate([[True], (regions[1:] != regions[:-1]).any(axis=1)])
        first = np.flatnonzero(begins)
        counts = np.diff(first, append=len(index))
        for count in np.unique(counts):
            places = first[counts == count, None, None] + np.arange(count)
            yield replace(self, index=index[places])


def alike_rows(
    rows: Int64s, pairs: Sequence[GroupPair], sides: Sequence[SideColumns]
) -> Iterator[AlikeRows]:
    """Yield all rows of a table, grouped by page lists and by whether their tokens join."""
    joined = sides[0].joined(rows)
    for side in sides[1:]:
        joined &= side.joined(rows)
    for pair, index in by_pair(rows[:, Column.GROUP_PAIR], pairs):
        whole = joined[index]
        for chosen, join in ((index[whole], True), (index[~whole], False)):
            if len(chosen):
                yield AlikeRows(pair, tuple(sides), join, chosen[:, None])


def by_pair(numbers: Int64s, pairs: Sequence[GroupPair]) -> Iterator[tuple[GroupPair, Int64s]]:
    """Yield each pair of page lists that ``numbers`` name, with the indices of its rows."""
    for number, pair in enumerate(pairs):
        index = np.flatnonzero(numbers == number)
        if len(index):
            yield pair, index


@dataclass(frozen=True, slots=True)
class Grid:
    """Strided copies: int64 arrays that broadcast to the shape of the addresses.

    ``src_dtype`` and ``dst_dtype`` are `DType` numbers; equal numbers copy bytes unchanged.
    """

    src_address: Int64s
    dst_address: Int64s
    count: Int64s
    src_step_bytes: Int64s
    dst_step_bytes: Int64s
    src_dtype: Int64s
    dst_dtype: Int64s

    @property
    def size_bytes(self) -> int:
        """Bytes that the copies write."""
        sizes = self.count * ITEM_BYTES[self.dst_dtype]
        return int(np.broadcast_to(sizes, self.src_address.shape).sum())


@dataclass(frozen=True, slots=True)
class Copies:
    """All copies of a GATHER or SCATTER."""

    grids: tuple[Grid, ...] = ()

    def __len__(self) -> int:
        """Return the number of rows of elements that are copied."""
        return sum(grid.src_address.size for grid in self.grids)

    @property
    def size_bytes(self) -> int:
        """Bytes that the copies write."""
        return sum(grid.size_bytes for grid in self.grids)

    @classmethod
    def joined(cls, parts: Sequence[Copies]) -> Copies:
        """Join the copies of all parts, for one launch."""
        return cls(tuple(grid for part in parts for grid in part.grids))


def bind_copies(
    rows: Int64s,
    pairs: Sequence[GroupPair],
    src: BoundOperand,
    dst: BoundOperand,
    tokens: TokenRange,
) -> Copies:
    """Return copies of all rows from one operand to the other; each grid is ``[rows, stretches]``.

    The copies are ordered row by row, as rows lie in a run, so that kernels walk through the run
    from end to end. Raises `PageCountError` and `PageRangeError`.
    """
    sides = [operand.side for operand in (src, dst) if operand.side is not None]
    grids = []
    for alike in alike_rows(rows, pairs, sides):
        stretches, pair = alike.stretches(tokens), alike.pair
        src_pages, dst_pages = src.pages(pair, tokens), dst.pages(pair, tokens)
        if not len(stretches.first):
            continue
        bound = rows.take(alike.index, axis=0)
        source, target = (end.bound_end(bound, alike.index) for end in (src, dst))
        grids.append(
            Grid(
                source.lines.addresses(src_pages, stretches),
                target.lines.addresses(dst_pages, stretches),
                bound[..., Column.COUNT] * one_if_alike(stretches.count),
                source.step_bytes,
                target.step_bytes,
                source.dtype,
                target.dtype,
            )
        )
    return Copies(tuple(grids))


@dataclass(frozen=True, slots=True)
class RowCopies:
    """Rows of a program that one handoff copies, before they are bound to addresses."""

    name: tuple[object, ...]
    """Names the rows: the program's id, followed by what tells its parts apart."""
    rows: Int64s
    pairs: Sequence[GroupPair]
    src: BoundOperand | None
    """None: the destination is zeroed."""
    dst: BoundOperand
    tokens: TokenRange

    def bind(self) -> Copies:
        """Return the copies, of which only the destinations count if the rows are zeroed.

        Raises `PageCountError` and `PageRangeError`.
        """
        src = self.src or in_order(self.rows, self.pairs, self.tokens, 0)
        return bind_copies(self.rows, self.pairs, src, self.dst, self.tokens)
