"""The laws catch a wrong planner and a wrong binding: each mutation below turns one of them red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from laws import transfers
from laws.checks import check_composition, check_cover, check_minimality
from laws.strategies import Case, any_cases, family_cases, outright_cases
from restow.agents.binding import copies as alike_rows
from restow.agents.binding import operands, reads
from restow.agents.binding import pages as staging
from restow.agents.binding.pages import Blocks, TokenRange
from restow.agents.execute import gathering
from restow.broker.errors import PagesError, PlanError
from restow.broker.layout import Layout, Span
from restow.broker.planner import Move, Place, Plan, Strategy, make_plan, plan, table
from restow.broker.planner import compile as compiling
from restow.broker.planner import program as program_rows
from restow.broker.planner import ways as planner_ways
from restow.broker.planner.program import Column, GroupPair

pytestmark = pytest.mark.sampled

SLICES, WHOLE, PACK = Strategy.SLICES, Strategy.WHOLE, Strategy.PACK
INTERLEAVE = Strategy.INTERLEAVE

Law = Callable[[Case], object]


def cover(strategy: Strategy) -> Law:
    return lambda case: check_cover(case, strategy)


def minimality(case: Case) -> None:
    check_minimality(case, SLICES)


def minimality_of_spans(case: Case) -> None:
    check_minimality(case, WHOLE)


def composition(case: Case) -> None:
    check_composition(replace(case, layouts=case.layouts[:2] + case.layouts[1:]), (SLICES,) * 3)


def bites(
    law: Law,
    cases: Any,
    tries: int = 400,
    by: tuple[type[Exception], ...] = (AssertionError,),
) -> None:
    """Try a law until it breaks with an error of ``by``: its own assertion by default."""

    @settings(
        max_examples=tries,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def tried(case: Case) -> None:
        law(case)

    with pytest.raises(by):
        tried()


def changed_plan(change: Callable[[Move], Move | None]) -> Callable[[Layout, Layout], Plan]:
    """Return a planner whose every move goes through ``change``; None drops the move."""

    def planner(source: Layout, destination: Layout) -> Plan:
        right = make_plan(source, destination)
        moves = tuple(new for move in right.moves if (new := change(move)) is not None)
        return replace(right, moves=moves)

    return planner


# The planner, broken on purpose.


@pytest.mark.parametrize(
    "law", [cover(SLICES), cover(PACK), composition], ids=["slices", "pack", "via"]
)
def test_b_and_c_swapped(monkeypatch: pytest.MonkeyPatch, law: Law) -> None:
    """Check a fault that the round trip alone does not find: the way back undoes it."""

    def planner(source: Layout, destination: Layout) -> Plan:
        right = make_plan(source, destination)
        places = {(m.field, m.dst_rank, m.box): m.src for m in right.moves}
        other = {"B": "C", "C": "B"}

        def swap(move: Move) -> Move:
            if move.field[-1] not in other:
                return move
            twin = move.field[:-1] + other[move.field[-1]]
            return replace(move, src=places[twin, move.dst_rank, move.box])

        return replace(right, moves=tuple(map(swap, right.moves)))

    monkeypatch.setattr(transfers, "make_plan", planner)
    bites(law, family_cases())


def test_a_part_that_nobody_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = changed_plan(lambda m: None if m.box[0].start > 0 and m.src_rank > 0 else m)
    monkeypatch.setattr(transfers, "make_plan", drop)
    bites(cover(SLICES), family_cases())


def test_a_holder_that_is_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    # All readers go to the first replica: the bytes are right, the load is not.
    monkeypatch.setattr(plan, "spread", lambda replicas, reader, readers: replicas[0])
    bites(minimality, family_cases())


def test_a_replica_that_is_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(source: Layout, destination: Layout) -> Plan:
        right = make_plan(source, destination)
        return replace(right, moves=right.moves + right.moves[-1:])

    monkeypatch.setattr(transfers, "make_plan", twice)
    bites(cover(SLICES), any_cases())
    monkeypatch.setattr("laws.checks.make_plan", twice)
    bites(minimality, any_cases())


@pytest.mark.parametrize("side", ["src", "dst"])
def test_one_rank_shifted_by_one_element(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    def shift(move: Move) -> Move:
        place: Place = getattr(move, side)
        if getattr(move, f"{side}_rank") != 0:
            return move
        moved = replace(place, offset_bytes=place.offset_bytes + place.dtype.itemsize_bytes)
        return replace(move, src=moved) if side == "src" else replace(move, dst=moved)

    monkeypatch.setattr(transfers, "make_plan", changed_plan(shift))
    bites(cover(SLICES), any_cases())
    bites(cover(PACK), any_cases())


def test_a_window_that_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    # All tokens are read, from the null block too.
    monkeypatch.setattr(GroupPair, "first_token", lambda pair, start, stop: start)
    bites(cover(SLICES), family_cases())
    bites(cover(PACK), family_cases())


def test_a_block_that_is_kept_and_of_which_a_window_fills_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def in_the_middle(pair: GroupPair, start: int, stop: int) -> int:
        return max(start, stop - pair.window_tokens) if pair.window_tokens else start

    monkeypatch.setattr(GroupPair, "first_token", in_the_middle)
    bites(cover(SLICES), family_cases())
    bites(cover(PACK), family_cases())


def test_the_wrong_group_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try a planner that believes that rank r holds group r % G; the engine's is r // (T/G)."""

    def wrong(source: Layout, destination: Layout) -> Plan:
        try:
            return make_plan(_groups_by_remainder(source), destination)
        except PlanError:  # with context parallelism ranks hold other groups than it believes
            return make_plan(source, destination)

    monkeypatch.setattr(transfers, "make_plan", wrong)
    bites(cover(SLICES), family_cases(pipelines=False), tries=1500)


def _groups_by_remainder(layout: Layout) -> Layout:
    counts = {f.name: f.shape[0] for f in layout.model.fields if f.axes[0] in ("group", "head")}
    ranks = []
    for rank in layout.ranks:
        shards = list(rank.shards)
        for index, shard in enumerate(shards):
            count = counts.get(shard.field, 0)
            if 1 < count < len(layout.ranks):
                group = rank.rank % count
                box = (Span(group, group + 1), *shard.box[1:])
                shards[index] = replace(shard, box=box)
        ranks.append(replace(rank, shards=tuple(shards)))
    return replace(layout, ranks=tuple(ranks))


@pytest.mark.parametrize(
    "forgotten", [Column.SRC_TOKEN_STRIDE_BYTES, Column.DST_TOKEN_STRIDE_BYTES]
)
def test_rows_joined_whatever_their_token_strides(
    monkeypatch: pytest.MonkeyPatch, forgotten: Column
) -> None:
    kept = [column for column in program_rows._SAME if column is not forgotten]
    monkeypatch.setattr(program_rows, "_SAME", kept)
    bites(cover(SLICES), outright_cases(), tries=3000)


def test_rows_joined_across_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [c for c in program_rows._SAME if c is not Column.SRC_REGION]
    monkeypatch.setattr(program_rows, "_SAME", kept)
    bites(cover(SLICES), outright_cases(), tries=3000)


def test_strided_bytes_taken_for_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # Elements of one byte look like bytes of a run, but have steps.
    monkeypatch.setattr(program_rows, "strided", lambda rows: rows[:, Column.SRC_DTYPE] != 1)
    bites(cover(SLICES), any_cases())


# The binding, broken on purpose.


def change_function(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, change: Callable[..., Any]
) -> None:
    """Replace ``name`` by ``change``, which gets the original function first."""
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kw: change(right, *args, **kw))


@pytest.mark.parametrize("strategy", [SLICES, PACK])
def test_a_held_prefix_that_is_moved_again(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    def from_the_start(right: Any, tokens: TokenRange, sizes: Any) -> Any:
        return right(TokenRange(0, tokens.stop), sizes)

    change_function(monkeypatch, alike_rows, "cut_tokens", from_the_start)
    bites(cover(strategy), any_cases())


def test_pages_of_only_one_side_cut_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def source_only(right: Any, tokens: TokenRange, sizes: Any) -> Any:
        return right(tokens, sizes[:1])

    change_function(monkeypatch, alike_rows, "cut_tokens", source_only)
    bites(cover(SLICES), any_cases())


@pytest.mark.parametrize("strategy", [SLICES, PACK])
def test_every_row_taken_for_joined(monkeypatch: pytest.MonkeyPatch, strategy: Strategy) -> None:
    monkeypatch.setattr(operands.SideColumns, "joined", lambda side, rows: np.ones(len(rows), bool))
    bites(cover(strategy), any_cases())


@pytest.mark.parametrize("strategy", [SLICES, PACK])
def test_blocks_taken_for_pages(monkeypatch: pytest.MonkeyPatch, strategy: Strategy) -> None:
    def ids_as_they_are(right: Any, self: Any, form: Any, *rest: Any) -> Any:
        pages = right(self, form, *rest)
        return pages // form.pages_per_block

    right = Blocks.pages
    monkeypatch.setattr(Blocks, "pages", lambda self, *args: ids_as_they_are(right, self, *args))
    bites(cover(strategy), any_cases())


def test_one_sides_columns_read_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "DST", operands.SRC)
    bites(cover(SLICES), any_cases(), by=(AssertionError, PagesError, IndexError))


def test_descriptors_joined_that_continue_on_one_side_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_destination(right: Any, src: Any, dst: Any, lengths: Any) -> Any:
        return right(dst, dst, lengths)

    change_function(monkeypatch, reads, "breaks", by_destination)
    bites(cover(SLICES), any_cases())


def test_rows_of_a_span_counted_from_their_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_in_the_page(right: Any, self: Any, rows: Any) -> Any:
        moved = right(self, rows)
        begins = self.table[moved[:, Column.SRC_REGION], Column.SRC_OFFSET_BYTES]
        moved[:, Column.SRC_OFFSET_BYTES] += begins
        return moved

    change_function(monkeypatch, planner_ways.Spans, "extracted", as_in_the_page)
    bites(cover(WHOLE), any_cases())


def test_scratch_memory_that_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    change_function(monkeypatch, compiling, "cleared_rows", lambda right, *args: right(*args)[:0])
    bites(cover(SLICES), family_cases())


def test_scratch_memory_cleared_an_element_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def further(right: Any, *args: Any) -> Any:
        rows = right(*args)
        rows[:, Column.DST_OFFSET_BYTES] += 2
        return rows

    change_function(monkeypatch, compiling, "cleared_rows", further)
    bites(cover(SLICES), family_cases())


def test_a_span_that_ends_a_byte_early(monkeypatch: pytest.MonkeyPatch) -> None:
    change_function(monkeypatch, planner_ways, "_stops", lambda right, *args: right(*args) - 1)
    bites(cover(WHOLE), any_cases())


def test_pages_before_the_first_token_are_read_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_the_first(right: Any, pair: Any, start: int, stop: int) -> Any:
        return range(right(pair, start, stop).stop)

    change_function(monkeypatch, GroupPair, "src_pages", from_the_first)
    bites(minimality_of_spans, any_cases())


def test_staged_rows_one_byte_too_close(monkeypatch: pytest.MonkeyPatch) -> None:
    def closer(right: Any, *args: Any) -> Any:
        begins, size = right(*args)
        return begins - (np.arange(len(begins)) > 0), size

    for module in (operands, staging):
        change_function(monkeypatch, module, "row_begins", closer)
    bites(cover(PACK), any_cases())


@pytest.mark.parametrize("half", [0, 1])
def test_a_chunk_that_only_one_side_fills_row_by_row(
    monkeypatch: pytest.MonkeyPatch, half: int
) -> None:
    """Check a chunk that one side fills tap after tap, the other channel after channel."""

    def tap_major(place: Place, move: Move) -> Place:
        strides, size_bytes = [], place.dtype.itemsize_bytes
        for span in move.box:
            strides.append(size_bytes)
            size_bytes *= span.size
        return replace(place, strides_bytes=tuple(strides))

    def one_half(right: Any, self: Any, moves: Any, places: Any) -> Any:
        turned = [tap_major(place, move) for place, move in zip(places, moves, strict=True)]
        halves = [right(self, moves, places), right(self, moves, turned)]
        return halves[half][0], halves[1 - half][1]

    change_function(monkeypatch, table.Cutter, "through", one_half)
    bites(cover(INTERLEAVE), family_cases())


def test_fields_that_lie_in_a_chunk_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(right: Any, self: Any, moves: Any, places: Any) -> Any:
        there, _ = right(self, moves, places)
        other = planner_ways.chunk_places(moves[::-1])[::-1]
        return there, right(self, moves, other)[1]

    change_function(monkeypatch, table.Cutter, "through", backwards)
    bites(cover(INTERLEAVE), family_cases())


def test_packed_rows_that_begin_inside_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    # The chunk is taken to be as long as its first field alone.
    shorter = lambda right, rows, *side: right(rows[:1], *side)  # noqa: E731
    change_function(monkeypatch, gathering, "chunk_bytes", shorter)
    bites(cover(INTERLEAVE), family_cases())
