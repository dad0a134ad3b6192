"""Reference implementation of each table, element by element; all kernels must agree with it.

It is plain enough to be obviously right and too slow for use outside of tests. Addresses are those
of host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import torch

from restow.kernels.codes import CopyCode
from restow.kernels.row_table import VECTOR, ZERO_1, ListColumn, RowCall, RowColumn, RowTable
from restow.kernels.tables import FloatCode, PieceTable, ProjectTable, SlotTable

COPIED = {
    CopyCode.COPY_1: (torch.uint8, torch.uint8),
    CopyCode.COPY_2: (torch.int16, torch.int16),
    CopyCode.COPY_4: (torch.int32, torch.int32),
    CopyCode.COPY_8: (torch.int64, torch.int64),
    CopyCode.F32_BF16: (torch.float32, torch.bfloat16),
    CopyCode.BF16_F32: (torch.bfloat16, torch.float32),
    CopyCode.F32_F16: (torch.float32, torch.float16),
    CopyCode.F16_F32: (torch.float16, torch.float32),
    CopyCode.BF16_F16: (torch.bfloat16, torch.float16),
    CopyCode.F16_BF16: (torch.float16, torch.bfloat16),
}
"""Source and destination types, by copy code."""
MULTIPLIED = {
    FloatCode.FLOAT32: torch.float32,
    FloatCode.BFLOAT16: torch.bfloat16,
    FloatCode.FLOAT16: torch.float16,
}


def copy_pieces(table: PieceTable) -> None:
    """Copy one element after another."""
    for src, dst, count, src_step, dst_step, code in table.rows.tolist():
        src_dtype, dst_dtype = COPIED[CopyCode(code)]
        for i in range(count):
            _store(dst + i * dst_step, _load(src + i * src_step, src_dtype).to(dst_dtype))


def row_pieces(table: RowTable, call: RowCall, staged: int) -> Iterator[list[int]]:
    """Yield what each row copies for each token of a call, as a row of a piece table."""
    header = call.lists * len(ListColumn)
    lists = call.words[:header].reshape(call.lists, len(ListColumn)).tolist()
    words = call.words[header:].view(np.int32).tolist()
    for i_row, row in enumerate(table.rows.tolist()):
        tokens, places, *sides = lists[row[RowColumn.LIST]]
        begin = 16 * words[len(table.rows) + i_row]
        for token in range(tokens):
            ends = []
            for side in (0, 1):
                base, place, page_tokens, _, _, pages = sides[6 * side :][:6]
                address, page_bytes, token_bytes, step = row[4 * side :][:4]
                place = place + token if places < 0 else words[places + side * tokens + token]
                page, in_page = divmod(place, page_tokens)
                page = page if pages < 0 else words[pages + page]
                address += base + page * page_bytes + in_page * token_bytes
                ends.append((address + begin * (side == staged), step))
            (src, src_step), (dst, dst_step) = ends
            yield [src, dst, row[RowColumn.COUNT], src_step, dst_step, row[RowColumn.CODE]]


def copy_rows(table: RowTable, call: RowCall, staged: int) -> None:
    """Copy or zero one element of one row for one token after another."""
    for piece in row_pieces(table, call, staged):
        src, dst, count, src_step, dst_step, code = piece
        for i in range(count):
            if code >= VECTOR:
                ctypes.memset(dst + i * dst_step, 0, 1 << code - ZERO_1)
            else:
                src_dtype, dst_dtype = COPIED[CopyCode(code)]
                _store(dst + i * dst_step, _load(src + i * src_step, src_dtype).to(dst_dtype))


def clear_slots(
    regions: SlotTable, slots: torch.Tensor, mask: torch.Tensor, of_zero: bool, first_page: int
) -> None:
    """Zero one range of one page after another."""
    lists = regions.lists(slots).tolist()
    for base, page_stride, offset, length, group in regions.rows.tolist():
        for page, flag in zip(lists[group], mask.tolist(), strict=True):
            if bool(flag) != of_zero and page >= first_page:
                ctypes.memset(base + page * page_stride + offset, 0, length)


def project_windows(table: ProjectTable) -> None:
    """Compute one product after another, with sums in float64 that are rounded once."""
    for (
        src, src_tap_stride, taps, hidden, weight, weight_stride, channels,
        dst, dst_stride, dst_tap_stride, code, dst_code,
    ) in table.rows.tolist():  # fmt: skip
        dtype, dst_dtype = MULTIPLIED[FloatCode(code)], MULTIPLIED[FloatCode(dst_code)]
        for tap in range(taps):
            inputs = _load(src + tap * src_tap_stride, dtype, hidden).double()
            for channel in range(channels):
                weights = _load(weight + channel * weight_stride, dtype, hidden).double()
                product = (inputs * weights).sum().to(dtype).to(dst_dtype)
                _store(dst + channel * dst_stride + tap * dst_tap_stride, product)


def _load(address: int, dtype: torch.dtype, count: int = 1) -> torch.Tensor:
    raw = bytearray(ctypes.string_at(address, count * dtype.itemsize))
    return torch.frombuffer(raw, dtype=dtype)


def _store(address: int, value: torch.Tensor) -> None:
    ctypes.memmove(address, value.data_ptr(), value.element_size())
