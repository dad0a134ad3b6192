"""The slot table: what CLEAR zeroes in a page.

rows   int64 [n, 5]  BASE_ADDRESS, PAGE_STRIDE_BYTES, OFFSET_BYTES, LENGTH_BYTES, GROUP
tiles  int64 [t, 2]  the range and its first unit, for every TILE_UNITS units of every range

    page p of a row's range is [BASE_ADDRESS + p * PAGE_STRIDE_BYTES + OFFSET_BYTES, + LENGTH_BYTES)
    GROUP says which list of page ids counts for the row

Both tensors stay on the device, so that a launch uploads nothing and a CUDA graph may hold it.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from restow.kernels.codes import TableError
from restow.kernels.tiles import tiles

TILE_UNITS = 2048


class SlotColumn(IntEnum):
    """Columns of a slot table."""

    BASE_ADDRESS = 0
    PAGE_STRIDE_BYTES = 1
    OFFSET_BYTES = 2
    LENGTH_BYTES = 3
    GROUP = 4


class SlotTableError(TableError):
    """A slot table breaks a rule."""

    table = "slot table"


@dataclass(frozen=True, slots=True, eq=False)
class SlotTable:
    """The ranges of a checked slot table; `SlotTable.checked` builds one."""

    rows: torch.Tensor  # [n, 5]
    tiles: torch.Tensor  # [t, 2]
    unit_bytes: int  # 1, 2, 4 or 8: divides every address and length
    groups: int  # lists of page ids that the rows speak of

    @classmethod
    def checked(cls, rows: npt.NDArray[Any], device: torch.device | str = "cpu") -> "SlotTable":
        """Check the rules of every row and put the table on the device, once for many launches."""
        SlotTableError.check_shape(rows, SlotColumn)
        for column in SlotColumn:
            bad = rows[:, column] < (1 if column == SlotColumn.BASE_ADDRESS else 0)
            if bad.any():
                row = int(np.argmax(bad))
                raise SlotTableError(row, f"{column.name} is {rows[row, column]}")
        outside = rows[:, SlotColumn.OFFSET_BYTES] + rows[:, SlotColumn.LENGTH_BYTES]
        too_long = outside > rows[:, SlotColumn.PAGE_STRIDE_BYTES]
        if too_long.any():
            row = int(np.argmax(too_long))
            raise SlotTableError(row, f"the range ends at byte {outside[row]}, beyond its page")
        unit_bytes = int(np.gcd.reduce(rows[:, : SlotColumn.GROUP], axis=None, initial=8))
        units = rows[:, SlotColumn.LENGTH_BYTES] // unit_bytes
        return cls(
            torch.from_numpy(rows.copy()).to(device),
            torch.from_numpy(tiles(units, TILE_UNITS)).to(device),
            unit_bytes,
            int(rows[:, SlotColumn.GROUP].max(initial=0)) + 1,
        )

    def lists(self, slots: torch.Tensor) -> torch.Tensor:
        """Page ids [groups, s] of ``slots``, which may be [s] where there is one group."""
        lists = slots.unsqueeze(0) if slots.ndim == 1 else slots
        if lists.ndim != 2 or len(lists) < self.groups:
            raise SlotTableError(None, f"{self.groups} groups, and slots {list(slots.shape)}")
        return lists.contiguous()
