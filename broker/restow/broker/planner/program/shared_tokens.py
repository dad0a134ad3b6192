"""The tokens that both lists of a pair hold, and what pages cut them into: by arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from restow.broker.layout.rows import Int64s
from restow.broker.layout.token_class import TokenClass, count_shared, cut_runs, shared_runs
from restow.broker.planner.program.pairs import GroupPair, PageForm


def moved_tokens(pair: GroupPair, start: int, stop: int) -> int:
    """How many tokens of ``[start, stop)`` rows of the pair move."""
    return count_shared(pair.src.tokens, pair.dst.tokens, pair.first_token(start, stop), stop)


def cut_shared(
    pair: GroupPair, start: int, stop: int, forms: Sequence[PageForm]
) -> tuple[Int64s, Int64s]:
    """The tokens that move in stretches that follow themselves in a page of each of the ``forms``.

    Returns where each begins, and how many tokens it has: of a side that is not among the forms,
    others may come between these.
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
    """At least as many as both sides hold of ``count`` tokens in a row."""
    return min(_most_held(form.tokens, count) for form in (pair.src, pair.dst))


def most_pages(pair: GroupPair, count: int) -> int:
    """At least as many as the source's pages that hold something of ``count`` tokens in a row."""
    if not pair.per_token:
        return 1
    return 2 + _most_held(pair.src.tokens, count) // pair.src.page_tokens


def most_stretches(pair: GroupPair, count: int) -> int:
    """At least as many stretches as pages and turns of both sides cut ``count`` tokens into."""
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
