"""Columns and copy codes of a piece table, and which code copies which dtypes (numpy only)."""

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class PieceColumn(IntEnum):
    """Columns of a piece table."""

    SRC_ADDRESS = 0
    DST_ADDRESS = 1
    COUNT = 2
    SRC_STEP_BYTES = 3
    DST_STEP_BYTES = 4
    CODE = 5


class CopyCode(IntEnum):
    """Operation on one element: a raw copy of 1, 2, 4 or 8 bytes, or a cast."""

    COPY_1 = 0
    COPY_2 = 1
    COPY_4 = 2
    COPY_8 = 3
    F32_BF16 = 4
    BF16_F32 = 5
    F32_F16 = 6
    F16_F32 = 7
    BF16_F16 = 8
    F16_BF16 = 9


SRC_BYTES: Int64s = np.array([1, 2, 4, 8, 4, 2, 4, 2, 2, 2], dtype=np.int64)  # by code
DST_BYTES: Int64s = np.array([1, 2, 4, 8, 2, 4, 2, 4, 2, 2], dtype=np.int64)  # by code

ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"), 1),
    "float4_e2m1fn_x2": 1,
}
_CAST_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class TableError(ValueError):
    """A table breaks a rule; `row` is None if the shape or type of the whole array is wrong."""

    table = "table"

    def __init__(self, row: int | None, reason: str) -> None:
        """Name the row and the rule that it breaks."""
        self.row, self.reason = row, reason
        super().__init__(f"{self.table}{'' if row is None else f' row {row}'}: {reason}")

    @classmethod
    def check_shape(cls, rows: npt.NDArray[Any], columns: type[IntEnum]) -> None:
        """Raise the class's error unless rows are int64 [n, columns]."""
        if rows.ndim != 2 or rows.shape[1] != len(columns) or rows.dtype != np.int64:
            want = f"int64 [n, {len(columns)}]"
            raise cls(None, f"want {want}, got {rows.dtype} {list(rows.shape)}")

    @classmethod
    def refuse(cls, rows: Int64s, bad: Bools, column: IntEnum, why: str) -> None:
        """Raise the class's error for the first row marked in `bad`."""
        if bad.any():
            row = int(np.argmax(bad))
            raise cls(row, f"{column.name} {rows[row, column]} {why}")


class UnsupportedCast(ValueError):
    """No kernel casts `src_dtype` to `dst_dtype`."""

    def __init__(self, src_dtype: str, dst_dtype: str) -> None:
        """Name both dtypes."""
        self.src_dtype, self.dst_dtype = src_dtype, dst_dtype
        super().__init__(f"no kernel copies dtype {src_dtype!r} to dtype {dst_dtype!r}")


def copy_code(src_dtype: str, dst_dtype: str) -> CopyCode:
    """Return the code that copies one element of `src_dtype` to `dst_dtype`.

    >>> copy_code("float32", "bfloat16"), copy_code("float8_e4m3fn", "float8_e4m3fn")
    (<CopyCode.F32_BF16: 4>, <CopyCode.COPY_1: 0>)
    """
    if src_dtype == dst_dtype and src_dtype in ITEM_BYTES:
        return CopyCode[f"COPY_{ITEM_BYTES[src_dtype]}"]
    try:
        return CopyCode[f"{_CAST_NAMES[src_dtype]}_{_CAST_NAMES[dst_dtype]}"]
    except KeyError:
        raise UnsupportedCast(src_dtype, dst_dtype) from None
