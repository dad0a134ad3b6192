"""Which way each row of a program travels: as the operator says, or whatever costs least."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from restow.broker.errors import StrategyRefusedError
from restow.broker.layout import DType
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.cost_model import CostModel
from restow.broker.planner.costs import (
    Seconds,
    copy_seconds,
    descriptors,
    packing_seconds,
    page_counts,
    row_costs,
    wire_bytes,
)
from restow.broker.planner.interleave import Chunks
from restow.broker.planner.program import Column, GroupPair, SpanColumn
from restow.broker.planner.spans import Spans
from restow.broker.planner.strategy import CHOOSING, WAYS, Strategy

_SLICES, _WHOLE, _PACK, _INTERLEAVE = (WAYS.index(way) for way in WAYS)


def choose_ways(
    rows: Int64s, pairs: Sequence[GroupPair], strategy: Strategy, costs: CostModel
) -> Int64s:
    """For each row the index of its way in `WAYS`; ``interleave`` is left to `interleaves`.

    Raises `StrategyRefusedError` where ``slices`` would have to change a dtype, or where
    ``interleave`` finds no snapshot.
    """
    casts: Bools = rows[:, Column.SRC_DTYPE] != rows[:, Column.DST_DTYPE]
    if strategy in CHOOSING:
        return _cheapest(rows, pairs, casts, costs)
    if strategy is Strategy.SLICES and casts.any():
        row = rows[int(np.argmax(casts))]
        raise StrategyRefusedError(
            f"slices can't turn {DType(row[Column.SRC_DTYPE]).label} into "
            f"{DType(row[Column.DST_DTYPE]).label}: use whole, pack or auto",
            strategy=strategy,
        )
    if strategy is Strategy.INTERLEAVE:
        if all(pair.per_token for pair in pairs):
            raise StrategyRefusedError(
                "interleave permutes states, and nothing that is moved is one: use pack or auto",
                strategy=strategy,
            )
        return np.where(snapshots(rows, pairs), _INTERLEAVE, _PACK)
    return np.full(len(rows), WAYS.index(strategy), np.int64)


def snapshots(rows: Int64s, pairs: Sequence[GroupPair]) -> Bools:
    """Mask of the rows that are copied once, however long the prompt."""
    per_token = np.array([pair.per_token for pair in pairs], np.bool_)
    mask: Bools = ~per_token[rows[:, Column.GROUP_PAIR]]
    return mask


def interleaves(
    rows: Int64s, chunks: Chunks, pairs: Sequence[GroupPair], readers: int, costs: CostModel
) -> bool:
    """Whether ``rows`` that would be packed for each of ``readers`` cost less through ``chunks``.

    A source gathers for one reader after the other, and the last one waits for all.
    """
    packed_s, there_s, back_s = (
        float(copy_seconds(table, pairs, costs.nominal_tokens, costs).sum())
        for table in (rows, chunks.interleaved, chunks.restored)
    )
    once_s = costs.seconds_per_launch
    return once_s + readers * there_s + back_s < readers * (once_s + packed_s) + packed_s


def _cheapest(rows: Int64s, pairs: Sequence[GroupPair], casts: Bools, costs: CostModel) -> Int64s:
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
                best, least_s = ways, total_s
    return best


def _seconds(rows: Int64s, pairs: Sequence[GroupPair], casts: Bools, costs: CostModel) -> Seconds:
    """What each row costs by each way, ``[len(WAYS), rows]``."""
    _, sizes = row_costs(rows, pairs, costs.nominal_tokens)
    counts = descriptors(rows, pairs, costs.nominal_tokens)
    reading = sizes / costs.read_bytes_per_second
    copying = copy_seconds(rows, pairs, costs.nominal_tokens, costs)
    alone = counts * costs.seconds_per_descriptor + reading
    sent = wire_bytes(rows, pairs, costs.nominal_tokens) / costs.read_bytes_per_second
    table = np.empty((len(WAYS), len(rows)))
    table[_SLICES] = np.where(casts, np.inf, alone)
    table[[_WHOLE, _INTERLEAVE]] = np.inf
    table[_PACK] = sent + 2 * packing_seconds(rows, pairs, costs.nominal_tokens, costs)
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
