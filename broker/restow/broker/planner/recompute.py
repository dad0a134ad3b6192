"""Recompute: D rebuilds conv windows from mixer inputs that P keeps and its own weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from restow.broker.errors import StrategyRefusedError, TooManyPiecesError
from restow.broker.layout import Projection, RankLayout, Shard
from restow.broker.layout.rows import MAX_ROWS, Int64s, cut_rows
from restow.broker.layout.span import overlap
from restow.broker.layout.values import ITEM_BYTES
from restow.broker.planner.costs import CostModel
from restow.broker.planner.plan import Move, Plan, spread
from restow.broker.planner.program import (
    PROJECT_SPANS,
    Column,
    GroupPair,
    ProjectColumn,
    Step,
    joined,
    no_rows,
)
from restow.broker.planner.table import Cutter
from restow.broker.planner.ways import (
    SPAN_ALIGN_BYTES,
    Sent,
    Share,
    Sparing,
    Way,
    Work,
    read_spans,
    span_pages,
    span_rows,
)
from restow.broker.strategy import Strategy


def product_rows(
    rank: RankLayout, weights: Projection, shard: Shard, tap: int, kept: Shard, span: int, pair: int
) -> Int64s:
    """Return the rows that recompute ``shard`` from ``weights`` and the ``kept`` inputs in a span.

    Axes other than ``tap`` (the channels) are merged where they are contiguous in both the weights
    and the window.
    """
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


def joined_products(rows: Int64s) -> Int64s:
    """Join rows whose channels continue each other, across fields too, to get fewer products."""
    return joined(rows, _SAME, _OFFSETS, ProjectColumn.CHANNELS, _STRIDES)[0]


MAX_COMPARED = 1 << 20
"""Limit for projections compared with moves in a plan."""
NO_INPUTS = "P keeps no mixer inputs"
NO_WEIGHTS = "D offers no in-projection weights"


@dataclass(frozen=True, slots=True)
class InputRead:
    """An input that a destination rank reads whole, its source, and the ranks that also hold it."""

    shard: Shard
    src_rank: int
    replicas: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a destination rank recomputes: the moves that it replaces, and the inputs that it reads.

    ``spans`` are the spans of the inputs; ``projected`` rows refer to them by index.
    """

    moves: tuple[Move, ...] = ()
    inputs: tuple[InputRead, ...] = ()
    spans: Int64s = field(default_factory=no_rows)
    projected: Int64s = field(default_factory=lambda: no_rows(ProjectColumn))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the recomputed fields; other parts of a field may still be moved."""
        return tuple(dict.fromkeys(move.field for move in self.moves))

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights that are multiplied."""
        sizes = self.projected[:, [ProjectColumn.CHANNELS, ProjectColumn.HIDDEN]].prod(axis=1)
        return int((sizes * ITEM_BYTES[self.projected[:, ProjectColumn.DTYPE]]).sum())

    @classmethod
    def among(cls, shares: Sequence[Share]) -> Rebuilt:
        """Return the recomputing share among a program's shares, or an empty share."""
        return next((share for share in shares if isinstance(share, cls)), cls())

    strategy: ClassVar[Strategy] = Strategy.RECOMPUTE

    def steps(self, first_span: int) -> Sequence[Step]:
        """Return a step that reads inputs, and a step that multiplies them with weights."""
        projected = self.projected.copy()
        projected[:, ProjectColumn.SPAN] += first_span
        return read_spans(self.spans, first_span), Step(PROJECT_SPANS, projected)

    def work(self, pairs: Sequence[GroupPair], tokens: int, costs: CostModel) -> Work:
        """Count a descriptor per input, and the weights once."""
        pages = span_pages(self.spans, pairs, tokens)
        return Work(
            bytes=int((pages * self.spans[:, Column.COUNT]).sum()),
            reads=int(pages.sum()),
            launches=int(len(self.projected) > 0),
            seconds=self.weight_bytes * costs.seconds_per_weight_byte,
        )


class Recompute(Way):
    """Replace moves of conv windows; the cost model decides how other rows travel."""

    strategy = Strategy.RECOMPUTE

    def demanded(self, sent: Sent) -> None:
        """Leave the assignment of rows to the cost model."""

    def sparing(self, plan: Plan, strategy: Strategy) -> Sparing | None:
        """Return a function that finds recomputable windows, if requested or if D offers weights.

        Raises `StrategyRefusedError` if the strategy is requested but nothing can be recomputed,
        and `TooManyPiecesError`.
        """
        offered = any(rank.projections for rank in plan.destination.ranks)
        if strategy is not self.strategy and not (strategy is Strategy.AUTO and offered):
            return None
        rebuilding = _Rebuilding(plan)
        if strategy is self.strategy and not rebuilding:
            raise StrategyRefusedError(
                f"no conv window can be recomputed at D: {rebuilding.obstacle}", strategy=strategy
            )
        return rebuilding.rebuilt if rebuilding else None


@dataclass(frozen=True, slots=True)
class _Usable:
    """Usable weights, the shard that is their product, and the moves that it replaces."""

    weights: Projection
    shard: Shard
    moves: tuple[Move, ...]


class _Rebuilding:
    """Find what each destination rank of a plan can recompute."""

    def __init__(self, plan: Plan) -> None:
        """Find the usable projections, and a rank of P to read the input of each projection from.

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
            field.name: field.axes.index("tap")
            for field in plan.destination.model.fields
            if "tap" in field.axes
        }
        self._usable: dict[int, list[_Usable]] = {}
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
                    self._usable.setdefault(rank.rank, []).append(_Usable(weights, shard, mine))
                    readers[weights.input][rank.rank] = None
        if not any(rank.projections for rank in plan.destination.ranks):
            self.obstacle = " and ".join(filter(None, [self.obstacle, NO_WEIGHTS]))
        self._sources = {
            (name, reader): spread(self._holders[name], index, len(reader_ranks))
            for name, reader_ranks in readers.items()
            for index, reader in enumerate(sorted(reader_ranks))
        }

    def __bool__(self) -> bool:
        """Return whether anything can be recomputed."""
        return bool(self._usable)

    def _why_not(self, weights: Projection, moves: Sequence[Move]) -> str:
        holders = self._holders.get(weights.input)
        if not holders:
            return f"{NO_INPUTS} {weights.input}"
        kept = self._inputs[holders[0], weights.input].dtype
        if kept is not weights.dtype:
            return (
                f"field {weights.field}: P's inputs are {kept.label}, but D's weights are "
                f"{weights.dtype.label}, so D's product would differ from P's"
            )
        for move in moves:
            if not (move.src.dtype.holds(weights.dtype) or move.src.dtype is move.dst.dtype):
                return (
                    f"field {move.field}: P stores the {weights.dtype.label} product as "
                    f"{move.src.dtype.label}, but D as {move.dst.dtype.label}, so D would have "
                    f"digits that P has rounded away"
                )
        return ""

    def rebuilt(self, rank: RankLayout, cutter: Cutter) -> Rebuilt:
        """Return what ``rank`` can recompute. Raises `TooManyPiecesError`."""
        spans: dict[str, int] = {}
        reads: list[InputRead] = []
        input_spans: list[tuple[int, ...]] = []
        tables = [no_rows(ProjectColumn)]
        all_usable = self._usable.get(rank.rank, [])
        for usable in all_usable:
            weights, shard = usable.weights, usable.shard
            src_rank = self._sources[weights.input, rank.rank]
            kept = self._inputs[src_rank, weights.input]
            pair = cutter.pair_number(src_rank, kept.region, rank.rank, shard.region)
            if weights.input not in spans:
                spans[weights.input] = len(input_spans)
                start = kept.offset_bytes // SPAN_ALIGN_BYTES * SPAN_ALIGN_BYTES
                stop = kept.offset_bytes + _reach_bytes(kept)
                region = cutter.source_region(src_rank, kept.region)
                input_spans.append((src_rank, pair, region, start, stop - start))
                replicas = self._holders[weights.input]
                reads.append(InputRead(kept, src_rank, replicas, stop - start))
            tap = self._taps[weights.field]
            span = spans[weights.input]
            tables.append(product_rows(rank, weights, shard, tap, kept, span, pair))
        projected = joined_products(np.concatenate(tables))
        if len(projected) > MAX_ROWS:
            raise TooManyPiecesError(f"projections fall into more than {MAX_ROWS} pieces")
        places = np.array(input_spans, np.int64).reshape(-1, 5)
        return Rebuilt(
            tuple(move for usable in all_usable for move in usable.moves),
            tuple(reads),
            span_rows(places[:, :3], places[:, 3], places[:, 4]),
            projected,
        )


def _reach_bytes(shard: Shard) -> int:
    """Return the bytes from the first to the last byte of a shard in its page."""
    strides = zip(shard.box, shard.strides_bytes, strict=True)
    return sum((span.size - 1) * stride for span, stride in strides) + shard.dtype.itemsize_bytes


def _uneven(shard: Shard, page_stride_bytes: int) -> str:
    item = shard.dtype.itemsize_bytes
    if any(place % item for place in (shard.offset_bytes, *shard.strides_bytes, page_stride_bytes)):
        return f"field {shard.field}: D's elements are not aligned to their {item} bytes"
    return ""
