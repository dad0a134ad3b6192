"""Turn bound copies into the kernels' piece tables, and run them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from restow.agents.binding.copies import Copies, Grid
from restow.agents.memory.cuda import finished
from restow.agents.memory.errors import ProgramInvalidError
from restow.broker.layout import DType
from restow.broker.layout.rows import Int64s
from restow.broker.layout.values import ITEM_BYTES
from restow.kernels import (
    PieceColumn,
    PieceTable,
    PieceTableError,
    UnsupportedCast,
    copy_code,
    copy_pieces,
    prepare_copies,
)

_NO_CODE = -1


def cast_known(src_dtype: Int64s, dst_dtype: Int64s) -> npt.NDArray[np.bool_]:
    """Mark the pairs of `DType` numbers that a kernel can convert."""
    known = (src_dtype >= 0) & (src_dtype < len(_CODES))
    known &= (dst_dtype >= 0) & (dst_dtype < len(_CODES))
    codes = _CODES[np.where(known, src_dtype, 0), np.where(known, dst_dtype, 0)]
    mask: npt.NDArray[np.bool_] = known & (codes != _NO_CODE)
    return mask


def run_copies(copies: Copies, device: torch.device) -> None:
    """Do the copies, and return when the last copy is done.

    Raises `ProgramInvalidError` for elements that are not aligned to their size, and
    `CopyFailedError`.
    """
    if not len(copies):
        return
    table = piece_table(copies)
    with finished(device):
        copy_pieces(table, device)


def prepare(device: torch.device) -> None:
    """Compile what `run_copies` launches on ``device``, and return when it is compiled.

    Raises `CopyFailedError`.
    """
    with finished(device):
        prepare_copies(device)


def piece_table(copies: Copies) -> PieceTable:
    """Return the copies as a piece table.

    Raises `ProgramInvalidError` for elements that are not aligned to their size.
    """
    table = np.empty((len(PieceColumn), len(copies)), np.int64)
    begin = 0
    for grid in copies.grids:
        size = grid.src_address.size
        filled = table[:, begin : begin + size].reshape(len(PieceColumn), *grid.src_address.shape)
        begin += size
        for column, values in (
            (PieceColumn.SRC_ADDRESS, grid.src_address),
            (PieceColumn.DST_ADDRESS, grid.dst_address),
            (PieceColumn.COUNT, grid.count),
            (PieceColumn.SRC_STEP_BYTES, grid.src_step_bytes),
            (PieceColumn.DST_STEP_BYTES, grid.dst_step_bytes),
            (PieceColumn.CODE, _CODES[grid.src_dtype, grid.dst_dtype]),
        ):
            filled[column] = values
    try:
        return PieceTable.checked(table.T)
    except PieceTableError as error:
        raise ProgramInvalidError(f"no kernel does this copy: {error}") from None


def zero_destinations(copies: Copies, zeroes: torch.Tensor) -> None:
    """Write zeroes wherever the copies would write; ``zeroes`` are bytes on the same device.

    Raises as `run_copies` does.
    """
    parts = (part for grid in copies.grids for part in _filling(grid, zeroes))
    run_copies(Copies(tuple(parts)), zeroes.device)


def _filling(grid: Grid, zeroes: torch.Tensor) -> Iterator[Grid]:
    """Yield copies to the same destinations whose source is the contiguous ``zeroes``.

    Rows with more elements than there are zeroes are cut.
    """
    item_bytes = ITEM_BYTES[grid.dst_dtype]
    most = zeroes.numel() // int(np.max(item_bytes, initial=1))
    for first in range(0, int(np.max(grid.count, initial=0)), most):
        yield replace(
            grid,
            src_address=np.full_like(grid.dst_address, zeroes.data_ptr()),
            dst_address=grid.dst_address + first * grid.dst_step_bytes,
            count=np.clip(grid.count - first, 0, most),
            src_step_bytes=item_bytes,
            src_dtype=grid.dst_dtype,
        )


def _code_table() -> Int64s:
    table = np.full((max(DType) + 1, max(DType) + 1), _NO_CODE, np.int64)
    for src in DType:
        for dst in DType:
            try:
                table[src, dst] = copy_code(src.label, dst.label)
            except UnsupportedCast:
                continue
    return table


_CODES = _code_table()
