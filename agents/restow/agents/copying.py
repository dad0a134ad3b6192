"""From bound copies to the kernels' piece tables."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from restow.agents.device import finished
from restow.agents.errors import ProgramInvalidError
from restow.agents.pieces import Copies
from restow.broker.layout import DType
from restow.broker.layout.rows import Int64s
from restow.broker.planner.table import ITEM_BYTES
from restow.kernels import PieceTable, PieceTableError, UnsupportedCast, copy_code, copy_pieces

_NO_CODE = -1


def cast_known(src_dtype: Int64s, dst_dtype: Int64s) -> npt.NDArray[np.bool_]:
    """Mask of the pairs of `DType` numbers that a kernel can turn into each other."""
    known = (src_dtype >= 0) & (src_dtype < len(_CODES))
    known &= (dst_dtype >= 0) & (dst_dtype < len(_CODES))
    codes = _CODES[np.where(known, src_dtype, 0), np.where(known, dst_dtype, 0)]
    mask: npt.NDArray[np.bool_] = known & (codes != _NO_CODE)
    return mask


def run_copies(copies: Copies, device: torch.device) -> None:
    """Do the copies, and return when the last one is done.

    Raises `ProgramInvalidError` for elements that do not lie at multiples of their size.
    """
    if not len(copies.count):
        return
    table = piece_table(copies)
    with finished(device):
        copy_pieces(table, device)


def piece_table(copies: Copies) -> PieceTable:
    """The copies as kernels want them.

    Raises `ProgramInvalidError` for elements that do not lie at multiples of their size.
    """
    rows = np.stack(
        [
            copies.src_address,
            copies.dst_address,
            copies.count,
            copies.src_step_bytes,
            copies.dst_step_bytes,
            _CODES[copies.src_dtype, copies.dst_dtype],
        ],
        axis=1,
    )
    try:
        return PieceTable.checked(rows)
    except PieceTableError as error:
        raise ProgramInvalidError(f"a copy that no kernel does: {error}") from None


def zero_destinations(copies: Copies, device: torch.device) -> None:
    """Write zeroes wherever the copies would write."""
    if not len(copies.count):
        return
    items = ITEM_BYTES[copies.dst_dtype]
    with finished(device):  # the zeroes are made on the stream that reads them
        zeroes = torch.zeros(int((copies.count * items).max()), dtype=torch.uint8, device=device)
        run_copies(
            Copies(
                np.full_like(copies.dst_address, zeroes.data_ptr()),
                copies.dst_address,
                copies.count,
                items,
                copies.dst_step_bytes,
                copies.dst_dtype,
                copies.dst_dtype,
            ),
            device,
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
