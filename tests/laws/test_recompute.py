"""Law: windows that D rebuilds are those that P holds; nothing else is touched, or read for them.

Then the law is shown to bite: each mutation of planner and binding below turns it red.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from laws.rebuilding import check_recompute, rebuilding_cases
from laws.rounds import tried
from laws.strategies import Case
from laws.test_laws_bite import bites, change_function
from restow.agents.execute import staged_reads
from restow.broker.planner import compile as compiling
from restow.broker.planner import recompute
from restow.broker.planner import recompute as products
from restow.broker.planner.program import ProjectColumn


@tried("recompute")
@given(rebuilding_cases())
def test_windows_are_rebuilt(case: Case) -> None:
    check_recompute(case)


def changed(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let the planner's rows of products go through ``change``."""

    def further(right: Any, *args: Any) -> Any:
        rows = right(*args)
        change(rows)
        return rows

    change_function(monkeypatch, recompute, "product_rows", further)


def test_weights_of_the_next_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that weights of the next channel, as of another rank, are found."""

    def shift(rows: Any) -> None:
        wide = rows[:, ProjectColumn.CHANNELS] > 1
        rows[wide, ProjectColumn.CHANNELS] -= 1
        moved = rows[wide, ProjectColumn.WEIGHT_STRIDE_BYTES]
        rows[wide, ProjectColumn.WEIGHT_OFFSET_BYTES] += moved

    changed(monkeypatch, shift)
    bites(check_recompute, rebuilding_cases())


def test_the_newest_tap_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(right: Any, projected: Any, *args: Any) -> Any:
        rows = right(projected, *args)
        taps = rows[:, 2].copy()
        parts = np.repeat(rows, taps, axis=0)
        tap = np.arange(len(parts)) - np.repeat(np.cumsum(taps) - taps, taps)
        parts[:, 0] += (np.repeat(taps, taps) - 1 - tap) * parts[:, 1]
        parts[:, 7] += tap * parts[:, 9]
        parts[:, 2] = 1
        return parts

    change_function(monkeypatch, staged_reads, "bind_projections", turned)
    bites(check_recompute, rebuilding_cases())


@pytest.mark.parametrize(
    "column",
    [
        ProjectColumn.SRC_OFFSET_BYTES,
        ProjectColumn.SRC_TAP_STRIDE_BYTES,
        ProjectColumn.WEIGHT_STRIDE_BYTES,
        ProjectColumn.DST_OFFSET_BYTES,
        ProjectColumn.DST_TAP_STRIDE_BYTES,
    ],
)
def test_a_place_that_is_off_by_one(monkeypatch: pytest.MonkeyPatch, column: ProjectColumn) -> None:
    def shift(rows: Any) -> None:
        source = column.name.startswith(("SRC", "WEIGHT"))
        dtype = rows[:, ProjectColumn.DTYPE if source else ProjectColumn.DST_DTYPE]
        rows[:, column] += np.where(dtype == 7, 4, 2)

    changed(monkeypatch, shift)
    bites(check_recompute, rebuilding_cases())


def test_a_hidden_number_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def shorten(rows: Any) -> None:
        rows[rows[:, ProjectColumn.HIDDEN] > 1, ProjectColumn.HIDDEN] -= 1

    changed(monkeypatch, shorten)
    bites(check_recompute, rebuilding_cases())


def test_channels_joined_that_do_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_OFFSETS", [ProjectColumn.WEIGHT_OFFSET_BYTES] * 2)
    monkeypatch.setattr(products, "_STRIDES", [ProjectColumn.WEIGHT_STRIDE_BYTES] * 2)
    bites(check_recompute, rebuilding_cases())


def test_windows_that_are_sent_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_unspared", lambda moves, spared: moves)
    bites(check_recompute, rebuilding_cases())
