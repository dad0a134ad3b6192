"""The kernels' codes by `DType` numbers, as tables that are indexed by arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from restow.broker.layout import DType
from restow.broker.layout.rows import Int64s
from restow.kernels import FloatCode, UnsupportedCast, copy_code

NO_CODE = -1


def cast_known(src_dtype: Int64s, dst_dtype: Int64s) -> npt.NDArray[np.bool_]:
    """Mark the pairs of `DType` numbers that a kernel can convert."""
    known = (src_dtype >= 0) & (src_dtype < len(COPY_CODES))
    known &= (dst_dtype >= 0) & (dst_dtype < len(COPY_CODES))
    codes = COPY_CODES[np.where(known, src_dtype, 0), np.where(known, dst_dtype, 0)]
    mask: npt.NDArray[np.bool_] = known & (codes != NO_CODE)
    return mask


def _copy_codes() -> Int64s:
    table = np.full((max(DType) + 1, max(DType) + 1), NO_CODE, np.int64)
    for src in DType:
        for dst in DType:
            try:
                table[src, dst] = copy_code(src.label, dst.label)
            except UnsupportedCast:
                continue
    return table


COPY_CODES = _copy_codes()
"""The code that copies one type to another; `NO_CODE`: no kernel does."""
FLOAT_CODES: Int64s = np.full(max(DType) + 1, NO_CODE, np.int64)
"""`FloatCode` of types that are multiplied."""
FLOAT_CODES[[DType[code.name] for code in FloatCode]] = list(FloatCode)
