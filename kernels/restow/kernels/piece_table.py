"""The piece table: what GATHER and SCATTER copy, as one int64 array (numpy only).

rows  int64 [n, 6]  SRC_ADDRESS, DST_ADDRESS, COUNT, SRC_STEP_BYTES, DST_STEP_BYTES, CODE

    for every row, for i in [0, COUNT):
        DST_ADDRESS + i * DST_STEP_BYTES  <-  cast(SRC_ADDRESS + i * SRC_STEP_BYTES)

Addresses are absolute, of host or device memory; the caller guarantees that they lie inside
registered memory. Rows run in no order: no destination byte may be written twice, nor be read.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from restow.kernels.codes import DST_BYTES, SRC_BYTES, CopyCode, Int64s, PieceColumn, TableError
from restow.kernels.regroup import lengthened


class PieceTableError(TableError):
    """A piece table breaks a rule."""

    table = "piece table"


@dataclass(frozen=True, slots=True, eq=False)
class PieceTable:
    """The rows of a checked piece table; `PieceTable.checked` builds one."""

    rows: Int64s  # [n, 6]

    @classmethod
    def checked(cls, rows: npt.NDArray[Any]) -> "PieceTable":
        """Check the rules of every row and return the table; raise PieceTableError otherwise.

        Addresses and steps are multiples of the element's size, for a GPU insists on it. A
        contiguous run at any address may be given as COPY_1 of its bytes.
        All work goes column by column, so a table that lies so in memory is faster.
        """
        PieceTableError.check_shape(rows, PieceColumn)
        count, code = rows[:, PieceColumn.COUNT], rows[:, PieceColumn.CODE]
        if _plainly_right(rows):
            return cls(rows)
        refuse = partial(PieceTableError.refuse, rows)
        refuse((code < 0) | (code >= len(CopyCode)), PieceColumn.CODE, "is no known code")
        refuse(count < 0, PieceColumn.COUNT, "is negative")
        for address, step, low_bits in (
            (PieceColumn.SRC_ADDRESS, PieceColumn.SRC_STEP_BYTES, SRC_BYTES[code] - 1),
            (PieceColumn.DST_ADDRESS, PieceColumn.DST_STEP_BYTES, DST_BYTES[code] - 1),
        ):
            uneven = "is no multiple of the element's size"
            refuse((count > 0) & (rows[:, address] <= 0), address, "is no address")
            refuse((count > 0) & (rows[:, address] & low_bits != 0), address, uneven)
            refuse((count > 1) & (rows[:, step] <= 0), step, "is not positive")
            refuse((count > 1) & (rows[:, step] & low_bits != 0), step, uneven)
        return cls(rows)

    @property
    def bytes_written(self) -> int:
        """Bytes that all rows write."""
        return int(
            (self.rows[:, PieceColumn.COUNT] * DST_BYTES[self.rows[:, PieceColumn.CODE]]).sum()
        )

    def lengthen(self) -> "PieceTable":
        """Regroup runs of short, evenly spaced rows into few long rows of the same elements."""
        return PieceTable(lengthened(self.rows))


def _plainly_right(rows: Int64s) -> bool:
    """Tell at little cost that nothing is wrong; False says nothing."""
    if not len(rows) or rows.min() < 0 or rows[:, : PieceColumn.CODE].min() == 0:
        return False
    code = rows[:, PieceColumn.CODE]
    if code[0] >= len(CopyCode) or np.any(code != code[0]):
        return False
    src, dst, _, src_step, dst_step = np.bitwise_or.reduce(rows[:, : PieceColumn.CODE], axis=0)
    low_bits = (int(sizes[code[0]]) - 1 for sizes in (SRC_BYTES, DST_BYTES))
    return not any(
        (end & low) for end, low in zip((src | src_step, dst | dst_step), low_bits, strict=True)
    )
