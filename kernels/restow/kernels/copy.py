"""GATHER and SCATTER on a GPU: every row of a piece table in one launch.

rows   int64 [n, 6]  a PieceTable's rows, on the device
tiles  int64 [t, 2]  row and first element of every tile of BLOCK elements, on the device

One program copies one tile. Casts to bfloat16 are done on the bits, so that they round to nearest
even on every GPU and in Triton's interpreter, which truncates them.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from restow.kernels.codes import Column, CopyCode
from restow.kernels.piece_table import PieceTable
from restow.kernels.tiles import tiles

BLOCK = 1024

COPY_1, COPY_2, COPY_4, COPY_8 = (tl.constexpr(int(code)) for code in list(CopyCode)[:4])
F32_BF16, BF16_F32, F32_F16, F16_F32, BF16_F16, F16_BF16 = (
    tl.constexpr(int(code)) for code in list(CopyCode)[4:]
)
COLUMNS = tl.constexpr(len(Column))


@triton.jit  # type: ignore[untyped-decorator]
def _load(address, mask, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(address.to(tl.pointer_type(dtype)), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _store(address, value, mask, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(address.to(tl.pointer_type(dtype)), value, mask=mask)


@triton.jit
def _bf16_bits(value):  # type: ignore[no-untyped-def]
    """Round float32 to bfloat16, to nearest even; NaN becomes the quiet NaN of its sign."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = ((bits >> 16) & 0x8000) | 0x7FC0
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, rounded).to(tl.uint16)


@triton.jit
def _from_bf16_bits(bits):  # type: ignore[no-untyped-def]
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def copy_pieces_kernel(rows, tiles, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy and cast one tile."""
    i_tile = tl.program_id(0).to(tl.int64)
    i_row = tl.load(tiles + i_tile * 2)
    o_elem = tl.load(tiles + i_tile * 2 + 1) + tl.arange(0, BLOCK)  # [BLOCK] int64
    p_row = rows + i_row * COLUMNS
    m_elem = o_elem < tl.load(p_row + 2)
    src = tl.load(p_row) + o_elem * tl.load(p_row + 3)  # [BLOCK] addresses
    dst = tl.load(p_row + 1) + o_elem * tl.load(p_row + 4)
    code = tl.load(p_row + 5)

    if code == COPY_1:
        _store(dst, _load(src, m_elem, tl.uint8), m_elem, tl.uint8)
    elif code == COPY_2:
        _store(dst, _load(src, m_elem, tl.uint16), m_elem, tl.uint16)
    elif code == COPY_4:
        _store(dst, _load(src, m_elem, tl.uint32), m_elem, tl.uint32)
    elif code == COPY_8:
        _store(dst, _load(src, m_elem, tl.uint64), m_elem, tl.uint64)
    elif code == F32_BF16:
        _store(dst, _bf16_bits(_load(src, m_elem, tl.float32)), m_elem, tl.uint16)
    elif code == BF16_F32:
        _store(dst, _from_bf16_bits(_load(src, m_elem, tl.uint16)), m_elem, tl.float32)
    elif code == F32_F16:
        _store(dst, _load(src, m_elem, tl.float32).to(tl.float16), m_elem, tl.float16)
    elif code == F16_F32:
        _store(dst, _load(src, m_elem, tl.float16).to(tl.float32), m_elem, tl.float32)
    elif code == BF16_F16:
        b_value = _from_bf16_bits(_load(src, m_elem, tl.uint16))
        _store(dst, b_value.to(tl.float16), m_elem, tl.float16)
    elif code == F16_BF16:
        b_value = _load(src, m_elem, tl.float16).to(tl.float32)
        _store(dst, _bf16_bits(b_value), m_elem, tl.uint16)


def copy_pieces(table: PieceTable, device: torch.device) -> None:
    """Launch the copy on the current stream of `device`, the current device; nothing waits for it.

    The table goes up in one asynchronous upload from pinned memory.
    """
    rows = table.widen().lengthen().widen().rows
    tile_rows = tiles(rows[:, Column.COUNT], BLOCK)
    if not len(tile_rows):
        return
    both = torch.from_numpy(np.concatenate([rows.ravel(), tile_rows.ravel()]))
    if device.type == "cuda":
        both = both.pin_memory().to(device, non_blocking=True)
    copy_pieces_kernel[(len(tile_rows),)](both, both[rows.size :], BLOCK=BLOCK)
