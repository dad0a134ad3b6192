"""The laws catch a wrong planner and a wrong binding: each fault below turns one of them red.

Each function takes the place of a right one, which it gets first (`laws.planted`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from laws.checks import check_composition
from laws.planted import (
    BINDING,
    EXECUTE,
    INTERLEAVE,
    PACK,
    PLANNER,
    SLICES,
    TAKEN_PLANS,
    WHOLE,
    Fault,
    Faults,
    in_one_pipeline,
    minimality,
)
from laws.strategies import Case, family_cases, outright_cases
from restow.agents.binding.operands import SRC
from restow.agents.binding.pages import TokenRange
from restow.broker.errors import PagesError, PlanError
from restow.broker.layout import DType, Layout, Region, Shard, Span, TokenClass
from restow.broker.planner import Move, Place, Plan
from restow.broker.planner.program import Column
from restow.broker.planner.ways import chunk_places

pytestmark = pytest.mark.sampled

RED = (AssertionError, PagesError, IndexError)
"""Tokens of another rank may also lie behind its last page."""
faults = Faults()
planted = faults.planted


def composition(case: Case) -> None:
    check_composition(replace(case, layouts=case.layouts[:2] + case.layouts[1:]), (SLICES,) * 3)


# The planner, broken on purpose.


def with_moves(plan: Plan, change: Callable[[Move], Move | None]) -> Plan:
    """Return the plan with every move changed; None drops the move."""
    return replace(plan, moves=tuple(new for move in plan.moves if (new := change(move))))


def further(move: Move, side: str) -> Move:
    """Return a move that reads or writes one element further."""
    place: Place = getattr(move, side)
    moved = replace(place, offset_bytes=place.offset_bytes + place.dtype.itemsize_bytes)
    return replace(move, src=moved) if side == "src" else replace(move, dst=moved)


def with_regions(layout: Layout, change: Callable[[Region], Region]) -> Layout:
    ranks = (replace(one, regions=tuple(map(change, one.regions))) for one in layout.ranks)
    return replace(layout, ranks=tuple(ranks))


@planted(TAKEN_PLANS, laws=[SLICES, PACK, composition], cases=family_cases)
def b_and_c_are_swapped(right: Any, *layouts: Layout) -> Plan:
    """Swap them; the round trip alone does not find it: the way back undoes it."""
    plan = right(*layouts)
    places = {(m.field, m.dst_rank, m.box): m.src for m in plan.moves}
    other = {"B": "C", "C": "B"}

    def swap(move: Move) -> Move:
        twin = move.field[:-1] + other.get(move.field[-1], move.field[-1])
        return replace(move, src=places[twin, move.dst_rank, move.box])

    return with_moves(plan, lambda move: swap(move) if move.field[-1] in other else move)


@planted(TAKEN_PLANS, laws=[SLICES], cases=family_cases)
def a_part_is_brought_by_nobody(right: Any, *layouts: Layout) -> Plan:
    return with_moves(
        right(*layouts), lambda m: None if m.box[0].start > 0 and m.src_rank > 0 else m
    )


@planted(f"{PLANNER}.plan.spread", laws=[minimality(SLICES)], cases=family_cases)
def all_readers_go_to_the_first_replica(right: Any, replicas: Any, *reader: int) -> Any:
    return replicas[0]


@planted(TAKEN_PLANS, "laws.checks.make_plan", laws=[SLICES, minimality(SLICES)])
def a_replica_is_read_too(right: Any, *layouts: Layout) -> Plan:
    plan: Plan = right(*layouts)
    return replace(plan, moves=plan.moves + plan.moves[-1:])


@planted(TAKEN_PLANS, laws=[SLICES, PACK], each=["src", "dst"])
def one_rank_is_shifted_by_one_element(side: str, right: Any, *layouts: Layout) -> Plan:
    return with_moves(
        right(*layouts), lambda m: m if getattr(m, f"{side}_rank") else further(m, side)
    )


@planted(f"{PLANNER}.program.GroupPair.first_token", laws=[SLICES, PACK], cases=family_cases)
def all_tokens_are_read_from_the_null_block_too(right: Any, pair: Any, start: int, _: int) -> int:
    return start


@planted(f"{PLANNER}.program.GroupPair.first_token", laws=[SLICES, PACK], cases=family_cases)
def a_window_fills_the_end_of_a_kept_block(right: Any, pair: Any, start: int, stop: int) -> int:
    return max(start, stop - pair.window_tokens) if pair.window_tokens else start


@planted(TAKEN_PLANS, laws=[SLICES], cases=in_one_pipeline, tries=1500)
def a_rank_is_believed_to_hold_the_group_of_its_remainder(
    right: Any, source: Layout, destination: Layout
) -> Any:
    """Believe that rank r holds group r % G; the engine's is r // (T / G)."""
    counts = {f.name: f.shape[0] for f in source.model.fields if f.axes[0] in ("group", "head")}
    size = len(source.ranks)

    def moved(shard: Shard, rank: int) -> Shard:
        count = counts.get(shard.field, 0)
        box = (Span(rank % max(count, 1), rank % max(count, 1) + 1), *shard.box[1:])
        return replace(shard, box=box) if 1 < count < size else shard

    ranks = (
        replace(one, shards=tuple(moved(shard, one.rank) for shard in one.shards))
        for one in source.ranks
    )
    try:
        return right(replace(source, ranks=tuple(ranks)), destination)
    except PlanError:  # with context parallelism ranks hold other groups than it believes
        return right(source, destination)


@planted(
    f"{PLANNER}.program._SAME",
    laws=[SLICES],
    cases=outright_cases,
    tries=3000,
    each=[Column.SRC_TOKEN_STRIDE_BYTES, Column.DST_TOKEN_STRIDE_BYTES, Column.SRC_REGION],
)
def rows_are_joined_though_they_differ(forgotten: Column, right: Sequence[Column]) -> Any:
    return [column for column in right if column is not forgotten]


@planted(f"{PLANNER}.program.strided", laws=[SLICES])
def strided_bytes_are_taken_for_a_run(right: Any, rows: Any) -> Any:
    """Take elements of one byte, which have steps, for bytes of a run."""
    return rows[:, Column.SRC_DTYPE] != DType.UINT8


# What is staged.


@planted(f"{PLANNER}.ways.Spans.extracted", laws=[WHOLE])
def rows_of_a_span_are_counted_from_their_page(right: Any, spans: Any, rows: Any) -> Any:
    moved = right(spans, rows)
    begins = spans.table[moved[:, Column.SRC_REGION], Column.SRC_OFFSET_BYTES]
    moved[:, Column.SRC_OFFSET_BYTES] += begins
    return moved


@planted(f"{PLANNER}.ways._stops", laws=[WHOLE])
def a_span_ends_a_byte_early(right: Any, *args: Any) -> Any:
    return right(*args) - 1


@planted(f"{PLANNER}.program.GroupPair.src_pages", laws=[minimality(WHOLE)])
def pages_before_the_first_token_are_read_as_well(right: Any, *args: Any) -> range:
    return range(right(*args).stop)


@planted(f"{BINDING}.operands.row_begins", f"{BINDING}.pages.row_begins", laws=[PACK])
def staged_rows_are_one_byte_too_close(right: Any, *args: Any) -> Any:
    begins, size = right(*args)
    return begins - (np.arange(len(begins)) > 0), size


@planted(f"{PLANNER}.table.Cutter.through", laws=[INTERLEAVE], cases=family_cases, each=[0, 1])
def one_side_fills_a_chunk_row_by_row(
    half: int, right: Any, cutter: Any, moves: Any, places: Any
) -> Any:
    """Let one side go tap after tap, the other channel after channel."""

    def tap_major(place: Place, move: Move) -> Place:
        strides, size_bytes = [], place.dtype.itemsize_bytes
        for span in move.box:
            strides.append(size_bytes)
            size_bytes *= span.size
        return replace(place, strides_bytes=tuple(strides))

    turned = list(map(tap_major, places, moves))
    halves = [right(cutter, moves, places), right(cutter, moves, turned)]
    return halves[half][0], halves[1 - half][1]


@planted(f"{PLANNER}.table.Cutter.through", laws=[INTERLEAVE], cases=family_cases)
def fields_leave_a_chunk_in_another_order(right: Any, cutter: Any, moves: Any, places: Any) -> Any:
    there, _ = right(cutter, moves, places)
    return there, right(cutter, moves, chunk_places(moves[::-1])[::-1])[1]


@planted(f"{EXECUTE}.gathering.chunk_bytes", laws=[INTERLEAVE], cases=family_cases)
def a_chunk_is_taken_to_be_as_long_as_its_first_field(right: Any, rows: Any, *side: Any) -> Any:
    return right(rows[:1], *side)


@planted(f"{PLANNER}.compile.cleared_rows", laws=[SLICES], cases=family_cases)
def scratch_memory_is_left_as_it_was(right: Any, *args: Any) -> Any:
    return right(*args)[:0]


@planted(f"{PLANNER}.compile.cleared_rows", laws=[SLICES], cases=family_cases)
def scratch_memory_is_cleared_an_element_too_far(right: Any, *args: Any) -> Any:
    rows = right(*args)
    rows[:, Column.DST_OFFSET_BYTES] += 2
    return rows


# The binding, broken on purpose.


@planted(f"{BINDING}.copies.cut_tokens", laws=[SLICES, PACK])
def a_held_prefix_is_moved_again(right: Any, tokens: TokenRange, sizes: Any) -> Any:
    return right(TokenRange(0, tokens.stop), sizes)


@planted(f"{BINDING}.copies.cut_tokens", laws=[SLICES])
def the_pages_of_only_one_side_cut_the_tokens(right: Any, tokens: TokenRange, sizes: Any) -> Any:
    return right(tokens, sizes[:1])


@planted(f"{BINDING}.operands.SideColumns.joined", laws=[SLICES, PACK])
def every_row_is_taken_for_joined(right: Any, side: Any, rows: Any) -> Any:
    return np.ones(len(rows), bool)


@planted(f"{BINDING}.pages.Blocks.pages", laws=[SLICES, PACK])
def blocks_are_taken_for_pages(right: Any, blocks: Any, form: Any, *rest: Any) -> Any:
    return right(blocks, form, *rest) // form.pages_per_block


@planted(f"{BINDING}.reads.DST", laws=[SLICES], by=RED)
def one_sides_columns_are_read_for_the_other(right: Any) -> Any:
    return SRC


@planted(f"{BINDING}.reads.breaks", laws=[SLICES])
def descriptors_are_joined_that_continue_on_one_side_only(
    right: Any, src: Any, dst: Any, lengths: Any
) -> Any:
    return right(dst, dst, lengths)


# Scales that do not go with their elements.


def is_scale(name: str) -> bool:
    return name.endswith(("k_scale", "v_scale"))


@planted(TAKEN_PLANS, laws=[SLICES, WHOLE, PACK], cases=family_cases)
def scales_are_left_behind(right: Any, *layouts: Layout) -> Plan:
    return with_moves(right(*layouts), lambda move: None if is_scale(move.field) else move)


@planted(TAKEN_PLANS, laws=[SLICES], cases=family_cases, each=["src", "dst"])
def scales_lie_an_element_further(side: str, right: Any, *layouts: Layout) -> Plan:
    return with_moves(right(*layouts), lambda m: further(m, side) if is_scale(m.field) else m)


@planted(TAKEN_PLANS, laws=[SLICES], cases=in_one_pipeline)
def the_scales_are_those_of_another_head(right: Any, source: Layout, destination: Layout) -> Any:
    """Believe that P's ranks hold their heads' scales in reverse order."""
    counts = {field.name: field.shape[0] for field in source.model.fields}

    def turned(shard: Shard) -> Shard:
        count, span = counts[shard.field], shard.box[0]
        box = (Span(count - span.stop, count - span.start), *shard.box[1:])
        return replace(shard, box=box) if is_scale(shard.field) else shard

    ranks = (replace(one, shards=tuple(map(turned, one.shards))) for one in source.ranks)
    return right(replace(source, ranks=tuple(ranks)), destination)


@planted(TAKEN_PLANS, laws=[SLICES], cases=in_one_pipeline)
def an_indexers_scales_lie_behind_their_tokens_elements(
    right: Any, source: Layout, destination: Layout
) -> Any:
    """Believe in rows of elements and scales, which no check of a layout can tell."""
    sizes: dict[str, dict[str, int]] = {}
    for one in source.ranks[0].shards:
        item = one.dtype.itemsize_bytes
        sizes.setdefault(one.region, {})[one.field] = one.box[0].size * item if one.box else item

    def in_rows(shard: Shard, tokens: dict[str, int | None]) -> Shard:
        if "index_k" not in shard.field:
            return shard
        offset_bytes = shard.offset_bytes // (tokens[shard.region] or 1)
        row_bytes = sum(sizes[shard.region].values())
        return replace(shard, offset_bytes=offset_bytes, token_stride_bytes=row_bytes)

    ranks = []
    for rank in source.ranks:
        tokens = {region.name: region.page_tokens for region in rank.regions}
        ranks.append(replace(rank, shards=tuple(in_rows(one, tokens) for one in rank.shards)))
    return right(replace(source, ranks=tuple(ranks)), destination)


# Tokens that are looked for on the wrong rank, or at the wrong place there.

WRONG_PARTS: dict[str, Callable[[Region], Region]] = {
    "replicas": lambda region: replace(
        region, context_parts=1, context_part=0, interleave_tokens=1
    ),
    "backwards": lambda region: replace(
        region, context_part=region.context_parts - 1 - region.context_part
    ),
    "by one": lambda region: replace(region, interleave_tokens=1),
}


@planted(TAKEN_PLANS, laws=[SLICES, PACK], cases=outright_cases, by=RED, each=[*WRONG_PARTS])
def parts_are_taken_for_others(
    name: str, right: Any, source: Layout, destination: Layout
) -> object:
    return right(with_regions(source, WRONG_PARTS[name]), destination)


@planted("restow.broker.layout.TokenClass.before", laws=[SLICES, WHOLE, PACK], by=RED)
def a_rank_gets_every_nth_token_whatever_the_runs(right: Any, held: TokenClass, token: Any) -> Any:
    return token // held.parts


@planted(f"{BINDING}.copies.cut_shared", laws=[SLICES, PACK], by=RED)
def tokens_are_joined_that_follow_each_other_on_one_side(
    right: Any, pair: Any, start: int, stop: int, forms: Any
) -> Any:
    return right(pair, start, stop, [form for form in forms if form is not pair.dst])


@planted(f"{BINDING}.pages.PageList.holding", laws=[PACK], by=RED)
def a_run_has_room_for_the_tokens_of_others(right: Any, pages: Any, stretches: Any) -> Any:
    page, place = right(pages, stretches)
    if pages.ids is None and place is not None and len(place):
        place = stretches.first - stretches.first[0]
    return page, place


@planted(f"{PLANNER}.program.GroupPair.src_pages", laws=[WHOLE], by=(*RED, ValueError))
def pages_are_counted_as_if_all_tokens_were_in_them(right: Any, pair: Any, *ends: int) -> Any:
    return right(replace(pair, src=replace(pair.src, tokens=TokenClass())), *ends)


@pytest.mark.parametrize("fault", faults.params)
def test_a_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.plant(monkeypatch)
    fault.find()
