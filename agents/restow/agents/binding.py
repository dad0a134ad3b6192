"""Bind a program's rows to the pages of one handoff: from rows to addresses, with numpy alone.

Law: element ``i`` of a row at token ``t`` lies at ``base + page * page_stride + offset +
(t % page_tokens) * token_stride + i * step`` on each side, where ``page`` is the one that holds
token ``t``. Nothing here loops over pages, tokens or rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from restow.broker.errors import PageCountError, PageRangeError
from restow.broker.layout import DType
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import Column, GroupPair, PageForm

STAGING_ALIGN_BYTES = 16
"""Every row of a staged run begins at a multiple of this."""


@dataclass(frozen=True, slots=True)
class RegionTable:
    """The memory of one rank's regions, in its layout's order: int64 arrays, one entry a region."""

    base_address: Int64s
    page_stride_bytes: Int64s
    page_count: Int64s


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens ``[start, stop)`` that per-token rows move."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Contiguous copies of one READ: int64 arrays of equal length."""

    src_address: Int64s
    dst_address: Int64s
    length_bytes: Int64s


@dataclass(frozen=True, slots=True)
class _Segments:
    """Stretches of tokens inside one page of each side (or of the one side that is bound)."""

    token: Int64s
    count: Int64s
    src_page: Int64s
    src_token: Int64s
    dst_page: Int64s
    dst_token: Int64s


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block ids by group, int64."""

    by_group: Mapping[str, Int64s]

    def pages(self, form: PageForm, tokens: Tokens) -> Int64s:
        """Page ids from token 0 on. Raises `PageCountError` when they do not reach ``tokens``."""
        ids = self.by_group.get(form.group)
        if ids is None:
            raise PageCountError(f"no blocks are given for group {form.group}", group=form.group)
        if form.page_tokens == 0:
            if len(ids) != 1:
                raise PageCountError(
                    f"group {form.group} holds snapshots: exactly one block is needed, "
                    f"got {len(ids)}",
                    group=form.group,
                )
        elif len(ids) * form.pages_per_block * form.page_tokens < tokens.stop:
            raise PageCountError(
                f"group {form.group}: {len(ids)} blocks of "
                f"{form.pages_per_block * form.page_tokens} tokens do not hold {tokens.stop}",
                group=form.group,
            )
        if form.pages_per_block == 1:
            return ids
        return (ids[:, None] * form.pages_per_block + np.arange(form.pages_per_block)).ravel()


def bind_reads(
    rows: Int64s,
    pairs: Sequence[GroupPair],
    src: RegionTable,
    dst: RegionTable,
    src_blocks: Blocks,
    dst_blocks: Blocks,
    tokens: Tokens,
) -> Descriptors:
    """Descriptors of direct rows that all have one source rank.

    A row whose tokens follow each other without a gap on both sides becomes one descriptor for each
    stretch of tokens inside a page; any other row becomes one for each token. Raises
    `PageCountError` and `PageRangeError`.
    """
    parts = [_EMPTY]
    for pair, table in _by_pair(rows, pairs):
        joined = _tokens_joined(table, src=True) & _tokens_joined(table, src=False)
        for part, whole_pages in ((table[joined], True), (table[~joined], False)):
            if not len(part):
                continue
            stretch = _segments(pair, tokens, src_blocks, dst_blocks, whole_pages)
            src_address = _addresses(part, src, stretch.src_page, stretch.src_token, side=0)
            dst_address = _addresses(part, dst, stretch.dst_page, stretch.dst_token, side=1)
            lengths = part[:, Column.COUNT, None] * (stretch.count if whole_pages else 1)
            lengths = np.broadcast_to(lengths, src_address.shape)
            parts.append(np.stack([src_address.ravel(), dst_address.ravel(), lengths.ravel()]))
    table = np.concatenate(parts, axis=1)
    return Descriptors(table[0], table[1], table[2])


_EMPTY: Int64s = np.empty((3, 0), np.int64)


@dataclass(frozen=True, slots=True)
class Copies:
    """Strided copies of one GATHER or SCATTER: int64 arrays of equal length.

    ``src_dtype`` and ``dst_dtype`` are `DType` numbers; equal ones copy bytes unchanged.
    """

    src_address: Int64s
    dst_address: Int64s
    count: Int64s
    src_step_bytes: Int64s
    dst_step_bytes: Int64s
    src_dtype: Int64s
    dst_dtype: Int64s


def staged_bytes(rows: Int64s, pairs: Sequence[GroupPair], tokens: Tokens) -> int:
    """Length of the run that ``rows`` are gathered into."""
    return int(_staging(rows, pairs, tokens)[1])


def bind_gather(
    rows: Int64s,
    pairs: Sequence[GroupPair],
    src: RegionTable,
    src_blocks: Blocks,
    tokens: Tokens,
    staging_address: int,
) -> Copies:
    """Copies from pages to the run at ``staging_address``: rows in order, tokens in order."""
    return _bind_staged(rows, pairs, src, src_blocks, tokens, staging_address, side=0)


def bind_scatter(
    rows: Int64s,
    pairs: Sequence[GroupPair],
    dst: RegionTable,
    dst_blocks: Blocks,
    tokens: Tokens,
    staging_address: int,
) -> Copies:
    """Copies from the run at ``staging_address`` to pages: the inverse of `bind_gather`."""
    return _bind_staged(rows, pairs, dst, dst_blocks, tokens, staging_address, side=1)


def _bind_staged(
    rows: Int64s,
    pairs: Sequence[GroupPair],
    regions: RegionTable,
    blocks: Blocks,
    tokens: Tokens,
    staging_address: int,
    side: int,
) -> Copies:
    begins, _ = _staging(rows, pairs, tokens)
    wire = _wire_dtypes(rows)
    parts = [np.empty((7, 0), np.int64)]
    for number, pair in enumerate(pairs):
        own_pair = rows[:, Column.GROUP_PAIR] == number
        joined = _tokens_joined(rows, src=side == 0)
        form = pair.src if side == 0 else pair.dst
        for chosen, whole_pages in ((own_pair & joined, True), (own_pair & ~joined, False)):
            table = rows[chosen]
            if not len(table):
                continue
            token, count, page, in_page = _one_side(form, tokens, blocks, whole_pages)
            wire_item = _ITEM_BYTES[wire[chosen]]
            row_bytes = table[:, Column.COUNT] * wire_item
            staged = staging_address + begins[chosen][:, None] + row_bytes[:, None] * token
            memory = _addresses(table, regions, page, in_page, side)
            counts = table[:, Column.COUNT, None] * (count if whole_pages else 1)
            step = table[:, (Column.SRC_STEP_BYTES, Column.DST_STEP_BYTES)[side], None]
            dtype = table[:, (Column.SRC_DTYPE, Column.DST_DTYPE)[side], None]
            ends = [
                (memory, step, dtype),
                (staged, wire_item[:, None], wire[chosen][:, None]),
            ]
            (a, a_step, a_dtype), (b, b_step, b_dtype) = ends if side == 0 else ends[::-1]
            columns = (a, b, counts, a_step, b_step, a_dtype, b_dtype)
            parts.append(np.stack([np.broadcast_to(c, memory.shape).ravel() for c in columns]))
    return Copies(*np.concatenate(parts, axis=1))


def _staging(rows: Int64s, pairs: Sequence[GroupPair], tokens: Tokens) -> tuple[Int64s, int]:
    """Where each row begins in the run, and the run's length."""
    per_token = np.array([pair.per_token for pair in pairs], bool)
    repeats = np.where(per_token[rows[:, Column.GROUP_PAIR]], tokens.stop - tokens.start, 1)
    lengths = rows[:, Column.COUNT] * _ITEM_BYTES[_wire_dtypes(rows)] * repeats
    lengths = -(-lengths // STAGING_ALIGN_BYTES) * STAGING_ALIGN_BYTES
    ends = np.cumsum(lengths)
    return ends - lengths, int(ends[-1]) if len(ends) else 0


def _wire_dtypes(rows: Int64s) -> Int64s:
    """The narrower type travels; both sides derive it from the row."""
    src, dst = rows[:, Column.SRC_DTYPE], rows[:, Column.DST_DTYPE]
    return np.where(_ITEM_BYTES[dst] <= _ITEM_BYTES[src], dst, src)


def _itemsizes() -> Int64s:
    table = np.zeros(max(DType) + 1, np.int64)
    for dtype in DType:
        table[dtype] = dtype.itemsize_bytes
    return table


_ITEM_BYTES: Int64s = _itemsizes()


def _by_pair(rows: Int64s, pairs: Sequence[GroupPair]) -> Iterator[tuple[GroupPair, Int64s]]:
    for number, pair in enumerate(pairs):
        table = rows[rows[:, Column.GROUP_PAIR] == number]
        if len(table):
            yield pair, table


def _tokens_joined(rows: Int64s, src: bool) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Rows whose next token follows without a gap on that side: no loop over tokens is needed."""
    stride = rows[:, Column.SRC_TOKEN_STRIDE_BYTES if src else Column.DST_TOKEN_STRIDE_BYTES]
    step = rows[:, Column.SRC_STEP_BYTES if src else Column.DST_STEP_BYTES]
    joined: np.ndarray[tuple[int], np.dtype[np.bool_]] = stride == rows[:, Column.COUNT] * step
    return joined


_ZERO: Int64s = np.zeros(1, np.int64)
_ONE: Int64s = np.ones(1, np.int64)


def _segments(
    pair: GroupPair, tokens: Tokens, src_blocks: Blocks, dst_blocks: Blocks, whole_pages: bool
) -> _Segments:
    src_pages = src_blocks.pages(pair.src, tokens)
    dst_pages = dst_blocks.pages(pair.dst, tokens)
    if not pair.per_token:
        return _Segments(_ZERO, _ONE, src_pages, _ZERO, dst_pages, _ZERO)
    sizes = (pair.src.page_tokens, pair.dst.page_tokens) if whole_pages else (1,)
    token, count = _stretches(tokens, sizes)
    src_index, src_token = np.divmod(token, pair.src.page_tokens)
    dst_index, dst_token = np.divmod(token, pair.dst.page_tokens)
    return _Segments(token, count, src_pages[src_index], src_token, dst_pages[dst_index], dst_token)


def _one_side(
    form: PageForm, tokens: Tokens, blocks: Blocks, whole_pages: bool
) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Tokens since the first, count, page and token inside it, of one side's stretches."""
    pages = blocks.pages(form, tokens)
    if form.page_tokens == 0:
        return _ZERO, _ONE, pages, _ZERO
    token, count = _stretches(tokens, (form.page_tokens,) if whole_pages else (1,))
    index, in_page = np.divmod(token, form.page_tokens)
    return token - tokens.start, count, pages[index], in_page


def _stretches(tokens: Tokens, sizes: Sequence[int]) -> tuple[Int64s, Int64s]:
    """Cut the tokens at every multiple of every size: where stretches begin, how long they are."""
    if tokens.start >= tokens.stop:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    starts = np.array([tokens.start], np.int64)
    for size in dict.fromkeys(sizes):
        first = (tokens.start // size + 1) * size
        edges = np.arange(first, tokens.stop, size, dtype=np.int64)
        starts = np.concatenate([starts, edges])
    if len(set(sizes)) > 1:
        starts = np.unique(starts)
    return starts, np.diff(starts, append=tokens.stop)


def _addresses(
    rows: Int64s, regions: RegionTable, pages: Int64s, tokens: Int64s, side: int
) -> Int64s:
    """Address of every row at every stretch: int64 ``[rows, stretches]``."""
    region = rows[:, (Column.SRC_REGION, Column.DST_REGION)[side]]
    offset = rows[:, (Column.SRC_OFFSET_BYTES, Column.DST_OFFSET_BYTES)[side]]
    token_stride = rows[:, (Column.SRC_TOKEN_STRIDE_BYTES, Column.DST_TOKEN_STRIDE_BYTES)[side]]
    _check_pages(pages, int(regions.page_count[region].min()), side)
    first = regions.base_address[region] + offset
    stride = regions.page_stride_bytes[region]
    table: Int64s = first[:, None] + stride[:, None] * pages + token_stride[:, None] * tokens
    return table


def _check_pages(pages: Int64s, page_count: int, side: int) -> None:
    if len(pages) and not (0 <= int(pages.min()) and int(pages.max()) < page_count):
        wrong = pages[(pages < 0) | (pages >= page_count)][0]
        raise PageRangeError(
            f"{('source', 'destination')[side]} page {wrong} is outside of [0, {page_count})",
            side=("source", "destination")[side],
            page=wrong,
            range=f"[0, {page_count})",
        )
