"""Bind rows that are copied: from pages or staging into pages or staging, with numpy alone."""

from __future__ import annotations

from collections.abc import Sequence

from restow.agents.binding.addresses import Lines, one_if_alike
from restow.agents.binding.operands import DST, SRC, BoundOperand, End, in_spans, listed, side_end
from restow.agents.binding.pages import Blocks, PageList, RegionTable, Tokens, check_pages
from restow.agents.binding.parts import Part, parts
from restow.agents.binding.pieces import Copies, Grid
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import Column, GroupPair


def bind_copies(
    rows: Int64s, pairs: Sequence[GroupPair], src: BoundOperand, dst: BoundOperand, tokens: Tokens
) -> Copies:
    """Copies of all rows from one operand to the other, each grid ``[rows, stretches]``.

    Row by row, as they lie in a run: kernels then walk through it from end to end. Raises
    `PageCountError` and `PageRangeError`.
    """
    sides = [one.side for one in (src, dst) if one.side is not None]
    grids = []
    for part in parts(rows, pairs, sides):
        some = rows.take(part.index, axis=0)
        ends = src.end(some, part.index), dst.end(some, part.index)
        pages = src.pages(part.pair, tokens), dst.pages(part.pair, tokens)
        grids.append(_grid(part, some, ends, pages, tokens))
    return Copies(tuple(grid for grid in grids if grid is not None))


def _grid(
    part: Part, rows: Int64s, ends: Sequence[End], pages: Sequence[PageList], tokens: Tokens
) -> Grid | None:
    """The copies of a part; None if there are no tokens to copy."""
    stretches = part.stretches(tokens)
    if not len(stretches.first):
        return None
    src, dst = ends
    return Grid(
        src.lines.addresses(pages[0], stretches),
        dst.lines.addresses(pages[1], stretches),
        rows[..., Column.COUNT] * one_if_alike(stretches.count),
        src.step_bytes,
        dst.step_bytes,
        src.dtype,
        dst.dtype,
    )


class Extraction:
    """The extracted rows of one program, laid over the destination; keep it for many handoffs."""

    def __init__(self, rows: Int64s, pairs: Sequence[GroupPair], memory: RegionTable) -> None:
        """Sort the rows into parts."""
        self._kept = []
        for part in parts(rows, pairs, (SRC, DST)):
            some = rows.take(part.index, axis=0)
            end = side_end(some, memory, DST, DST)
            self._kept.append((part, some, end._replace(lines=end.lines.kept())))
        self._rigid = _rigid([(part.pair, end.lines) for part, _, end in self._kept])

    def distance(self, dst_blocks: Blocks, tokens: Tokens) -> int | None:
        """By how many bytes all rows at the destination lie behind where they were at page 0.

        None if they do not move together. Raises `PageCountError` and `PageRangeError`.
        """
        if self._rigid is None:
            return None
        pair, stride_bytes, page_count = self._rigid
        pages = dst_blocks.pages(pair.dst, tokens)
        check_pages(pages, page_count, DST.name)
        return stride_bytes * int(pages[0])

    def bind(self, staged: RegionTable, dst_blocks: Blocks, tokens: Tokens) -> Copies:
        """Copies from the spans in staging to pages.

        Raises `PageCountError` and `PageRangeError`.
        """
        spans, grids = in_spans(staged), []
        for part, rows, end in self._kept:
            pair = part.pair
            if pair.per_token and tokens.start >= tokens.stop:
                continue
            ends = spans.end(rows, part.index), end
            pages = spans.pages(pair, tokens), listed(pair, DST, dst_blocks, tokens)
            grids.append(_grid(part, rows, ends, pages, tokens))
        return Copies(tuple(grid for grid in grids if grid is not None))


def _rigid(kept: Sequence[tuple[GroupPair, Lines]]) -> tuple[GroupPair, int, int] | None:
    """The one list of pages, with one stride and the least count, of snapshots alone."""
    strides = {int(stride) for _, lines in kept for stride in lines.page_stride_bytes.ravel()}
    pairs = {pair for pair, _ in kept}
    if len(pairs) != 1 or len(strides) != 1 or kept[0][0].per_token:
        return None
    return kept[0][0], strides.pop(), min(lines.page_count for _, lines in kept)
