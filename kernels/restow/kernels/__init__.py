"""Copy, clear and multiply strided memory that a table describes.

Tables of a GPU's addresses run as Triton kernels; tables of host addresses run on the CPU with the
same result. Triton is imported when a kernel first runs on a GPU, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from restow.kernels import host_copies as copies
from restow.kernels import host_product as product
from restow.kernels.codes import CopyCode, PieceColumn, UnsupportedCast, copy_code
from restow.kernels.row_table import (
    ONE_PAGE,
    VECTOR_BYTES,
    ZERO_CODES,
    RowCall,
    RowColumn,
    RowTable,
    RowTableError,
    SidePages,
    TokenList,
)
from restow.kernels.tables import (
    FloatCode,
    PieceTable,
    PieceTableError,
    ProjectColumn,
    ProjectTable,
    ProjectTableError,
    SlotColumn,
    SlotTable,
    SlotTableError,
)

if TYPE_CHECKING:
    from restow.kernels.copy import DeviceRows

__all__ = [
    "ONE_PAGE",
    "VECTOR_BYTES",
    "ZERO_CODES",
    "CopyCode",
    "FloatCode",
    "PieceColumn",
    "PieceTable",
    "PieceTableError",
    "ProjectColumn",
    "ProjectTable",
    "ProjectTableError",
    "RowCall",
    "RowColumn",
    "RowTable",
    "RowTableError",
    "SidePages",
    "SlotColumn",
    "SlotTable",
    "SlotTableError",
    "TokenList",
    "UnsupportedCast",
    "clear_slots",
    "copy_code",
    "copy_pieces",
    "device_rows",
    "prepare_kernels",
    "project_windows",
]


def copy_pieces(table: PieceTable) -> None:
    """Execute a piece table of host addresses."""
    copies.copy_pieces(table)


def device_rows(table: RowTable, device: torch.device) -> DeviceRows:
    """Upload a row table to a GPU, for any number of launches."""
    from restow.kernels.copy import DeviceRows

    return DeviceRows(table, device)


def prepare_kernels(device: torch.device) -> None:
    """Compile what copies and multiplies, because a process's first launches take seconds.

    The work is queued on the current stream. On the CPU there is nothing to prepare.
    """
    if device.type != "cpu":
        from restow.kernels import copy, project

        with torch.cuda.device(device):
            copy.prepare(device)
            project.prepare(device)


def project_windows(table: ProjectTable, device: torch.device) -> None:
    """Rebuild conv windows from inputs and weights, as `ProjectTable` describes (PROJECT)."""
    if device.type == "cpu":
        product.project_windows(table)
    else:
        from restow.kernels import project

        with torch.cuda.device(device):
            project.project_windows(table, device)


def clear_slots(
    regions: SlotTable,
    slots: torch.Tensor,
    mask: torch.Tensor,
    *,
    of_zero: bool = False,
    first_page: int = 0,
) -> None:
    """Zero every range of `regions` in each page `slots[i]` whose `mask[i]` is set (CLEAR).

    ``slots`` is [s], or [g, s] where each group has a list of its own; ``mask`` is [s] of any
    integer type. With ``of_zero``, pages whose mask is zero are cleared instead. Pages below
    ``first_page`` are padding and stay untouched. All tensors live on one device. On a GPU the call
    does not wait, and a CUDA graph may capture the launch.
    Raises `SlotTableError` if there are fewer lists than groups.
    """
    if slots.device.type == "cpu":
        copies.clear_slots(regions, slots, mask, of_zero, first_page)
    else:
        from restow.kernels import clear

        with torch.cuda.device(slots.device):
            clear.clear_slots(regions, slots, mask, of_zero, first_page)
