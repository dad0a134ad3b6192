"""The laws of drafts, digests and rebuilt windows catch what breaks them (`laws.planted`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import strategies as st

from laws.checks import check_cover
from laws.planted import (
    BINDING,
    EXECUTE,
    INTERLEAVE,
    PACK,
    PLANNER,
    SLICES,
    WHOLE,
    Fault,
    Faults,
    digests,
)
from laws.rebuilding import check_recompute, rebuilding_cases
from laws.strategies import Case, draft_cases
from restow.agents.binding import extents
from restow.agents.binding.copies import alike_rows
from restow.agents.binding.extents import Extents
from restow.agents.binding.pages import TokenRange
from restow.broker.errors import PlanError, RestowError
from restow.broker.families import EngineSettings, MlaSpec, ModelSpec, build_layout
from restow.broker.layout import DType, Layout, Region
from restow.broker.planner.program import Column, ProjectColumn

pytestmark = pytest.mark.sampled

faults = Faults()
planted = faults.planted


def shared_out_drafts() -> st.SearchStrategy[Case]:
    return st.just(SHARED_OUT)


_OWN = ModelSpec("m", (MlaSpec(0, 8, DType.FLOAT32),))
_DRAFTING = replace(_OWN, draft_layers=(MlaSpec(1, 8, DType.FLOAT32),), draft="mtp")
_SHARED = EngineSettings(tp=2, dcp=2, page_tokens=4, interleave_tokens=2)
SHARED_OUT = Case(
    (build_layout(_OWN, EngineSettings()), build_layout(_DRAFTING, _SHARED)),
    TokenRange(0, 13),
    numbers=False,
    guard_bytes=64,
    seed=0,
)


@planted(f"{PLANNER}.compile._shard_rows", laws=[SLICES], cases=draft_cases)
def drafts_are_left_as_they_were(right: Any, *args: Any) -> Any:
    """Let the content of another request stay in D's pages."""
    return right(*args)[:0]


@planted(
    f"{PLANNER}.plan.cold_fields", laws=[SLICES], cases=draft_cases, by=(AssertionError, PlanError)
)
def layers_of_two_drafts_are_taken_for_the_same(right: Any, source: Layout, *more: Layout) -> Any:
    return right(source, *more) - {field.name for field in source.model.fields}


@planted(f"{PLANNER}.compile._shard_rows", laws=[SLICES], cases=draft_cases)
def only_the_first_token_of_a_page_is_zeroed(right: Any, *args: Any) -> Any:
    rows = right(*args)
    rows[:, Column.DST_TOKEN_STRIDE_BYTES] = 0
    return rows


@planted(
    f"{PLANNER}.compile.ColdRows._pair",
    laws=[SLICES],
    cases=shared_out_drafts,
    by=(AssertionError, RestowError),
)
def a_rank_that_shares_tokens_out_is_taken_to_hold_all(
    right: Any, cold: Any, region: Region, shard: Any
) -> Any:
    alone = replace(region, context_parts=1, context_part=0, interleave_tokens=1)
    return right(cold, alone, shard)


# Digests.


DIRECT = f"{BINDING}.extents.direct_extents", f"{EXECUTE}.order_reads.direct_extents"


@planted(*DIRECT, laws=[digests(SLICES)], tries=3000)
def rows_are_cut_by_the_pages_of_one_side(
    right: Any, program: Any, rank: int, memory: Any, side: Any, *more: Any
) -> Any:
    def by_own_pages(rows: Any, pairs: Any, _: Any) -> Any:
        return alike_rows(rows, pairs, (side,))

    with patch.object(extents, "alike_rows", by_own_pages):
        return right(program, rank, memory, side, *more)


@planted(f"{BINDING}.extents.Extents.joined", laws=[digests(SLICES)])
def bytes_are_hashed_in_the_order_of_addresses(right: Any, parts: Any) -> Any:
    found = right(parts)
    order = np.argsort(found.address)
    return Extents(found.address[order], found.length_bytes[order])


NO_EXTENTS = Extents(np.empty(0, np.int64), np.empty(0, np.int64))


@planted(*DIRECT, laws=[digests(SLICES)])
@planted(
    f"{BINDING}.extents.own_span_extents",
    f"{EXECUTE}.order_reads.staged_span_extents",
    laws=[digests(WHOLE)],
)
def rows_are_hashed_by_nobody(right: Any, *args: Any) -> Any:
    """Leave rows out on both sides: equal digests would prove nothing."""
    return [NO_EXTENTS]


@planted(
    "laws.checks.one_extent",
    f"{EXECUTE}.order_reads.one_extent",
    laws=[digests(PACK), digests(INTERLEAVE)],
)
def runs_are_hashed_by_nobody(right: Any, *args: Any) -> Any:
    return NO_EXTENTS


@planted(f"{EXECUTE}.order_reads.direct_extents", laws=[digests(SLICES)])
def the_rows_of_another_rank_are_hashed(right: Any, program: Any, rank: int, *args: Any) -> Any:
    ranks = program.src_ranks
    return right(program, ranks[(ranks.index(rank) + 1) % len(ranks)], *args)


# Windows that D rebuilds.

PRODUCTS = f"{PLANNER}.recompute.product_rows"


@planted(PRODUCTS, laws=[check_recompute], cases=rebuilding_cases)
def weights_are_those_of_the_next_channel(right: Any, *args: Any) -> Any:
    rows = right(*args)
    wide = rows[:, ProjectColumn.CHANNELS] > 1
    rows[wide, ProjectColumn.CHANNELS] -= 1
    moved = rows[wide, ProjectColumn.WEIGHT_STRIDE_BYTES]
    rows[wide, ProjectColumn.WEIGHT_OFFSET_BYTES] += moved
    return rows


@planted(f"{EXECUTE}.order_reads.bind_projections", laws=[check_recompute], cases=rebuilding_cases)
def the_newest_tap_comes_first(right: Any, *args: Any) -> Any:
    rows = right(*args)
    taps = rows[:, 2].copy()
    parts = np.repeat(rows, taps, axis=0)
    tap = np.arange(len(parts)) - np.repeat(np.cumsum(taps) - taps, taps)
    parts[:, 0] += (np.repeat(taps, taps) - 1 - tap) * parts[:, 1]
    parts[:, 7] += tap * parts[:, 9]
    parts[:, 2] = 1
    return parts


@planted(
    PRODUCTS,
    laws=[check_recompute],
    cases=rebuilding_cases,
    each=[
        ProjectColumn.SRC_OFFSET_BYTES,
        ProjectColumn.SRC_TAP_STRIDE_BYTES,
        ProjectColumn.WEIGHT_STRIDE_BYTES,
        ProjectColumn.DST_OFFSET_BYTES,
        ProjectColumn.DST_TAP_STRIDE_BYTES,
    ],
)
def a_place_is_off_by_one(column: ProjectColumn, right: Any, *args: Any) -> Any:
    rows = right(*args)
    source = column.name.startswith(("SRC", "WEIGHT"))
    dtype = rows[:, ProjectColumn.DTYPE if source else ProjectColumn.DST_DTYPE]
    rows[:, column] += np.where(dtype == DType.FLOAT32, 4, 2)
    return rows


@planted(PRODUCTS, laws=[check_recompute], cases=rebuilding_cases)
def a_hidden_number_is_left_out(right: Any, *args: Any) -> Any:
    rows = right(*args)
    rows[rows[:, ProjectColumn.HIDDEN] > 1, ProjectColumn.HIDDEN] -= 1
    return rows


@planted(
    f"{PLANNER}.recompute._OFFSETS",
    f"{PLANNER}.recompute._STRIDES",
    laws=[check_recompute],
    cases=rebuilding_cases,
)
def channels_are_joined_that_do_not_go_on(right: Any) -> Any:
    return [right[0]] * 2


@planted(f"{PLANNER}.compile._unspared", laws=[check_recompute], cases=rebuilding_cases)
def rebuilt_windows_are_sent_as_well(right: Any, moves: Any, spared: Any) -> Any:
    return moves


def test_the_law_holds_of_drafts_whose_tokens_are_shared_out() -> None:
    check_cover(SHARED_OUT, SLICES)


@pytest.mark.parametrize("fault", faults.params)
def test_a_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.plant(monkeypatch)
    fault.find()
