"""Pairs of lists of block ids, a list on each side, that rows use together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from restow.broker.layout.rows import Int64s
from restow.broker.layout.token_class import (
    ALL_TOKENS,
    TokenClass,
    count_shared,
    cut_runs,
    shared_runs,
)


@dataclass(frozen=True, slots=True)
class PageForm:
    """How a side's list of block ids addresses tokens; a ``page_tokens`` of 0 means snapshots.

    The pages hold only the tokens of the class ``tokens``. With ``whole_blocks``, a block that is
    written at all is written from its beginning.
    """

    group: str
    page_tokens: int
    pages_per_block: int
    tokens: TokenClass = ALL_TOKENS
    whole_blocks: bool = False

    @property
    def block_tokens(self) -> int:
        """Return the tokens that a block spans, with those of other ranks; 0: a snapshot."""
        return self.page_tokens * self.pages_per_block * self.tokens.parts


NO_LIST = ""
"""The group of a missing list: rows that are zeroed need no source."""


@dataclass(frozen=True, slots=True)
class GroupPair:
    """A list of block ids on each side that rows use together.

    The source's list may be missing (`NO_LIST`) if nothing is read. Rows repeat for the tokens that
    both sides hold. With ``window_tokens``, they repeat only for that many tokens before the end; 0
    means all. A destination with ``whole_blocks`` also gets the earlier tokens of the first block.
    """

    src: PageForm
    dst: PageForm
    window_tokens: int = 0

    @property
    def has_source(self) -> bool:
        """Return whether the source has a list."""
        return self.src.group != NO_LIST

    @property
    def per_token(self) -> bool:
        """Return whether rows of this pair repeat for every token."""
        return self.src.page_tokens > 0

    @property
    def alike(self) -> bool:
        """Return whether both sides hold the same tokens, and so in the same order."""
        return self.src.tokens == self.dst.tokens

    def first_token(self, start: int, stop: int) -> int:
        """Return the first token of ``[start, stop)`` that moves.

        >>> kv, kept = PageForm("kv", 16, 1), PageForm("kv", 16, 1, whole_blocks=True)
        >>> GroupPair(kv, kv, 31).first_token(0, 57), GroupPair(kv, kept, 31).first_token(0, 57)
        (26, 16)
        """
        if not self.window_tokens:
            return start
        first = stop - self.window_tokens
        if self.dst.whole_blocks:
            first -= first % self.dst.block_tokens
        return max(start, first)

    def src_pages(self, start: int, stop: int) -> range:
        """Return the source's pages, counted from token 0, that hold what moves of a range.

        If D's ranks divide the tokens, some of these pages may hold nothing that moves.

        >>> GroupPair(PageForm("kv", 16, 1), PageForm("kv", 8, 1)).src_pages(20, 50)
        range(1, 4)
        """
        if not self.per_token:
            return range(1)
        held, size = self.src.tokens, self.src.page_tokens
        begin = self.first_token(start, stop)
        first, last = held.before(begin), held.before(stop)
        if first >= last or not (self.alike or count_shared(held, self.dst.tokens, begin, stop)):
            return range(0)
        return range(first // size, -(-last // size))


def moved_tokens(pair: GroupPair, start: int, stop: int) -> int:
    """Return how many tokens of ``[start, stop)`` rows of the pair move."""
    return count_shared(pair.src.tokens, pair.dst.tokens, pair.first_token(start, stop), stop)


def cut_shared(
    pair: GroupPair, start: int, stop: int, forms: Sequence[PageForm]
) -> tuple[Int64s, Int64s]:
    """Cut the tokens that move into stretches that are contiguous in a page of each of ``forms``.

    Returns where each stretch begins, and its number of tokens. On a side that is not among the
    forms, other tokens may lie between them.
    """
    begins, ends = shared_runs(
        pair.src.tokens, pair.dst.tokens, pair.first_token(start, stop), stop
    )
    for form in forms:
        begins, ends = cut_runs(begins, ends, form.tokens.before(begins), form.page_tokens)
    counts = ends - begins
    goes_on = np.ones(max(len(begins) - 1, 0), np.bool_)
    for form in forms:
        place = form.tokens.before(begins)
        goes_on &= place[1:] == place[:-1] + counts[:-1]
        goes_on &= place[1:] % form.page_tokens != 0
    if not goes_on.any():
        return begins, counts
    first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    return begins[first], np.add.reduceat(counts, first)


def most_tokens(pair: GroupPair, count: int) -> int:
    """Return an upper bound of the tokens that both sides hold of ``count`` consecutive tokens."""
    return min(_most_held(form.tokens, count) for form in (pair.src, pair.dst))


def most_pages(pair: GroupPair, count: int) -> int:
    """Return an upper bound of the source's pages with any of ``count`` consecutive tokens."""
    if not pair.per_token:
        return 1
    return 2 + _most_held(pair.src.tokens, count) // pair.src.page_tokens


def most_stretches(pair: GroupPair, count: int) -> int:
    """Return an upper bound of the stretches into which both sides cut ``count`` tokens."""
    if not pair.per_token:
        return 1
    moved = most_tokens(pair, count)
    stretches = 2 + sum(moved // form.page_tokens for form in (pair.src, pair.dst))
    if pair.alike:
        return stretches
    rarer, other = sorted((pair.src.tokens, pair.dst.tokens), key=lambda one: -one.parts)
    each = rarer.interleave_tokens // other.period_tokens + 2 if other.parts > 1 else 1
    return min(moved, stretches + (count // rarer.period_tokens + 2) * each)


def _most_held(tokens: TokenClass, count: int) -> int:
    return min(count, (count // tokens.period_tokens + 2) * tokens.interleave_tokens)
