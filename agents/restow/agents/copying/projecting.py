"""Rebuild conv windows from inputs in staging and weights in constant regions (PROJECT)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from restow.agents.binding.copies import by_pair
from restow.agents.binding.operands import DST, in_regions
from restow.agents.binding.pages import SNAPSHOT, Blocks, RegionTable, Tokens
from restow.agents.memory.cuda import finished
from restow.agents.memory.errors import ProgramInvalidError
from restow.broker.layout import DType
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import Column, GroupPair, ProjectColumn
from restow.kernels import FloatCode, ProjectTable, ProjectTableError, project_windows

_FIRST_PAGE: Int64s = np.zeros(1, np.int64)


def bind_projections(
    projected: Int64s,
    pairs: Sequence[GroupPair],
    staged: RegionTable,
    memory: RegionTable,
    dst_blocks: Blocks,
    tokens: Tokens,
) -> Int64s:
    """Return the kernels' project table; span ``i`` is region ``i`` of ``staged``.

    Raises `PageCountError` and `PageRangeError`.
    """
    dst_address = np.empty(len(projected), np.int64)
    for pair, index in by_pair(projected[:, ProjectColumn.GROUP_PAIR], pairs):
        region, offset = (
            projected[index[:, None], column]
            for column in (ProjectColumn.DST_REGION, ProjectColumn.DST_OFFSET_BYTES)
        )
        lines = in_regions(memory, region, offset, side=DST)
        pages = dst_blocks.listed(pair.dst, tokens)
        dst_address[index] = lines.addresses(pages, SNAPSHOT)[:, 0]
    src_address, weight_address = (
        in_regions(regions, projected[:, [region]], projected[:, [offset]]).at(_FIRST_PAGE)[:, 0]
        for regions, region, offset in (
            (staged, ProjectColumn.SPAN, ProjectColumn.SRC_OFFSET_BYTES),
            (memory, ProjectColumn.WEIGHT_REGION, ProjectColumn.WEIGHT_OFFSET_BYTES),
        )
    )
    return np.column_stack(
        [
            src_address,
            projected[:, ProjectColumn.SRC_TAP_STRIDE_BYTES],
            projected[:, ProjectColumn.TAPS],
            projected[:, ProjectColumn.HIDDEN],
            weight_address,
            projected[:, ProjectColumn.WEIGHT_STRIDE_BYTES],
            projected[:, ProjectColumn.CHANNELS],
            dst_address,
            projected[:, ProjectColumn.DST_STRIDE_BYTES],
            projected[:, ProjectColumn.DST_TAP_STRIDE_BYTES],
            _CODES[projected[:, ProjectColumn.DTYPE]],
            _CODES[projected[:, ProjectColumn.DST_DTYPE]],
        ]
    )


def run_projections(rows: Int64s, device: torch.device) -> None:
    """Compute the products, and return when the last product is stored.

    Raises `ProgramInvalidError` for numbers that are not aligned to their size, and
    `CopyFailedError`.
    """
    try:
        table = ProjectTable.checked(rows)
    except ProjectTableError as error:
        raise ProgramInvalidError(f"no kernel makes this product: {error}") from None
    with finished(device):
        project_windows(table, device)


def window_rows(projected: Int64s) -> Int64s:
    """Return the windows that projected rows write, as rows that can be zeroed, one a tap."""
    taps = projected[:, ProjectColumn.TAPS]
    each = np.repeat(projected, taps, axis=0)
    tap = np.arange(len(each)) - np.repeat(np.cumsum(taps) - taps, taps)
    rows = np.zeros((len(each), len(Column)), np.int64)
    for column, name in (
        (Column.GROUP_PAIR, ProjectColumn.GROUP_PAIR),
        (Column.DST_REGION, ProjectColumn.DST_REGION),
        (Column.DST_OFFSET_BYTES, ProjectColumn.DST_OFFSET_BYTES),
        (Column.COUNT, ProjectColumn.CHANNELS),
        (Column.DST_STEP_BYTES, ProjectColumn.DST_STRIDE_BYTES),
        (Column.SRC_DTYPE, ProjectColumn.DST_DTYPE),
        (Column.DST_DTYPE, ProjectColumn.DST_DTYPE),
    ):
        rows[:, column] = each[:, name]
    rows[:, Column.DST_OFFSET_BYTES] += tap * each[:, ProjectColumn.DST_TAP_STRIDE_BYTES]
    rows[:, Column.SRC_STEP_BYTES] = rows[:, Column.DST_STEP_BYTES]
    return rows


def _code_table() -> Int64s:
    table = np.full(max(DType) + 1, -1, np.int64)
    for code in FloatCode:
        table[DType[code.name]] = code
    return table


_CODES = _code_table()
"""`FloatCode` by `DType` number; -1 for types that are not multiplied."""
