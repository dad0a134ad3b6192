"""Copy, clear and multiply strided memory that a table describes.

Tables of a GPU's addresses run as Triton kernels; tables of host addresses run on the CPU with the
same result. Triton is imported when a kernel first runs on a GPU, not before.
"""

from __future__ import annotations

import torch

from restow.kernels import host_copies as copies
from restow.kernels import host_product as product
from restow.kernels.codes import CopyCode, PieceColumn, UnsupportedCast, copy_code
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

__all__ = [
    "CopyCode",
    "FloatCode",
    "PieceColumn",
    "PieceTable",
    "PieceTableError",
    "ProjectColumn",
    "ProjectTable",
    "ProjectTableError",
    "SlotColumn",
    "SlotTable",
    "SlotTableError",
    "UnsupportedCast",
    "clear_slots",
    "copy_code",
    "copy_pieces",
    "prepare_copies",
    "project_windows",
]


def copy_pieces(table: PieceTable, device: torch.device) -> None:
    """Execute a piece table whose addresses belong to `device`.

    On the CPU the copies are done on return; on a GPU they are queued on the current stream.
    """
    if device.type == "cpu":
        copies.copy_pieces(table)
    else:
        from restow.kernels import copy

        with torch.cuda.device(device):
            copy.copy_pieces(table, device)


def prepare_copies(device: torch.device) -> None:
    """Compile `copy_pieces` for ``device``, because a process's first GPU launch takes seconds.

    The work is queued on the current stream. On the CPU there is nothing to prepare.
    """
    if device.type != "cpu":
        from restow.kernels import copy

        with torch.cuda.device(device):
            copy.prepare(device)


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
