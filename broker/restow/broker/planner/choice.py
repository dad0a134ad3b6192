"""Which way each row of a program travels: as the operator says, or whatever costs least."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from restow.broker.errors import StrategyRefusedError
from restow.broker.layout import DType
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.costs import page_counts, row_costs, wire_bytes
from restow.broker.planner.program import Column, GroupPair, SpanColumn
from restow.broker.planner.spans import Spans
from restow.broker.planner.strategy import WAYS, CostModel, Strategy

Seconds: TypeAlias = npt.NDArray[np.float64]
_SLICES, _WHOLE, _PACK = (WAYS.index(way) for way in WAYS)


def choose_ways(
    rows: Int64s, pairs: Sequence[GroupPair], strategy: Strategy, costs: CostModel
) -> Int64s:
    """For each row the index of its way in `WAYS`.

    Raises `StrategyRefusedError` where ``slices`` would have to change a dtype.
    """
    casts: Bools = rows[:, Column.SRC_DTYPE] != rows[:, Column.DST_DTYPE]
    if strategy in (Strategy.AUTO, Strategy.RECOMPUTE):
        return _cheapest(rows, pairs, casts, costs)[0]
    if strategy is Strategy.SLICES and casts.any():
        row = rows[int(np.argmax(casts))]
        raise StrategyRefusedError(
            f"slices can't turn {DType(row[Column.SRC_DTYPE]).label} into "
            f"{DType(row[Column.DST_DTYPE]).label}: use whole, pack or auto",
            strategy=strategy,
        )
    return np.full(len(rows), WAYS.index(strategy), np.int64)


def least_seconds(rows: Int64s, pairs: Sequence[GroupPair], costs: CostModel) -> float:
    """What ``rows`` cost when `Strategy.AUTO` chooses their ways."""
    casts: Bools = rows[:, Column.SRC_DTYPE] != rows[:, Column.DST_DTYPE]
    return _cheapest(rows, pairs, casts, costs)[1]


def _cheapest(
    rows: Int64s, pairs: Sequence[GroupPair], casts: Bools, costs: CostModel
) -> tuple[Int64s, float]:
    """The least of what every set of ways costs, each row by the best of the set."""
    each = _seconds(rows, pairs, casts, costs)
    once = {
        _WHOLE: costs.seconds_per_launch,
        _PACK: costs.seconds_per_stage + 2 * costs.seconds_per_launch,
    }
    numbers = range(len(rows))
    best, least_s = np.zeros(len(rows), np.int64), np.inf
    for count in range(len(once) + 1):
        for extra in combinations(once, count):
            allowed = np.array([_SLICES, *extra])
            ways = allowed[each[allowed].argmin(axis=0)]
            used = set(np.unique(ways).tolist())
            total_s = each[ways, numbers].sum() + sum(once[way] for way in used & once.keys())
            if total_s < least_s:
                best, least_s = ways, float(total_s)
    return best, least_s


def _seconds(rows: Int64s, pairs: Sequence[GroupPair], casts: Bools, costs: CostModel) -> Seconds:
    """What each row costs by each way, ``[len(WAYS), rows]``."""
    descriptors, sizes = row_costs(rows, pairs, costs.nominal_tokens)
    reading = sizes / costs.read_bytes_per_second
    copying = sizes / costs.copy_bytes_per_second + descriptors * costs.seconds_per_copy
    alone = descriptors * costs.seconds_per_descriptor + reading
    sent = wire_bytes(rows, pairs, costs.nominal_tokens) / costs.read_bytes_per_second
    table = np.empty((len(WAYS), len(rows)))
    table[_SLICES] = np.where(casts, np.inf, alone)
    table[_WHOLE] = np.inf
    table[_PACK] = sent + 2 * copying
    # A piece so large that copying it once costs more than its descriptor is read in place.
    small = np.flatnonzero(casts | (alone > reading + copying))
    table[_WHOLE, small] = copying[small] + _shared(rows[small], pairs, alone[small], costs)
    return table


def _shared(
    rows: Int64s, pairs: Sequence[GroupPair], weights: Seconds, costs: CostModel
) -> Seconds:
    """Each row's share of the reading of its span, in proportion to ``weights``.

    So all rows of a span gain or lose alike by it.
    """
    spans = Spans.of(rows, pairs, costs.gap_bytes)
    pages = page_counts(pairs, costs.nominal_tokens)[spans.table[:, SpanColumn.GROUP_PAIR]]
    lengths = spans.table[:, SpanColumn.LENGTH_BYTES]
    seconds = costs.seconds_per_descriptor + lengths / costs.read_bytes_per_second
    total = np.bincount(spans.span_of, weights, minlength=len(spans.table))
    shares: Seconds = weights * (pages * seconds / total)[spans.span_of]
    return shares
