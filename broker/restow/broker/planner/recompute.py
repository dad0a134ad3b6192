"""Rebuilding conv windows at the destination instead of sending them.

A conv window holds the in-projection of the last ``K-1`` hidden vectors that the mixer read. Where
P keeps these vectors (its layout's ``inputs``) and a rank of D offers its slice of the weights
(``projections``), the rank reads the vectors, which are the same for all of its fields, and
multiplies. It reads ``(K-1) * hidden`` elements a layer in place of its share of
``(K-1) * (inner + 2 * groups * state)``; so D's ranks save bytes as long as each holds more
channels than the model is wide.

The window comes out as P would have sent it if both compute alike: the product is made in the type
of the weights, which must be that of the inputs, and must lose nothing in P's conv type that D's
would keep.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from restow.broker.errors import StrategyRefusedError, TooManyPiecesError
from restow.broker.layout import Projection, RankLayout, Shard
from restow.broker.layout.rows import MAX_ROWS, Int64s, cut_rows
from restow.broker.layout.span import overlap
from restow.broker.planner.move import Move
from restow.broker.planner.plan import Plan, spread
from restow.broker.planner.program import (
    ProjectColumn,
    SpanColumn,
    no_projections,
    no_spans,
)
from restow.broker.planner.spans import SPAN_ALIGN_BYTES
from restow.broker.planner.strategy import Strategy
from restow.broker.planner.table import ITEM_BYTES, Cutter

MAX_COMPARED = 1 << 20
"""Projections with the moves of their fields, in one plan: bounded in time."""
NO_INPUTS = "P keeps no mixer inputs"
NO_WEIGHTS = "D offers no in-projection weights"


@dataclass(frozen=True, slots=True)
class InputRead:
    """An input that a destination rank reads whole, and the ranks that could have served it."""

    shard: Shard
    src_rank: int
    replicas: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What one destination rank rebuilds: the moves that it spares, and what it reads for them.

    ``spans`` are those of the inputs, ``projected`` names them by their numbers among these.
    """

    moves: tuple[Move, ...] = ()
    inputs: tuple[InputRead, ...] = ()
    spans: Int64s = field(default_factory=no_spans)
    projected: Int64s = field(default_factory=no_projections)

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that are rebuilt, of which some also arrive in part where ranks hold more."""
        return tuple(dict.fromkeys(move.field for move in self.moves))

    def without(self, moves: tuple[Move, ...]) -> tuple[Move, ...]:
        """The moves that remain."""
        if not self.moves:
            return moves
        spared = {(move.field, move.box) for move in self.moves}
        return tuple(move for move in moves if (move.field, move.box) not in spared)

    @property
    def weight_bytes(self) -> int:
        """The weights that are multiplied."""
        sizes = self.projected[:, [ProjectColumn.CHANNELS, ProjectColumn.HIDDEN]].prod(axis=1)
        return int((sizes * ITEM_BYTES[self.projected[:, ProjectColumn.DTYPE]]).sum())


@dataclass(frozen=True, slots=True)
class _Found:
    """Weights that can be used, the shard that is their product, and the moves that this spares."""

    weights: Projection
    shard: Shard
    moves: tuple[Move, ...]


class Recompute:
    """What all ranks of a plan's destination could rebuild."""

    def __init__(self, plan: Plan) -> None:
        """Find the projections that can be served, and for each a rank of P to read from.

        Raises `TooManyPiecesError`.
        """
        self._inputs = {
            (rank.rank, shard.field): shard for rank in plan.source.ranks for shard in rank.inputs
        }
        holders: dict[str, list[int]] = defaultdict(list)
        for number, name in self._inputs:
            holders[name].append(number)
        self._holders = {name: tuple(sorted(ranks)) for name, ranks in holders.items()}
        moves: dict[tuple[int, str], list[Move]] = defaultdict(list)
        for move in plan.moves:
            moves[move.dst_rank, move.field].append(move)
        self._taps = {
            one.name: one.axes.index("tap")
            for one in plan.destination.model.fields
            if "tap" in one.axes
        }
        self._found: dict[int, list[_Found]] = {}
        readers: dict[str, dict[int, None]] = defaultdict(dict)
        compared = 0
        self.obstacle = "" if self._inputs else NO_INPUTS
        for rank in plan.destination.ranks:
            shards = {(shard.field, shard.box): shard for shard in rank.shards}
            regions = {region.name: region for region in rank.regions}
            for weights in rank.projections:
                shard = shards[weights.field, weights.box]
                compared += len(moves[rank.rank, weights.field])
                if compared > MAX_COMPARED:
                    raise TooManyPiecesError(
                        f"more than {MAX_COMPARED} projections and moves would have to be compared",
                        field=weights.field,
                    )
                mine = tuple(
                    move
                    for move in moves[rank.rank, weights.field]
                    if overlap(move.box, weights.box) is not None
                )
                why = self._why_not(weights, mine)
                why = why or _uneven(shard, regions[shard.region].page_stride_bytes)
                if why:
                    self.obstacle = self.obstacle or why
                else:
                    self._found.setdefault(rank.rank, []).append(_Found(weights, shard, mine))
                    readers[weights.input][rank.rank] = None
        if not any(rank.projections for rank in plan.destination.ranks):
            self.obstacle = " and ".join(filter(None, [self.obstacle, NO_WEIGHTS]))
        self._sources = {
            (name, reader): spread(self._holders[name], index, len(found))
            for name, found in readers.items()
            for index, reader in enumerate(sorted(found))
        }

    def __bool__(self) -> bool:
        """Whether there is anything to rebuild."""
        return bool(self._found)

    def _why_not(self, weights: Projection, moves: Sequence[Move]) -> str:
        holders = self._holders.get(weights.input)
        if not holders:
            return f"{NO_INPUTS} {weights.input}"
        kept = self._inputs[holders[0], weights.input].dtype
        if kept is not weights.dtype:
            return (
                f"field {weights.field}: P's inputs are {kept.label}, D's weights "
                f"{weights.dtype.label}, so D would compute otherwise than P did"
            )
        for move in moves:
            if not (move.src.dtype.holds(weights.dtype) or move.src.dtype is move.dst.dtype):
                return (
                    f"field {move.field}: P keeps the {weights.dtype.label} product as "
                    f"{move.src.dtype.label}, D as {move.dst.dtype.label}, with digits that "
                    f"P has rounded away"
                )
        return ""

    def rebuilt(self, rank: RankLayout, cutter: Cutter) -> Rebuilt:
        """What ``rank`` can rebuild. Raises `TooManyPiecesError`."""
        spans: dict[str, int] = {}
        reads: list[InputRead] = []
        span_rows: list[tuple[int, ...]] = []
        tables = [no_projections()]
        found = self._found.get(rank.rank, [])
        for one in found:
            weights, shard = one.weights, one.shard
            src_rank = self._sources[weights.input, rank.rank]
            kept = self._inputs[src_rank, weights.input]
            pair = cutter.pair_number(src_rank, kept.region, rank.rank, shard.region)
            if weights.input not in spans:
                spans[weights.input] = len(span_rows)
                start = kept.offset_bytes // SPAN_ALIGN_BYTES * SPAN_ALIGN_BYTES
                stop = kept.offset_bytes + _reach_bytes(kept)
                region = cutter.source_region(src_rank, kept.region)
                span_rows.append((src_rank, pair, region, start, stop - start))
                replicas = self._holders[weights.input]
                reads.append(InputRead(kept, src_rank, replicas, stop - start))
            tap = self._taps[weights.field]
            tables.append(_rows(rank, one, tap, kept, spans[weights.input], pair))
        projected = _joined(np.concatenate(tables))
        if len(projected) > MAX_ROWS:
            raise TooManyPiecesError(f"projections fall into more than {MAX_ROWS} pieces")
        return Rebuilt(
            tuple(move for one in found for move in one.moves),
            tuple(reads),
            np.array(span_rows, np.int64).reshape(-1, len(SpanColumn)),
            projected,
        )


def recompute_of(plan: Plan, strategy: Strategy) -> Recompute | None:
    """What the strategy lets a plan rebuild, if anything.

    Raises `StrategyRefusedError` for ``recompute`` with nothing to rebuild, `TooManyPiecesError`.
    """
    offered = any(rank.projections for rank in plan.destination.ranks)
    if strategy is not Strategy.RECOMPUTE and (strategy is not Strategy.AUTO or not offered):
        return None
    found = Recompute(plan)
    if strategy is Strategy.RECOMPUTE and not found:
        raise StrategyRefusedError(
            f"no conv window can be rebuilt at D: {found.obstacle}", strategy=strategy
        )
    return found or None


def _reach_bytes(shard: Shard) -> int:
    """From the first to one past the last byte of a shard in its page."""
    strides = zip(shard.box, shard.strides_bytes, strict=True)
    return sum((span.size - 1) * stride for span, stride in strides) + shard.dtype.itemsize_bytes


def _uneven(shard: Shard, page_stride_bytes: int) -> str:
    item = shard.dtype.itemsize_bytes
    if any(place % item for place in (shard.offset_bytes, *shard.strides_bytes, page_stride_bytes)):
        return f"field {shard.field}: D's numbers do not lie at multiples of {item} bytes"
    return ""


def _rows(rank: RankLayout, found: _Found, tap: int, kept: Shard, span: int, pair: int) -> Int64s:
    """The axes of channels merged where they go on alike in the weights and in the window."""
    weights, shard = found.weights, found.shard
    regions = {region.name: index for index, region in enumerate(rank.regions)}
    taps, hidden = (part.size for part in kept.box)
    sizes = [part.size for axis, part in enumerate(shard.box) if axis != tap]
    there = [stride for axis, stride in enumerate(shard.strides_bytes) if axis != tap]
    cut = cut_rows(sizes, (weights.strides_bytes[:-1], there), (0, 0))
    rows = np.zeros((len(cut.offsets_bytes), len(ProjectColumn)), np.int64)
    rows[:] = (
        span,
        kept.offset_bytes % SPAN_ALIGN_BYTES,
        kept.strides_bytes[0],
        taps,
        hidden,
        weights.dtype,
        regions[weights.region],
        weights.offset_bytes,
        cut.steps_bytes[0],
        cut.count,
        pair,
        regions[shard.region],
        shard.offset_bytes,
        cut.steps_bytes[1],
        shard.strides_bytes[tap],
        shard.dtype,
    )
    rows[:, _OFFSETS] += cut.offsets_bytes
    return rows


_OFFSETS = [ProjectColumn.WEIGHT_OFFSET_BYTES, ProjectColumn.DST_OFFSET_BYTES]
_STRIDES = [ProjectColumn.WEIGHT_STRIDE_BYTES, ProjectColumn.DST_STRIDE_BYTES]
_SAME = [c for c in ProjectColumn if c not in (*_OFFSETS, ProjectColumn.CHANNELS)]


def _joined(rows: Int64s) -> Int64s:
    """Join rows whose channels continue each other, across fields too: few products of many."""
    if len(rows) < 2:
        return rows
    order = np.lexsort((rows[:, ProjectColumn.WEIGHT_OFFSET_BYTES], *rows[:, _SAME].T[::-1]))
    rows = rows[order]
    continues = (rows[1:, _SAME] == rows[:-1, _SAME]).all(axis=1)
    ends = rows[:, _OFFSETS] + rows[:, [ProjectColumn.CHANNELS]] * rows[:, _STRIDES]
    continues &= (rows[1:, _OFFSETS] == ends[:-1]).all(axis=1)
    first = np.flatnonzero(np.concatenate([[True], ~continues]))
    joined = rows[first]
    joined[:, ProjectColumn.CHANNELS] = np.add.reduceat(rows[:, ProjectColumn.CHANNELS], first)
    return joined
