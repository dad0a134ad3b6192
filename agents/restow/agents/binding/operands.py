"""The rule by which rows and pages become addresses, for every kind of operand."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import NamedTuple

import numpy as np

from restow.agents.binding.pages import (
    Blocks,
    PageList,
    RegionTable,
    Stretches,
    TokenRange,
    row_begins,
    wire_dtypes,
)
from restow.broker.errors import PageRangeError
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.layout.values import ITEM_BYTES
from restow.broker.planner.program import Column, GroupPair, PageForm


@dataclass(frozen=True, slots=True)
class Lines:
    """The positions of rows in one memory, before pages and tokens are known.

    Law: element ``i`` of a row at token ``t`` lies at ``base + page * page_stride + offset +
    (t % page_tokens) * token_stride + i * step``, where ``page`` is the page that holds token
    ``t``. ``first_address`` is ``base + offset``; the code that copies elements adds ``i * step``.

    Arrays are ``[rows, 1]`` or ``[regions, 1, rows]``; the axis of length 1 is for stretches. A
    stride that all rows share may have a single element. ``page_count`` is that of the rows'
    smallest region in the memory called ``name``; it limits page ids that another party listed.

    Example: a row 8 bytes after the beginning of its page, which holds 4 tokens of 16 bytes; then
    the same tokens, 2 to 8, in a run, which counts as one page for all of them:

    >>> from restow.agents.binding.pages import TokenRange, cut_tokens
    >>> stretches = cut_tokens(TokenRange(2, 9), (4,))
    >>> unit = np.ones((1, 1), np.int64)
    >>> paged = Lines(unit * 1008, unit * 256, unit * 16)
    >>> paged.addresses(PageList(np.array([5, 7, 3]), 4), stretches).tolist()
    [[2320, 2800, 1776]]
    >>> run = Lines(unit * 4096, unit * 0, unit * 16)
    >>> run.addresses(PageList(None), stretches).tolist()
    [[4096, 4128, 4192]]
    """

    first_address: Int64s
    page_stride_bytes: Int64s
    token_stride_bytes: Int64s
    page_count: int = sys.maxsize
    name: str = ""

    def addresses(self, pages: PageList, stretches: Stretches) -> Int64s:
        """Return the address of every row at every stretch. Raises `PageRangeError`."""
        self.check(pages.ids)
        return self.at(*pages.holding(stretches))

    def at(self, page: Int64s | None, in_page: Int64s | None = None) -> Int64s:
        """Return the address of every row at the ``in_page``-th token of ``page``; None means 0."""
        axes = self.first_address.ndim
        moved = [
            _moved(stride, count, axes)
            for stride, count in (
                (self.page_stride_bytes, page),
                (self.token_stride_bytes, in_page),
            )
            if count is not None
        ]
        # What the rows share is small, so it is added up first.
        return reduce(add, [*moved, self.first_address])

    def some(self, mask: Bools) -> Lines:
        """Return the lines that a flat mask selects, as ``[rows, 1]``."""
        first, page, token = (
            np.broadcast_to(values, self.first_address.shape).ravel()[mask, None]
            for values in (self.first_address, self.page_stride_bytes, self.token_stride_bytes)
        )
        return replace(self, first_address=first, page_stride_bytes=page, token_stride_bytes=token)

    def kept(self) -> Lines:
        """Return the same lines, cheaper to use often: a shared stride has a single element."""
        page, token = one_if_alike(self.page_stride_bytes), one_if_alike(self.token_stride_bytes)
        return replace(self, page_stride_bytes=page, token_stride_bytes=token)

    def check(self, page: Int64s | None) -> None:
        """Raise `PageRangeError` for the first page id that its region does not have."""
        count = self.page_count
        if page is not None and len(page) and (page.min() < 0 or page.max() >= count):
            wrong, allowed = page[(page < 0) | (page >= count)][0], f"[0, {count})"
            raise PageRangeError(
                f"{self.name} page {wrong} is outside of {allowed}, the pages of its region: "
                f"the engine named a wrong block id",
                side=self.name,
                page=wrong,
                range=allowed,
            )


def _moved(stride_bytes: Int64s, count: Int64s, axes: int) -> Int64s:
    """Return the distance that ``count`` strides move rows, along the axis of stretches."""
    stride = one_if_alike(stride_bytes) if len(count) > 1 else stride_bytes
    return stride * (count if axes == 2 else count[:, None])


def one_if_alike(values: Int64s) -> Int64s:
    """Return a single element along every axis if all values are equal, or else all values."""
    if values.size > 1 and (values == values.flat[0]).all():
        return values[(slice(1),) * values.ndim]
    return values


_ZERO: Int64s = np.zeros((1, 1), np.int64)


@dataclass(frozen=True, slots=True)
class SideColumns:
    """The columns of a program's rows that describe one side."""

    name: str
    region: Column
    offset: Column
    step: Column
    token_stride: Column
    dtype: Column

    def form(self, pair: GroupPair) -> PageForm:
        """Return this side's page list of a pair."""
        return pair.src if self is SRC else pair.dst

    def joined(self, rows: Int64s) -> Bools:
        """Mark rows whose next token follows at their own step: they need no loop over tokens."""
        mask: Bools = rows[:, self.token_stride] == rows[:, Column.COUNT] * rows[:, self.step]
        return mask


SRC = SideColumns(
    "source",
    Column.SRC_REGION,
    Column.SRC_OFFSET_BYTES,
    Column.SRC_STEP_BYTES,
    Column.SRC_TOKEN_STRIDE_BYTES,
    Column.SRC_DTYPE,
)
DST = SideColumns(
    "destination",
    Column.DST_REGION,
    Column.DST_OFFSET_BYTES,
    Column.DST_STEP_BYTES,
    Column.DST_TOKEN_STRIDE_BYTES,
    Column.DST_DTYPE,
)


class RowEnd(NamedTuple):
    """An end of rows: their positions, and the step and type of their elements."""

    lines: Lines
    step_bytes: Int64s
    dtype: Int64s


@dataclass(frozen=True, slots=True)
class BoundOperand:
    """An end of a table's rows in one handoff.

    - ``side`` is the side whose pages hold the rows and cut the tokens, or None for a run.
    - ``end`` maps rows ``[..., len(Column)]`` to their `RowEnd`, which is that of every handoff.
    - ``pages`` lists the pages that hold the tokens of a pair's rows. Raises `PageCountError`.
    - ``base_address`` is where the rows lie in this handoff, and ``begins`` has how far behind it
      each row of the table begins. Both are multiples of 16 bytes; None: every row begins there.
    """

    side: SideColumns | None
    end: Callable[[Int64s], RowEnd]
    pages: Callable[[GroupPair, TokenRange], PageList]
    base_address: int = 0
    begins: Int64s | None = None

    def bound_end(self, rows: Int64s, index: Int64s) -> RowEnd:
        """Return the end in this handoff of rows whose indices in the table are ``index``."""
        end, moved = self.end(rows), self.base_address
        if not moved and self.begins is None:
            return end
        first = end.lines.first_address + moved
        if self.begins is not None:
            first = first + self.begins[index]
        return end._replace(lines=replace(end.lines, first_address=first))


def paged(memory: RegionTable, side: SideColumns, blocks: Blocks) -> BoundOperand:
    """Return an operand in pages that a side lists, inside of its regions (PAGES)."""
    return BoundOperand(
        side,
        lambda rows: side_end(rows, memory, side, side),
        lambda pair, tokens: blocks.listed(side.form(pair), tokens),
    )


def in_spans(staged: RegionTable, spans: Int64s) -> BoundOperand:
    """Return an operand in source pages that were read whole; span ``i`` is region ``i`` (SPAN).

    ``spans`` has the span of each row.
    """
    base = int(staged.base_address.min()) if len(staged.base_address) else 0
    at_zero = replace(staged, base_address=np.zeros_like(staged.base_address))
    return BoundOperand(
        SRC,
        lambda rows: side_end(rows, at_zero, SRC, None),
        staged_pages,
        base,
        staged.base_address[spans] - base,
    )


def by_place(address: int, columns: SideColumns) -> BoundOperand:
    """Return an operand in a chunk of snapshots at ``address``, placed by ``columns`` (RUN)."""

    def end(rows: Int64s) -> RowEnd:
        lines = Lines(rows[..., columns.offset], _ZERO, _ZERO)
        return RowEnd(lines, rows[..., columns.step], rows[..., columns.dtype])

    return BoundOperand(None, end, lambda pair, tokens: PageList(None), address)


def in_order(
    rows: Int64s, pairs: Sequence[GroupPair], tokens: TokenRange, address: int
) -> BoundOperand:
    """Return an operand of rows that follow each other at ``address``, with all tokens (RUN).

    Elements travel in the narrower of their two types.
    """

    def end(bound: Int64s) -> RowEnd:
        dtype = wire_dtypes(bound)
        item = ITEM_BYTES[dtype]
        first = np.zeros(bound.shape[:-1], np.int64)
        return RowEnd(Lines(first, _ZERO, bound[..., Column.COUNT] * item), item, dtype)

    begins, _ = row_begins(rows, pairs, tokens)
    return BoundOperand(None, end, lambda pair, tokens: PageList(None), address, begins)


def in_regions(
    memory: RegionTable,
    region: Int64s,
    offset_bytes: Int64s | int = 0,
    token_stride_bytes: Int64s = _ZERO,
    side: SideColumns | None = None,
) -> Lines:
    """Return lines at an offset in each page of a region; ``side`` lists the pages, if given."""
    first_address = memory.base_address[region] + offset_bytes
    strides = memory.page_stride_bytes[region], token_stride_bytes
    if side is None:
        return Lines(first_address, *strides)
    return Lines(first_address, *strides, int(memory.page_count[region].min()), side.name)


def side_end(
    rows: Int64s, memory: RegionTable, side: SideColumns, lister: SideColumns | None
) -> RowEnd:
    """Return the end of rows (at least one) that one side's columns describe, in ``memory``.

    ``lister`` is the side that lists the pages; None if the pages are known to exist.
    """
    region, offset = rows[..., side.region], rows[..., side.offset]
    lines = in_regions(memory, region, offset, rows[..., side.token_stride], lister)
    return RowEnd(lines, rows[..., side.step], rows[..., side.dtype])


def staged_pages(pair: GroupPair, tokens: TokenRange) -> PageList:
    """Return the pages of a pair's spans in staging; page 0 is the first page that was read."""
    if not pair.per_token:
        return PageList(None)
    held = pair.src_pages(tokens.start, tokens.stop)
    size = pair.src.page_tokens
    return PageList(np.arange(len(held)), size, held.start * size, pair.src.tokens)


def span_lines(spans: Int64s, memory: RegionTable) -> Lines:
    """Return lines of ``spans`` ``[..., len(Column)]`` in the source's pages."""
    region, offset = spans[..., Column.SRC_REGION], spans[..., Column.SRC_OFFSET_BYTES]
    return in_regions(memory, region, offset, side=SRC)


def held_pages(pair: GroupPair, blocks: Blocks, tokens: TokenRange) -> PageList:
    """Return the source's pages that are read whole, as spans. Raises `PageCountError`."""
    held = pair.src_pages(tokens.start, tokens.stop)
    return PageList(blocks.pages(pair.src, tokens)[held.start : held.stop])
