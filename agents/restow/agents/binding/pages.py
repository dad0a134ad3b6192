"""Tokens in memory: registered regions, lists of block ids, and stretches of tokens in pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from restow.broker.errors import PageCountError
from restow.broker.layout import ALL_TOKENS, TokenClass
from restow.broker.layout.rows import Int64s
from restow.broker.layout.values import ITEM_BYTES
from restow.broker.planner.program import Column, GroupPair, PageForm, moved_tokens

MAX_PAGES = 1 << 22


@dataclass(frozen=True, slots=True)
class RegionTable:
    """The regions of one rank in its layout's order, as int64 arrays with an entry a region."""

    base_address: Int64s
    page_stride_bytes: Int64s
    page_count: Int64s


@dataclass(frozen=True, slots=True)
class TokenRange:
    """The tokens ``[start, stop)`` that per-token rows move."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block ids by group, int64."""

    by_group: Mapping[str, Int64s]

    def pages(self, form: PageForm, tokens: TokenRange) -> Int64s:
        """Return page ids from token 0 on, at least as many as ``tokens`` need.

        Raises `PageCountError` if the pages do not reach ``tokens``, or are more than `MAX_PAGES`.
        """
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
            return ids
        block_tokens = form.pages_per_block * form.page_tokens * form.tokens.parts
        if len(ids) * block_tokens < tokens.stop:
            raise PageCountError(
                f"group {form.group}: {len(ids)} blocks of {block_tokens} tokens do not hold "
                f"{tokens.stop}",
                group=form.group,
            )
        if form.pages_per_block == 1:
            return ids
        # More blocks than the tokens need must not cost anything, even if each has many pages.
        needed = -(-form.tokens.before(tokens.stop) // form.page_tokens)
        if needed > MAX_PAGES:
            raise PageCountError(
                f"group {form.group}: {tokens.stop} tokens lie in more than {MAX_PAGES} pages",
                group=form.group,
            )
        ids = ids[: -(-needed // form.pages_per_block)]
        pages = (ids[:, None] * form.pages_per_block + np.arange(form.pages_per_block)).ravel()
        return pages[:needed]

    def listed(self, form: PageForm, tokens: TokenRange) -> PageList:
        """Return the ids of `pages`, with the tokens that each page holds."""
        return PageList(self.pages(form, tokens), form.page_tokens, tokens=form.tokens)


@dataclass(frozen=True, slots=True)
class Stretches:
    """Runs of tokens that each stay inside one page, as arrays ``[stretches]``.

    ``first`` counts from token 0 of the prompt. A snapshot is one stretch of one token. If ranks
    share tokens out, other ranks' tokens may lie between the ``count`` tokens of a stretch.
    ``page_tokens`` is not 0 if the stretches are consecutive pages of that size, of which only
    the first and the last may be cut.
    """

    first: Int64s
    count: Int64s
    page_tokens: int = 0


SNAPSHOT = Stretches(np.zeros(1, np.int64), np.ones(1, np.int64))
"""The beginning of every listed page: of a snapshot's one page, or of whole pages."""


@dataclass(frozen=True, slots=True)
class PageList:
    """The page of each token: from ``first_token`` on, each of ``ids`` holds ``page_tokens``.

    ``first_token`` counts only tokens that the pages hold (``tokens``). With ``page_tokens`` 0 a
    single page holds all tokens that move, one after another. With ``ids`` None that is page 0.
    """

    ids: Int64s | None
    page_tokens: int = 0
    first_token: int = 0
    tokens: TokenClass = ALL_TOKENS

    def holding(self, stretches: Stretches) -> tuple[Int64s | None, Int64s | None]:
        """Return the page of each stretch and its first token inside it; None means all 0."""
        if stretches is SNAPSHOT:
            return self.ids, None
        if self.ids is None or self.page_tokens == 0:
            return self.ids, np.cumsum(stretches.count) - stretches.count
        if self.page_tokens != stretches.page_tokens:
            places = self.tokens.before(stretches.first) - self.first_token
            index, in_page = np.divmod(places, self.page_tokens)
            return self.ids[index], in_page
        place = self.tokens.before(int(stretches.first[0])) - self.first_token
        first_page, cut = divmod(place, self.page_tokens)
        ids = self.ids[first_page : first_page + len(stretches.first)]
        if not cut:
            return ids, None
        in_page = np.zeros(len(ids), np.int64)
        in_page[0] = cut
        return ids, in_page


def cut_tokens(tokens: TokenRange, page_tokens: Sequence[int]) -> Stretches:
    """Cut the tokens at every multiple of every page size.

    >>> cut_tokens(TokenRange(2, 9), (4, 3)).first.tolist()
    [2, 3, 4, 6, 8]
    """
    if tokens.start >= tokens.stop:
        return Stretches(np.empty(0, np.int64), np.empty(0, np.int64))
    sizes = set(page_tokens)
    if len(sizes) == 1:
        return _cut_pages(tokens, *sizes)
    edges = [np.array([tokens.start], np.int64)]
    for size in sizes:
        first = (tokens.start // size + 1) * size
        edges.append(np.arange(first, tokens.stop, size, dtype=np.int64))
    starts = np.unique(np.concatenate(edges))
    return Stretches(starts, np.append(starts[1:], tokens.stop) - starts)


def _cut_pages(tokens: TokenRange, size: int) -> Stretches:
    """Cut the tokens at every multiple of one size."""
    first = np.arange(tokens.start // size * size, tokens.stop, size, dtype=np.int64)
    count = np.full(len(first), size, np.int64)
    first[0] = tokens.start
    count[0] -= tokens.start % size
    count[-1] = tokens.stop - first[-1]
    return Stretches(first, count, size)


STAGING_ALIGN_BYTES = 16
"""Alignment of every row of a run, and of every page of a span."""


def staged_bytes(rows: Int64s, pairs: Sequence[GroupPair], tokens: TokenRange) -> int:
    """Return the length of the run into which ``rows`` are gathered."""
    return row_begins(rows, pairs, tokens)[1]


def row_begins(rows: Int64s, pairs: Sequence[GroupPair], tokens: TokenRange) -> tuple[Int64s, int]:
    """Return the offset of each row in the run, and the run's length."""
    entries = [
        moved_tokens(pair, tokens.start, tokens.stop) if pair.per_token else 1 for pair in pairs
    ]
    repeats = np.array(entries, np.int64)[rows[:, Column.GROUP_PAIR]]
    lengths = rows[:, Column.COUNT] * ITEM_BYTES[wire_dtypes(rows)] * repeats
    return _consecutive(_aligned(lengths))


def wire_dtypes(rows: Int64s) -> Int64s:
    """Return the type in which each row travels: the narrower type, so that both sides agree."""
    src, dst = rows[..., Column.SRC_DTYPE], rows[..., Column.DST_DTYPE]
    return np.where(ITEM_BYTES[dst] <= ITEM_BYTES[src], dst, src)


NO_REGIONS = RegionTable(*(np.empty(0, np.int64) for _ in range(3)))


def staged_spans(
    spans: Int64s, pairs: Sequence[GroupPair], tokens: TokenRange, staging_address: int = 0
) -> tuple[RegionTable, int]:
    """Return the regions of spans in a run at ``staging_address``, and the run's length.

    The pages of a span are consecutive, and so are the spans. So staging is memory with regions
    and pages like any other: span ``i`` is region ``i``.
    """
    if not len(spans):  # most programs have no spans
        return NO_REGIONS, 0
    counts = [len(pair.src_pages(tokens.start, tokens.stop)) for pair in pairs]
    pages = np.array(counts, np.int64)[spans[:, Column.GROUP_PAIR]]
    strides = _aligned(spans[:, Column.COUNT])
    begins, length = _consecutive(pages * strides)
    return RegionTable(begins + staging_address, strides, pages), length


def _consecutive(length_bytes: Int64s) -> tuple[Int64s, int]:
    """Return the offset of each item if all are consecutive, and the end of the last."""
    ends = np.cumsum(length_bytes)
    return ends - length_bytes, int(ends[-1]) if len(ends) else 0


def _aligned(length_bytes: Int64s) -> Int64s:
    return -(-length_bytes // STAGING_ALIGN_BYTES) * STAGING_ALIGN_BYTES
