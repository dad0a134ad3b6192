"""What projected rows must be before an agent trusts their addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from restow.broker.layout import DType
from restow.broker.layout.dtype import ITEM_BYTES
from restow.broker.layout.limits import MAX_TAPS
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.program import PROJECT_SPANS, READ_SPANS, Column, Program, ProjectColumn

Floats = npt.NDArray[np.float64]
Refuse = Callable[[Int64s, Bools, str], None]
"""Raises for the first bad row of a table, with the reason."""

_MULTIPLIED: Bools = np.array([dtype.castable for dtype in sorted(DType)])
_LEAST_DTYPE = min(DType)


def check_projected(program: Program, refuse: Refuse) -> None:
    """Check what needs no memory: all inputs lie in their spans, of which each is one page."""
    rows, spans, pairs = program.rows(PROJECT_SPANS), program.rows(READ_SPANS), program.group_pairs
    refuse(rows, rows.min(axis=1, initial=0) < 0, "has a negative number")
    for column in (ProjectColumn.TAPS, ProjectColumn.HIDDEN, ProjectColumn.CHANNELS):
        refuse(rows, rows[:, column] < 1, f"has a {column.name} below 1")
    refuse(rows, rows[:, ProjectColumn.TAPS] > MAX_TAPS, f"has more than {MAX_TAPS} TAPS")
    for column in (ProjectColumn.DTYPE, ProjectColumn.DST_DTYPE):
        known = (rows[:, column] >= _LEAST_DTYPE) & (rows[:, column] <= max(DType))
        index = np.where(known, rows[:, column] - _LEAST_DTYPE, 0)
        refuse(rows, ~known | ~_MULTIPLIED[index], f"has a {column.name} that is not multiplied")
    refuse(rows, rows[:, ProjectColumn.SPAN] >= len(spans), "names a span that is not there")
    refuse(
        rows,
        rows[:, ProjectColumn.GROUP_PAIR] >= len(pairs),
        "names a pair of lists that is not there",
    )
    per_token = np.array([pair.per_token for pair in pairs], bool)
    mine = spans[rows[:, ProjectColumn.SPAN]]
    for number in (rows[:, ProjectColumn.GROUP_PAIR], mine[:, Column.GROUP_PAIR]):
        refuse(rows, per_token[number], "rebuilds from or to pages of tokens")
    item = ITEM_BYTES[rows[:, ProjectColumn.DTYPE]]
    dst_item = ITEM_BYTES[rows[:, ProjectColumn.DST_DTYPE]]
    uneven = "has numbers that do not lie at multiples of their size"
    for column, unit in (
        (ProjectColumn.SRC_OFFSET_BYTES, item),
        (ProjectColumn.SRC_TAP_STRIDE_BYTES, item),
        (ProjectColumn.WEIGHT_OFFSET_BYTES, item),
        (ProjectColumn.WEIGHT_STRIDE_BYTES, item),
        (ProjectColumn.DST_OFFSET_BYTES, dst_item),
        (ProjectColumn.DST_STRIDE_BYTES, dst_item),
        (ProjectColumn.DST_TAP_STRIDE_BYTES, dst_item),
    ):
        refuse(rows, rows[:, column] % unit != 0, uneven)
    for column, count in (
        (ProjectColumn.SRC_TAP_STRIDE_BYTES, ProjectColumn.TAPS),
        (ProjectColumn.WEIGHT_STRIDE_BYTES, ProjectColumn.CHANNELS),
        (ProjectColumn.DST_STRIDE_BYTES, ProjectColumn.CHANNELS),
        (ProjectColumn.DST_TAP_STRIDE_BYTES, ProjectColumn.TAPS),
    ):
        refuse(rows, (rows[:, count] > 1) & (rows[:, column] < 1), f"has no {column.name}")
    ends = _ends(rows, ProjectColumn.SRC_OFFSET_BYTES, _TAPS, _HIDDEN)
    refuse(rows, ends > mine[:, Column.COUNT], "leaves its span")


def check_projected_memory(
    program: Program, strides: Int64s, constant: Sequence[bool], refuse: Refuse
) -> None:
    """Check that weights lie in constant regions, and windows in pages of others.

    And that no more weights are multiplied than there are: the work is bounded by the memory.
    """
    rows = program.rows(PROJECT_SPANS)
    if not len(rows):
        return
    fixed = np.zeros(len(strides), bool)
    fixed[: len(constant)] = constant
    weights, dst = rows[:, ProjectColumn.WEIGHT_REGION], rows[:, ProjectColumn.DST_REGION]
    for region in (weights, dst):
        refuse(rows, region >= len(strides), "names a region that is not there")
    refuse(rows, ~fixed[weights], "takes weights out of a region that is not constant")
    refuse(rows, fixed[dst], "writes a constant region")
    ends = _ends(rows, ProjectColumn.WEIGHT_OFFSET_BYTES, _CHANNELS, _HIDDEN)
    refuse(rows, ends > strides[weights], "leaves the region of its weights")
    ends = _ends(rows, ProjectColumn.DST_OFFSET_BYTES, _WINDOW_CHANNELS, _WINDOW_TAPS)
    refuse(rows, ends > strides[dst], "leaves its destination page")
    item = ITEM_BYTES[rows[:, ProjectColumn.DTYPE]].astype(float)
    sizes = item * rows[:, ProjectColumn.CHANNELS] * rows[:, ProjectColumn.HIDDEN]
    much = sizes.sum() > strides[fixed].astype(float).sum()
    refuse(rows, np.full(len(rows), much), "is one of many that multiply weights more than once")


_TAPS = (ProjectColumn.TAPS, ProjectColumn.SRC_TAP_STRIDE_BYTES, ProjectColumn.DTYPE)
_HIDDEN = (ProjectColumn.HIDDEN, None, ProjectColumn.DTYPE)
_CHANNELS = (ProjectColumn.CHANNELS, ProjectColumn.WEIGHT_STRIDE_BYTES, ProjectColumn.DTYPE)
_WINDOW_CHANNELS = (ProjectColumn.CHANNELS, ProjectColumn.DST_STRIDE_BYTES, ProjectColumn.DST_DTYPE)
_WINDOW_TAPS = (ProjectColumn.TAPS, ProjectColumn.DST_TAP_STRIDE_BYTES, ProjectColumn.DST_DTYPE)

_Axis = tuple[ProjectColumn, ProjectColumn | None, ProjectColumn]
"""The columns of an axis' size, of its stride (None: without gaps) and of the type."""


def _ends(rows: Int64s, offset: ProjectColumn, *axes: _Axis) -> Floats:
    """One past the last byte that each row touches; floats can't wrap around."""
    item = ITEM_BYTES[rows[:, axes[0][2]]]
    ends: Floats = rows[:, offset].astype(float)
    for size, stride, _ in axes:
        ends += (rows[:, size].astype(float) - 1) * (item if stride is None else rows[:, stride])
    return ends + item
