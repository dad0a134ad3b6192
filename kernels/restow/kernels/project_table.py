"""The project table: which products PROJECT makes, as one int64 array (numpy only).

rows  int64 [n, 12]  the columns of `ProjectColumn`

    for every row, for t in [0, TAPS), for c in [0, CHANNELS):
        DST_ADDRESS + c * DST_STRIDE_BYTES + t * DST_TAP_STRIDE_BYTES  <-  cast(sum over h of
            WEIGHT_ADDRESS[c * WEIGHT_STRIDE_BYTES + h] * SRC_ADDRESS[t * SRC_TAP_STRIDE_BYTES + h])

Vectors of HIDDEN elements lie without gaps, inputs and weights are of one type. Addresses are
absolute; the caller guarantees that they lie inside memory that may be touched. Rows run in no
order: no destination may be written twice, nor be read.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from restow.kernels.codes import Int64s, TableError


class ProjectColumn(IntEnum):
    """Columns of a project table."""

    SRC_ADDRESS = 0
    SRC_TAP_STRIDE_BYTES = 1
    TAPS = 2
    HIDDEN = 3
    WEIGHT_ADDRESS = 4
    WEIGHT_STRIDE_BYTES = 5
    CHANNELS = 6
    DST_ADDRESS = 7
    DST_STRIDE_BYTES = 8
    DST_TAP_STRIDE_BYTES = 9
    TYPE = 10
    DST_TYPE = 11


class FloatCode(IntEnum):
    """The types that are multiplied, and that products are stored as."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


FLOAT_BYTES: Int64s = np.array([4, 2, 2], dtype=np.int64)  # by code


class ProjectTableError(TableError):
    """A project table breaks a rule."""

    table = "project table"


@dataclass(frozen=True, slots=True, eq=False)
class ProjectTable:
    """The rows of a checked project table; `ProjectTable.checked` builds one."""

    rows: Int64s  # [n, 12]

    @classmethod
    def checked(cls, rows: npt.NDArray[Any]) -> "ProjectTable":
        """Check the rules of every row and return the table; raise ProjectTableError otherwise.

        Addresses and strides are multiples of the element's size.
        """
        ProjectTableError.check_shape(rows, ProjectColumn)
        refuse = partial(ProjectTableError.refuse, rows)
        for column in (ProjectColumn.TYPE, ProjectColumn.DST_TYPE):
            code = rows[:, column]
            refuse((code < 0) | (code >= len(FloatCode)), column, "is no known type")
        item = FLOAT_BYTES[rows[:, ProjectColumn.TYPE]]
        dst_item = FLOAT_BYTES[rows[:, ProjectColumn.DST_TYPE]]
        for column in (ProjectColumn.TAPS, ProjectColumn.HIDDEN, ProjectColumn.CHANNELS):
            refuse(rows[:, column] < 1, column, "is not positive")
        for column, unit in (
            (ProjectColumn.SRC_ADDRESS, item),
            (ProjectColumn.WEIGHT_ADDRESS, item),
            (ProjectColumn.DST_ADDRESS, dst_item),
        ):
            refuse(rows[:, column] <= 0, column, "is no address")
            refuse(rows[:, column] % unit != 0, column, _UNEVEN)
        for column, count, unit in (
            (ProjectColumn.SRC_TAP_STRIDE_BYTES, ProjectColumn.TAPS, item),
            (ProjectColumn.WEIGHT_STRIDE_BYTES, ProjectColumn.CHANNELS, item),
            (ProjectColumn.DST_STRIDE_BYTES, ProjectColumn.CHANNELS, dst_item),
            (ProjectColumn.DST_TAP_STRIDE_BYTES, ProjectColumn.TAPS, dst_item),
        ):
            used = rows[:, count] > 1
            refuse(used & (rows[:, column] <= 0), column, "is not positive")
            refuse(used & (rows[:, column] % unit != 0), column, _UNEVEN)
        return cls(np.ascontiguousarray(rows))


_UNEVEN = "is no multiple of the element's size"
