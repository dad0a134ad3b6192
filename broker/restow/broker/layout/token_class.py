"""Token classes: which tokens of a prompt a rank holds under context parallelism."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import numpy as np

from restow.broker.layout.rows import Int64s

Number = TypeVar("Number", int, Int64s)


@dataclass(frozen=True, slots=True)
class TokenClass:
    """The tokens ``t`` with ``t // interleave_tokens % parts == part``, in order.

    A prompt is dealt to ``parts`` ranks, ``interleave_tokens`` at a time (vLLM
    ``cp_kv_cache_interleave_size``). With a single part, a rank holds all tokens.

    >>> TokenClass(2, 1, 3).first_tokens(np.arange(5)).tolist()
    [3, 4, 5, 9, 10]
    """

    parts: int = 1
    part: int = 0
    interleave_tokens: int = 1

    @property
    def period_tokens(self) -> int:
        """Return the number of tokens after which the rank has its turn again."""
        return self.parts * self.interleave_tokens

    def before(self, token: Number) -> Number:
        """Return how many of the rank's tokens precede ``token``: its place if the rank holds it.

        >>> TokenClass(2, 1, 3).before(9), TokenClass(2, 1, 3).before(8)
        (3, 3)
        """
        if self.parts == 1:
            return token
        turn, rest = token // self.period_tokens, token % self.period_tokens
        most, mine = self.interleave_tokens, rest - self.part * self.interleave_tokens
        held = min(max(mine, 0), most) if isinstance(mine, int) else np.clip(mine, 0, most)
        return turn * most + held

    def first_tokens(self, places: Int64s) -> Int64s:
        """Return the tokens at ``places`` among the rank's tokens."""
        turn, rest = np.divmod(places, self.interleave_tokens)
        tokens: Int64s = (turn * self.parts + self.part) * self.interleave_tokens + rest
        return tokens

    def shared(self, other: TokenClass) -> Fraction:
        """Return the share of a long prompt that both classes hold.

        >>> TokenClass(2, 1).shared(TokenClass(4, 3)), TokenClass(2, 1).shared(TokenClass(4, 2))
        (Fraction(1, 4), Fraction(0, 1))
        """
        if self.parts == 1 or other.parts == 1:
            return Fraction(1, self.parts * other.parts)
        mine, others = self.interleave_tokens, other.interleave_tokens
        step = math.gcd(self.period_tokens, other.period_tokens)
        # A turn of ``other`` begins ``apart`` tokens after a turn of this class. ``apart`` takes
        # every value congruent to the value below modulo ``step`` equally often. Turns meet if
        # ``-mine < apart < others``.
        apart = self.part * mine - other.part * others
        first = 1 - mine + (apart - 1 + mine) % step
        count = max(-(-(others - first) // step), 0)
        tokens = (
            _ramps(first + mine, step, count)
            - _ramps(first, step, count)
            - _ramps(first + mine - others, step, count)
            + _ramps(first - others, step, count)
        )
        return Fraction(tokens, math.lcm(self.period_tokens, other.period_tokens))


ALL_TOKENS = TokenClass()


def shared_runs(
    first: TokenClass, second: TokenClass, start: int, stop: int
) -> tuple[Int64s, Int64s]:
    """Return begins and ends of the runs of tokens in ``[start, stop)`` that both classes hold.

    Tokens of a run are consecutive in both classes.

    >>> [ends.tolist() for ends in shared_runs(TokenClass(2, 1, 3), TokenClass(2, 0, 2), 0, 12)]
    [[4, 9], [6, 10]]
    """
    bounds = slice(0, int(start < stop))
    whole = np.array([start], np.int64)[bounds], np.array([stop], np.int64)[bounds]
    rarer, denser = sorted((first, second), key=lambda tokens: -tokens.parts)  # less to cut
    return _turns(denser, *_turns(rarer, *whole))


def _turns(tokens: TokenClass, begins: Int64s, ends: Int64s) -> tuple[Int64s, Int64s]:
    """Return the parts of token runs that belong to a class."""
    if tokens.parts == 1 or not len(begins):
        return begins, ends
    run, first = tokens.interleave_tokens, tokens.part * tokens.interleave_tokens
    turn = (begins - first - run) // tokens.period_tokens + 1
    counts = (ends - 1 - first) // tokens.period_tokens - turn + 1
    index, turn = _counted(turn, counts)
    starts = turn * tokens.period_tokens + first
    return np.maximum(starts, begins[index]), np.minimum(starts + run, ends[index])


def _counted(first: Int64s, counts: Int64s) -> tuple[Int64s, Int64s]:
    """Expand ranges of integers; return the index of each value's range, and the values."""
    index = np.repeat(np.arange(len(first)), counts)
    return index, first[index] + np.arange(len(index)) - (np.cumsum(counts) - counts)[index]


def cut_runs(begins: Int64s, ends: Int64s, places: Int64s, size: int) -> tuple[Int64s, Int64s]:
    """Cut runs of tokens at each multiple of ``size``, counted from ``places`` of their begins."""
    if not len(begins):
        return begins, ends
    first, last = places // size, (places + ends - begins - 1) // size
    counts = last - first + 1
    if (counts == 1).all():
        return begins, ends
    index, piece = _counted(first, counts)
    edges = (begins - places)[index] + piece * size
    return np.maximum(edges, begins[index]), np.minimum(edges + size, ends[index])


def count_shared(first: TokenClass, second: TokenClass, start: int, stop: int) -> int:
    """Return how many tokens of ``[start, stop)`` both classes hold."""
    if start >= stop:
        return 0
    if first == second or first.parts == 1:
        return second.before(stop) - second.before(start)
    if second.parts == 1:
        return first.before(stop) - first.before(start)
    begins, ends = shared_runs(first, second, start, stop)
    return int((ends - begins).sum())


def _ramps(first: int, step: int, count: int) -> int:
    """Return the sum of the positive numbers among ``count`` numbers from ``first`` on."""
    skipped = min(max(-(first // step), 0), count)
    left = count - skipped
    return left * (first + skipped * step) + step * (left * (left - 1) // 2)
