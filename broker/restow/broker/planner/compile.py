"""Compile a plan into programs: draft each rank's rows, and choose the way of each row."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from restow.broker.errors import NarrowingError, TooManyPiecesError
from restow.broker.layout import DType, Kind, Layout, RankLayout, Region, Scratch, Shard
from restow.broker.layout.rows import MAX_ROWS, Int64s, cut_rows
from restow.broker.planner.costs import CostModel, PricedRows
from restow.broker.planner.plan import Move, Plan
from restow.broker.planner.program import (
    CLEAR_PAGES,
    NO_LIST,
    READ_SPANS,
    Column,
    GroupPair,
    PageForm,
    Program,
    Step,
    join_rows,
    joined_steps,
    no_rows,
)
from restow.broker.planner.recompute import Recompute
from restow.broker.planner.table import Cutter, RowTable
from restow.broker.planner.ways import (
    Interleave,
    Pack,
    Sent,
    Share,
    Slices,
    Spared,
    Way,
    WholeSpans,
)
from restow.broker.strategy import Strategy
from restow.broker.words import member


def check_exact(plan: Plan) -> None:
    """Raise `NarrowingError` if D's type of a field cannot represent every value of P's type."""
    for move in plan.moves:
        if not move.dst.dtype.holds(move.src.dtype):
            raise NarrowingError(
                f"field {move.field}: P holds {move.src.dtype.label}, but D wants "
                f"{move.dst.dtype.label}, which rounds values. Use one type on both sides, or have "
                f"the operator allow it (--allow-narrowing)",
                field=move.field,
                source=move.src.dtype.label,
                destination=move.dst.dtype.label,
            )


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft of a program: its moves, their rows, and the way in which each row travels.

    ``ways`` has a strategy number per row. ``shares`` are the parts of the rows by way, and the
    shares that replace moves. ``cleared`` rows are zeroed.
    """

    dst_rank: int
    moves: tuple[Move, ...]
    table: RowTable
    ways: Int64s
    shares: tuple[Share, ...]
    cleared: Int64s


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a rank's program for a number of tokens.

    ``reads`` counts descriptors: pieces read into place, and staged runs. ``launches`` counts
    GATHERs, SCATTERs and PROJECTs on both sides; a GATHER for several readers counts for each.
    ``seconds`` is the estimate of the cost model for an otherwise idle system.
    """

    bytes: int
    reads: int
    launches: int
    seconds: float


def estimate(
    shares: Sequence[Share], pairs: Sequence[GroupPair], tokens: int, costs: CostModel
) -> Cost:
    """Return the cost of all shares of a rank's program. Raises `TooManyPiecesError`."""
    work = [share.work(pairs, tokens, costs) for share in shares]
    stages = len(frozenset[int]().union(*(share_work.gathering for share_work in work)))
    read_bytes = sum(share_work.bytes for share_work in work)
    reads = stages + sum(share_work.reads for share_work in work)
    launches = 2 * stages + sum(share_work.launches for share_work in work)
    seconds = (
        reads * costs.seconds_per_descriptor
        + read_bytes / costs.read_bytes_per_second
        + launches * costs.seconds_per_launch
        + bool(stages) * costs.seconds_per_stage
        + sum(share_work.seconds for share_work in work)
    )
    return Cost(read_bytes, reads, launches, seconds)


WAYS: tuple[Way, ...] = (
    Slices(),
    WholeSpans(),
    Pack(),
    Interleave(),
    Recompute(),
)
"""All ways, in the order of their shares in a program. The first of equally cheap ways wins. The
first way in this list is always compared, because it has no fixed cost."""


def choose_ways(sent: Sent) -> Int64s:
    """Return for each row the number of the strategy by which it travels.

    Raises `StrategyRefusedError` if the requested strategy cannot serve.
    """
    for way in WAYS:
        if way.strategy is sent.strategy and (ways := way.demanded(sent)) is not None:
            return ways
    ways = _cheapest(sent.priced)
    for way in WAYS:
        ways[way.takes_over(sent, ways)] = way.strategy.number
    return ways


def _cheapest(priced: PricedRows) -> Int64s:
    """Return the cheapest assignment over all sets of ways; a row has the best way of the set."""
    offers = [(way, way_s) for way in WAYS if (way_s := way.seconds(priced)) is not None]
    rows_s = np.array([way_s for _, way_s in offers])
    once_s = [way.once_s(priced.costs) for way, _ in offers]
    first, *others = range(len(offers))
    rows = range(len(priced.rows))
    best, least_s = np.zeros(len(rows), np.int64), np.inf
    for count in range(len(offers)):
        for extra in combinations(others, count):
            allowed = np.array([first, *extra])
            ways = allowed[rows_s[allowed].argmin(axis=0)]
            total_s = rows_s[ways, rows].sum() + sum(once_s[way] for way in np.unique(ways))
            if total_s < least_s:
                best, least_s = ways, total_s
    numbers = np.array([way.strategy.number for way, _ in offers])
    return numbers[best]


def cleared_rows(rank: RankLayout, pairs: Sequence[GroupPair]) -> Int64s:
    """Return the rows of ``rank``'s scratch memory in groups for which states arrive.

    Raises `TooManyPiecesError`.
    """
    numbers = {pair.dst.group: number for number, pair in enumerate(pairs) if not pair.per_token}
    regions = {region.name: (index, region) for index, region in enumerate(rank.regions)}
    tables = [no_rows()]
    for scratch in rank.scratch:
        index, region = regions[scratch.region]
        if region.group in numbers:
            tables.append(_rows(scratch, index, region, numbers[region.group]))
    rows = np.concatenate(tables)
    if len(rows) > MAX_ROWS:
        raise TooManyPiecesError(f"scratch memory falls into more than {MAX_ROWS} pieces")
    return rows


class ColdRows:
    """Make the rows of fields that begin cold, in pairs of lists without a source."""

    def __init__(self, plan: Plan, first_pair: int) -> None:
        """Assign numbers to the pairs of all ranks, from ``first_pair`` on."""
        self._first = first_pair
        self._numbers: dict[GroupPair, int] = {}
        self._fields = {f.name: f for f in plan.destination.model.fields if f.name in plan.cold}
        for rank in plan.destination.ranks:
            for region, shard in rank.held():
                if shard.field in self._fields:
                    self._pair(region, shard)

    @property
    def pairs(self) -> tuple[GroupPair, ...]:
        """Return the pairs of lists in the order of their numbers."""
        return tuple(self._numbers)

    def rows(self, rank: RankLayout) -> Int64s:
        """Return the rows of ``rank``'s cold fields; per-token rows repeat per moved token.

        Raises `TooManyPiecesError`.
        """
        index = {region.name: number for number, region in enumerate(rank.regions)}
        tables = [no_rows()]
        for region, shard in rank.held():
            if shard.field in self._fields:
                pair = self._pair(region, shard)
                tables.append(_shard_rows(shard, index[region.name], region, pair))
        rows, _ = join_rows(np.concatenate(tables))
        if len(rows) > MAX_ROWS:
            raise TooManyPiecesError(f"fields that begin cold fall into over {MAX_ROWS} pieces")
        rows[:, Column.SRC_OFFSET_BYTES] = 0
        return rows

    def _pair(self, region: Region, shard: Shard) -> int:
        form = PageForm.of(region)
        window_tokens = self._fields[shard.field].window_tokens
        pair = GroupPair(replace(form, group=NO_LIST), form, window_tokens)
        return self._numbers.setdefault(pair, self._first + len(self._numbers))


def _shard_rows(shard: Shard, index: int, region: Region, pair: int) -> Int64s:
    """Return the rows of a shard as if it were scratch memory, for each of its tokens."""
    sizes = tuple(span.size for span in shard.box)
    place = (shard.region, shard.dtype, shard.offset_bytes, sizes, shard.strides_bytes)
    stride = shard.token_stride_bytes or 0
    rows = _rows(Scratch(*place), index, region, pair, stride)
    rows[:, [Column.SRC_TOKEN_STRIDE_BYTES, Column.DST_TOKEN_STRIDE_BYTES]] = stride
    rows[:, Column.SRC_OFFSET_BYTES] = rows[:, Column.DST_OFFSET_BYTES]  # to be joined
    return rows


def _rows(
    scratch: Scratch, index: int, region: Region, pair: int, token_stride_bytes: int = 0
) -> Int64s:
    """Return rows that are runs of bytes, or strided elements aligned to their size."""
    item = scratch.dtype.itemsize_bytes
    # No axis counts as contiguous: the row is the longest axis, unless all are a single run.
    cut = cut_rows(scratch.sizes, (scratch.strides_bytes,), (0,))
    steps = (region.page_stride_bytes, token_stride_bytes, *scratch.strides_bytes)
    places = (scratch.offset_bytes, *steps)
    raw = cut.count == 1 or cut.steps_bytes == (item,)
    if not raw and any(place % item for place in places):
        cut, raw = cut.elements(), True
    rows = np.zeros((len(cut.offsets_bytes), len(Column)), np.int64)
    rows[:, Column.GROUP_PAIR] = pair
    rows[:, Column.DST_REGION] = index
    rows[:, Column.DST_OFFSET_BYTES] = scratch.offset_bytes + cut.offsets_bytes[:, 0]
    rows[:, Column.COUNT] = cut.count * item if raw else cut.count
    rows[:, [Column.SRC_STEP_BYTES, Column.DST_STEP_BYTES]] = 1 if raw else cut.steps_bytes[0]
    dtype = DType.UINT8 if raw else scratch.dtype
    rows[:, [Column.SRC_DTYPE, Column.DST_DTYPE]] = dtype
    return rows


def compile_programs(
    plan: Plan, strategy: Strategy = Strategy.AUTO, costs: CostModel | None = None
) -> tuple[Program, ...]:
    """Return a program for each destination rank, in the order of the ranks.

    Raises `StrategyRefusedError` if ``strategy`` cannot serve the plan.
    """
    pairs, drafts = draft_programs(plan, strategy, costs)
    return tuple(_program(draft, pairs) for draft in drafts)


def draft_programs(
    plan: Plan, strategy: Strategy = Strategy.AUTO, costs: CostModel | None = None
) -> tuple[tuple[GroupPair, ...], list[Draft]]:
    """Return the pairs of lists and the drafts of all programs.

    Raises what `compile_programs` raises.
    """
    strategy = member(Strategy, strategy, "strategy")
    drafting = _Drafting(plan, strategy, costs or CostModel())
    by_rank: dict[int, list[Move]] = defaultdict(list)
    for move in plan.moves:
        by_rank[move.dst_rank].append(move)
    drafts = [drafting.draft(rank, tuple(by_rank[rank.rank])) for rank in plan.destination.ranks]
    if not plan.cold:
        return drafting.cutter.pairs, drafts
    cold = ColdRows(plan, len(drafting.cutter.pairs))  # the ways may have added pairs
    pairs = (*drafting.cutter.pairs, *cold.pairs)
    return pairs, [
        replace(draft, cleared=_cleared(rank, pairs, cold.rows(rank), bool(by_rank[rank.rank])))
        for draft, rank in zip(drafts, plan.destination.ranks, strict=True)
    ]


def _cleared(rank: RankLayout, pairs: Sequence[GroupPair], cold: Int64s, moves: bool) -> Int64s:
    """Return the rows to zero: scratch memory if anything arrives, and cold fields."""
    scratch = cleared_rows(rank, pairs) if moves or len(cold) else no_rows()
    return np.concatenate([scratch, cold])


class _Drafting:
    """Draft the programs of a plan."""

    def __init__(self, plan: Plan, strategy: Strategy, costs: CostModel) -> None:
        """Prepare the drafts. Raises what `Way.sparing` raises."""
        self.cutter = Cutter(plan)
        self._strategy, self._costs = strategy, costs
        self._readers = Counter(src for src, _ in {(m.src_rank, m.dst_rank) for m in plan.moves})
        """Number of destination ranks that read from each source rank."""
        sparings = (way.sparing(plan, strategy) for way in WAYS)
        self._sparing = [sparing for sparing in sparings if sparing is not None]

    def draft(self, rank: RankLayout, moves: tuple[Move, ...]) -> Draft:
        """Draft a rank's program; moves are replaced if that is requested or costs less."""
        spared = [sparing(rank, self.cutter) for sparing in self._sparing]
        if self._strategy is not Strategy.AUTO:
            return self._draft(rank, moves, spared)
        before, kept = self.cutter.pieces, list[Spared]()
        best = self._draft(rank, moves, kept)
        for share in spared:
            least_s, counted = self._seconds(best.shares), self.cutter.pieces
            if not share.moves or self._seconds([share]) >= least_s:
                continue
            self.cutter.pieces = before
            made = self._draft(rank, moves, [*kept, share])
            self.cutter.pieces = counted  # only one of the two drafts is kept
            if self._seconds(made.shares) < least_s:
                best, kept = made, [*kept, share]
        return best

    def _seconds(self, shares: Sequence[Share]) -> float:
        costs = self._costs
        return estimate(shares, self.cutter.pairs, costs.nominal_tokens, costs).seconds

    def _draft(self, rank: RankLayout, moves: tuple[Move, ...], spared: Sequence[Spared]) -> Draft:
        cutter, costs = self.cutter, self._costs
        kept = _unspared(moves, spared)
        table = cutter.table(kept)
        priced = PricedRows(table.rows, cutter.pairs, costs.nominal_tokens, costs)
        sent = Sent(self._strategy, kept, table, priced, cutter, self._readers)
        ways = choose_ways(sent)
        shares = (way.share(sent, ways == way.strategy.number) for way in WAYS)
        return Draft(
            rank.rank,
            kept,
            table,
            ways,
            (*(share for share in shares if share is not None), *spared),
            _cleared(rank, cutter.pairs, no_rows(), bool(moves)),
        )


def _unspared(moves: tuple[Move, ...], spared: Sequence[Spared]) -> tuple[Move, ...]:
    """Return the moves that no share replaces."""
    gone = {(move.field, move.box) for share in spared for move in share.moves}
    kept = (move for move in moves if (move.field, move.box) not in gone)
    return tuple(kept) if gone else moves


def _program(draft: Draft, pairs: tuple[GroupPair, ...]) -> Program:
    all_steps, used, first_span = [Step(CLEAR_PAGES, draft.cleared)], [], 0
    for share in draft.shares:
        mine = [step for step in share.steps(first_span) if len(step.rows)]
        first_span += sum(len(step.rows) for step in mine if step.form == READ_SPANS)
        all_steps += mine
        used += [share.strategy] * bool(mine)
    steps = joined_steps(all_steps)
    shapes = [(step.form, step.rows.shape) for step in steps]
    content = hashlib.sha256(repr((draft.dst_rank, pairs, shapes)).encode())
    for step in steps:
        content.update(step.rows.astype("<i8").tobytes())
    return Program(content.hexdigest()[:32], draft.dst_rank, pairs, steps, tuple(used))


def early_plan(plan: Plan) -> Plan | None:
    """Return the moves of tokens that do not depend on later tokens; None if there are none.

    A snapshot moves with the last token. If a field has a window, or D keeps whole blocks, the
    first token that moves depends on the last token, so nothing can move early.
    """
    fields = {field.name: field for field in plan.source.model.fields}
    of_d = {field.name: field for field in plan.destination.model.fields}
    moves = tuple(move for move in plan.moves if fields[move.field].kind is Kind.PER_TOKEN)
    filled = [fields[move.field] for move in moves] + [of_d[name] for name in plan.cold]
    windows = any(field.window_tokens for field in filled)
    if not moves or windows or _keeps_whole_blocks(plan.destination):
        return None
    cold = frozenset(name for name in plan.cold if of_d[name].kind is Kind.PER_TOKEN)
    if len(moves) == len(plan.moves) and cold == plan.cold:
        return plan
    return replace(plan, moves=moves, cold=cold)


def _keeps_whole_blocks(layout: Layout) -> bool:
    return any(region.whole_blocks for rank in layout.ranks for region in rank.regions)
