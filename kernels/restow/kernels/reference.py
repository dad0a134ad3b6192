"""Reference implementation of each table, element by element; all kernels must agree with it.

It is plain enough to be obviously right and too slow for use outside of tests. Addresses are those
of host memory.
"""

from __future__ import annotations

import ctypes

import torch

from restow.kernels.codes import CopyCode
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
