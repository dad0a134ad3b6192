"""Which way each row of a program travels: as the operator says, or whatever costs least."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from restow.broker.layout.rows import Int64s
from restow.broker.planner.costs import PricedRows
from restow.broker.planner.ways import WAYS
from restow.broker.planner.ways.way import Sent


def choose_ways(sent: Sent) -> Int64s:
    """For each row the number of the strategy by which it travels.

    Raises `StrategyRefusedError` where the one that is asked for can't serve.
    """
    for way in WAYS:
        if way.strategy is sent.strategy and (ways := way.demanded(sent)) is not None:
            return ways
    ways = _cheapest(sent.priced)
    for way in WAYS:
        ways[way.takes_over(sent, ways)] = way.strategy.number
    return ways


def _cheapest(priced: PricedRows) -> Int64s:
    """The least of what every set of ways costs, each row by the best of the set."""
    offers = [(way, each) for way in WAYS if (each := way.seconds(priced)) is not None]
    each_s = np.array([each for _, each in offers])
    once_s = [way.once_s(priced.costs) for way, _ in offers]
    first, *others = range(len(offers))
    rows = range(len(priced.rows))
    best, least_s = np.zeros(len(rows), np.int64), np.inf
    for count in range(len(offers)):
        for extra in combinations(others, count):
            allowed = np.array([first, *extra])
            ways = allowed[each_s[allowed].argmin(axis=0)]
            total_s = each_s[ways, rows].sum() + sum(once_s[way] for way in np.unique(ways))
            if total_s < least_s:
                best, least_s = ways, total_s
    numbers = np.array([way.strategy.number for way, _ in offers])
    return numbers[best]
