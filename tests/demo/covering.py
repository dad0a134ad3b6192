"""Few rows in which every pair of values of two factors occurs.

They show what a full product would show of any two factors together, without its size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

Row = dict[str, object]
Pair = tuple[tuple[str, object], tuple[str, object]]


def every_pair(factors: Mapping[str, Sequence[object]]) -> list[Pair]:
    """Return all pairs of values of two factors, in the order of the factors."""
    return [
        ((one, a), (other, b))
        for one, other in itertools.combinations(factors, 2)
        for a in factors[one]
        for b in factors[other]
    ]


def covering_rows(
    factors: Mapping[str, Sequence[object]], allowed: Callable[[Row], bool]
) -> list[Row]:
    """Return rows with a value of each factor that hold every pair; greedy, so few but not fewest.

    ``allowed`` judges rows that still lack factors, too. It may forbid combinations of three or
    more values, never a pair, and must always leave a value for the next factor.
    """
    missing = dict.fromkeys(every_pair(factors))
    rows = []
    while missing:
        (one, a), (other, b) = next(iter(missing))
        row: Row = {one: a, other: b}
        for name, values in factors.items():
            if name not in row:
                fitting = [value for value in values if allowed({**row, name: value})]
                gains = [_gain(row, (name, value), missing) for value in fitting]
                row[name] = fitting[gains.index(max(gains))]
        rows.append(row)
        for found in itertools.combinations(((name, row[name]) for name in factors), 2):
            missing.pop(found, None)
    return rows


def _gain(row: Row, item: tuple[str, object], missing: Mapping[Pair, None]) -> int:
    """Return how many missing pairs a value makes with those already chosen."""
    return sum((item, one) in missing or (one, item) in missing for one in row.items())
