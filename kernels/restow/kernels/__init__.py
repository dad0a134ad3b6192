"""Strided copies, products and clearing, each through a table: Triton on a GPU, a twin on the host.

Triton is imported when something first runs on a GPU, not before.
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
    """Execute a piece table whose addresses are `device`'s.

    On the CPU the copy is done on return; on a GPU it is queued on the current stream.
    """
    if device.type == "cpu":
        copies.copy_pieces(table)
    else:
        from restow.kernels import copy

        with torch.cuda.device(device):
            copy.copy_pieces(table, device)


def prepare_copies(device: torch.device) -> None:
    """Have `copy_pieces` compiled for ``device``: on a GPU a new process's first takes seconds.

    Queued on the current stream; nothing to do on the CPU.
    """
    if device.type != "cpu":
        from restow.kernels import copy

        with torch.cuda.device(device):
            copy.prepare(device)


def project_windows(table: ProjectTable, device: torch.device) -> None:
    """PROJECT: rebuild conv windows from inputs and weights, as `ProjectTable` says."""
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
    """CLEAR: zero every range of `regions` in the pages `slots[i]` whose `mask[i]` is set.

    ``slots`` is [s], or [g, s] where groups have lists of their own; ``mask`` any integers [s], and
    with ``of_zero`` those that are zero are meant. Pages below ``first_page`` are padding.
    All live on one device. On a GPU nothing waits, and a CUDA graph may capture the launch.
    Raises `SlotTableError` if there are fewer lists than groups.
    """
    if slots.device.type == "cpu":
        copies.clear_slots(regions, slots, mask, of_zero, first_page)
    else:
        from restow.kernels import clear

        with torch.cuda.device(slots.device):
            clear.clear_slots(regions, slots, mask, of_zero, first_page)
