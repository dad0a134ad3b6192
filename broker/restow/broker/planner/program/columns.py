"""Columns of rows: what each number of a row says."""

from __future__ import annotations

from enum import IntEnum


class Column(IntEnum):
    """Columns of a program's rows (int64)."""

    SRC_RANK = 0
    GROUP_PAIR = 1
    SRC_REGION = 2
    SRC_OFFSET_BYTES = 3
    DST_REGION = 4
    DST_OFFSET_BYTES = 5
    COUNT = 6
    SRC_STEP_BYTES = 7
    DST_STEP_BYTES = 8
    SRC_TOKEN_STRIDE_BYTES = 9
    DST_TOKEN_STRIDE_BYTES = 10
    SRC_DTYPE = 11
    DST_DTYPE = 12


class ProjectColumn(IntEnum):
    """Columns of a program's projected rows (int64)."""

    SPAN = 0
    SRC_OFFSET_BYTES = 1
    SRC_TAP_STRIDE_BYTES = 2
    TAPS = 3
    HIDDEN = 4
    DTYPE = 5
    WEIGHT_REGION = 6
    WEIGHT_OFFSET_BYTES = 7
    WEIGHT_STRIDE_BYTES = 8
    CHANNELS = 9
    GROUP_PAIR = 10
    DST_REGION = 11
    DST_OFFSET_BYTES = 12
    DST_STRIDE_BYTES = 13
    DST_TAP_STRIDE_BYTES = 14
    DST_DTYPE = 15
