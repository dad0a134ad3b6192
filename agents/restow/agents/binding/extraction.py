"""Bind what is copied out of spans in staging, where they lie as `binding.spans` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from restow.agents.binding.addresses import DST, SRC, Lines, by_pair, cut, pages_of
from restow.agents.binding.pages import Blocks, RegionTable, Stretches, Tokens, check_pages
from restow.agents.binding.pieces import Copies, Ends, Grid, grid
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import Column, GroupPair


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows ``[rows, len(Column)]`` of one pair; the other arrays are columns ``[rows, 1]`` of them.

    ``whole``: their tokens follow each other without a gap on both sides. ``dst`` is where they lie
    at the destination.
    """

    pair: GroupPair
    whole: bool
    rows: Int64s
    src_offset_bytes: Int64s
    src_step_bytes: Int64s
    src_dtype: Int64s
    dst: Lines
    dst_step_bytes: Int64s
    dst_dtype: Int64s
    count: Int64s

    @classmethod
    def of(cls, pair: GroupPair, rows: Int64s, whole: bool, memory: RegionTable) -> _Part:
        """The rows, laid over the destination's ``memory``."""
        return cls(
            pair,
            whole,
            rows,
            rows[:, [Column.SRC_OFFSET_BYTES]],
            rows[:, [SRC.step]],
            rows[:, [SRC.dtype]],
            Lines.of(rows, memory, DST),
            rows[:, [DST.step]],
            rows[:, [DST.dtype]],
            rows[:, [Column.COUNT]],
        )

    def bind(self, staged: RegionTable, dst_blocks: Blocks, tokens: Tokens) -> Grid | None:
        """The copies; None if there are no tokens to copy."""
        pair = self.pair
        stretches = cut(pair, (SRC, DST), tokens, self.whole)
        if not len(stretches.first):
            return None
        pages = pages_of(pair, DST, dst_blocks, tokens)
        dst = self.dst.by_row(pages, pair.dst, stretches)
        repeats = stretches.count if self.whole and pair.per_token else 1
        return grid(
            Ends(self._staged(staged, tokens, stretches), self.src_step_bytes, self.src_dtype),
            Ends(dst, self.dst_step_bytes, self.dst_dtype),
            self.count * repeats,
        )

    def _staged(self, staged: RegionTable, tokens: Tokens, stretches: Stretches) -> Int64s:
        """Where the rows begin in staging, ``[rows, stretches]``."""
        if not self.pair.per_token:
            begin = staged.base_address[self.rows[:, SRC.region]]
            return begin[:, None] + self.src_offset_bytes
        held = self.pair.src_pages(tokens.start, tokens.stop)
        # Page 0 in staging is the first one that was read.
        pages = np.maximum(np.arange(held.stop) - held.start, 0)
        return Lines.of(self.rows, staged, SRC).by_row(pages, self.pair.src, stretches)


class Extraction:
    """The extracted rows of one program, laid over the destination; keep it for many handoffs."""

    def __init__(self, rows: Int64s, pairs: Sequence[GroupPair], memory: RegionTable) -> None:
        """Sort the rows into parts."""
        self._parts = []
        for pair, table in by_pair(rows, pairs):
            joined = SRC.joined(table) & DST.joined(table)
            for some, whole in ((table[joined], True), (table[~joined], False)):
                if len(some):
                    self._parts.append(_Part.of(pair, some, whole, memory))
        self._rigid = _rigid(self._parts)

    def distance(self, dst_blocks: Blocks, tokens: Tokens) -> int | None:
        """By how many bytes all rows at the destination lie behind where they were at page 0.

        None if they do not move together. Raises `PageCountError` and `PageRangeError`.
        """
        if self._rigid is None:
            return None
        pair, stride_bytes, page_count = self._rigid
        pages = pages_of(pair, DST, dst_blocks, tokens)
        check_pages(pages, page_count, DST.name)
        return stride_bytes * int(pages[0])

    def bind(self, staged: RegionTable, dst_blocks: Blocks, tokens: Tokens) -> Copies:
        """Copies from the spans in staging to pages.

        Raises `PageCountError` and `PageRangeError`.
        """
        grids = [part.bind(staged, dst_blocks, tokens) for part in self._parts]
        return Copies(tuple(found for found in grids if found is not None))


def _rigid(parts: Sequence[_Part]) -> tuple[GroupPair, int, int] | None:
    """The one list of pages, with one stride and the least count, of snapshots alone."""
    strides = {int(stride) for part in parts for stride in part.dst.page_stride_bytes.ravel()}
    pairs = {part.pair for part in parts}
    if len(pairs) != 1 or len(strides) != 1 or parts[0].pair.per_token:
        return None
    return parts[0].pair, strides.pop(), min(part.dst.page_count for part in parts)
