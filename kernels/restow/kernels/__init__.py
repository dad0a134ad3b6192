"""Strided copies, products and clearing, each through a table: Triton on a GPU, a twin on the host.

Triton is imported when something first runs on a GPU, not before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from restow.kernels.codes import Int64s
from restow.kernels.host import copies, product
from restow.kernels.host.rows import StridedRows
from restow.kernels.piece_table import (
    Column,
    CopyCode,
    PieceTable,
    PieceTableError,
    UnsupportedCast,
    copy_code,
)
from restow.kernels.project_table import (
    FloatCode,
    ProjectColumn,
    ProjectTable,
    ProjectTableError,
)
from restow.kernels.slot_table import SlotColumn, SlotTable, SlotTableError

if TYPE_CHECKING:
    from restow.kernels.copy import DevicePieces

__all__ = [
    "Column",
    "CopyCode",
    "FloatCode",
    "PieceTable",
    "PieceTableError",
    "ProjectColumn",
    "ProjectTable",
    "ProjectTableError",
    "SlotColumn",
    "SlotTable",
    "SlotTableError",
    "StridedRows",
    "UnsupportedCast",
    "clear_slots",
    "copy_code",
    "copy_pieces",
    "gather",
    "prepare_pieces",
    "prepare_runs",
    "project_windows",
    "scatter",
    "upload_pieces",
]


def copy_pieces(table: PieceTable, device: torch.device) -> None:
    """Execute a piece table whose addresses are `device`'s.

    On the CPU the copy is done on return; on a GPU it is queued on the current stream.
    """
    prepare_pieces(table, device)()


def prepare_pieces(table: PieceTable, device: torch.device) -> Callable[[], None] | StridedRows:
    """All of `copy_pieces` that touches no memory of the table; call what is returned for the rest.

    On a GPU that is everything, so that upload and launch go to one stream.
    """
    if device.type == "cpu":
        return copies.prepare_pieces(table)

    def launch() -> None:
        from restow.kernels import copy

        with torch.cuda.device(device):
            copy.copy_pieces(table, device)

    return launch


def prepare_runs(src: Int64s, dst: Int64s, length_bytes: int) -> Callable[[], None] | None:
    """What `prepare_pieces` gives for runs of equally many bytes in host memory, without a table.

    ``src`` and ``dst`` are positive addresses ``[n]``. None: a table of them is the better way.
    """
    return copies.prepare_runs(src, dst, length_bytes)


def upload_pieces(
    table: PieceTable, device: torch.device, vectors: int | None = None
) -> DevicePieces:
    """Put a piece table on a GPU once, for many launches of the same copy or for a CUDA graph.

    ``vectors``: the size of tiles, if the caller knows better (`launch_table.VECTORS`).
    """
    from restow.kernels.copy import DevicePieces

    return DevicePieces.of(table, device, vectors)


def gather(table: PieceTable, device: torch.device) -> None:
    """GATHER: copy scattered pieces into staging (the table's destinations lie in staging)."""
    copy_pieces(table, device)


def scatter(table: PieceTable, device: torch.device) -> None:
    """SCATTER: copy staging to scattered pieces (the table's sources lie in staging)."""
    copy_pieces(table, device)


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
