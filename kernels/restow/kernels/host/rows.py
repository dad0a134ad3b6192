"""Views of the host's address space: they copy nothing, and only the bytes used are touched."""

import ctypes
from collections import deque
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from restow.kernels.codes import SRC_BYTES, Int64s
from restow.kernels.even_runs import even_gap

Voids = npt.NDArray[np.void]

RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [*((raw, raw) for raw in RAW.values()), (F32, BF16), (BF16, F32), (F32, F16), (F16, F32),
          (BF16, F16), (F16, BF16)]  # of source and destination, by code  # fmt: skip


def memmove_rows(src: Int64s, dst: Int64s, length_bytes: Int64s) -> None:
    """Call memmove once for every row."""
    _exhaust(map(ctypes.memmove, dst.tolist(), src.tolist(), length_bytes.tolist()))


def zero_rows(address: Int64s, length_bytes: Int64s) -> None:
    """Call memset once for every row."""
    _exhaust(map(ctypes.memset, address.tolist(), repeat(0), length_bytes.tolist()))


def elements(address: int, count: int, step_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `count` elements, `step_bytes` apart, as a tensor."""
    span_bytes = (count - 1) * step_bytes + dtype.itemsize
    flat = torch.frombuffer(_buffer(address, span_bytes), dtype=dtype)
    return flat[:: step_bytes // dtype.itemsize]


def view(
    address: int, sizes: tuple[int, ...], strides_bytes: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return a box of elements in place."""
    reach = sum((size - 1) * step for size, step in zip(sizes, strides_bytes, strict=True))
    flat = torch.frombuffer(_buffer(address, reach + dtype.itemsize), dtype=dtype)
    return flat.as_strided(sizes, [step // dtype.itemsize for step in strides_bytes])


@dataclass(frozen=True, slots=True, eq=False)
class StridedRows:
    """Rows of elements that are copied as they are, each in one operation of numpy.

    ``source`` and ``target`` are addresses from the first element to the last; what is copied from
    ``reads[i]`` goes to ``writes[i]``, both in elements of ``unit_bytes`` from the first one.
    """

    unit_bytes: int
    source: range
    target: range
    reads: list[slice]
    writes: list[slice]

    @classmethod
    def of(cls, rows: Int64s) -> "StridedRows":
        """Rows [n, 6] of a piece table, all of one raw code."""
        src, dst, count, src_step, dst_step, code = rows.T
        unit_bytes = int(SRC_BYTES[code[0]])
        source, reads = _slices(src, count, src_step, unit_bytes)
        target, writes = _slices(dst, count, dst_step, unit_bytes)
        return cls(unit_bytes, source, target, reads, writes)

    def moved(self, src_bytes: int, dst_bytes: int) -> "StridedRows | None":
        """The same rows so many bytes further on; None if elements would lie crooked there."""
        if src_bytes % self.unit_bytes or dst_bytes % self.unit_bytes:
            return None
        source, target = (
            range(span.start + by, span.stop + by)
            for span, by in ((self.source, src_bytes), (self.target, dst_bytes))
        )
        return StridedRows(self.unit_bytes, source, target, self.reads, self.writes)

    def __call__(self) -> None:
        """Copy all rows."""
        source, target = (
            np.frombuffer(_buffer(span.start, len(span)), UNITS[self.unit_bytes])
            for span in (self.source, self.target)
        )
        for read, write in zip(self.reads, self.writes, strict=True):
            target[write] = source[read]


def _slices(
    address: Int64s, count: Int64s, step_bytes: Int64s, unit_bytes: int
) -> tuple[range, list[slice]]:
    """Addresses from the rows' first element to their last, and where between them each row is."""
    first, stop = int(address.min()), address + (count - 1) * step_bytes + unit_bytes
    starts, stops = (((end - first) // unit_bytes).tolist() for end in (address, stop))
    parts = list(map(slice, starts, stops, (step_bytes // unit_bytes).tolist()))
    return range(first, int(stop.max())), parts


class Rows:
    """Rows of equal shape at many addresses, read and written through views that may overlap.

    `even` is True where the rows are ascending and evenly spaced, by `gap_bytes`: then no index
    is needed. Rows of contiguous elements move as numpy voids, one memcpy for each.
    """

    def __init__(
        self,
        address: Int64s,
        count: int,
        step_bytes: int,
        dtype: torch.dtype,
        even: bool = False,
    ) -> None:
        """View rows of `count` elements, `step_bytes` apart, at every address.

        `even`: they are known to be ascending and evenly spaced, and need not be looked at.
        """
        self.n, self.count, self.dtype = len(address), count, dtype
        self._address, self._pieces = address, 1
        self.step = step_bytes // dtype.itemsize
        self.span_bytes = (count - 1) * step_bytes + dtype.itemsize
        if self.n < 2:
            gap_bytes: int | None = self.span_bytes
        else:
            gap_bytes = int(address[1] - address[0]) if even else even_gap(address)
        self.even = gap_bytes is not None and gap_bytes >= 0
        self.gap_bytes = gap_bytes if gap_bytes is not None else 0
        self.start = int(address[0] if self.even else address.min())
        self.stop = int(address[-1] if self.even else address.max()) + self.span_bytes
        self._buffer = _buffer(self.start, self.stop - self.start)

    @property
    def dense(self) -> bool:
        """Whether each row begins where the one before it ends."""
        return self.even and self.gap_bytes == self.span_bytes

    @cached_property
    def offset(self) -> Int64s:
        """Return where each row begins, in bytes from the first one's beginning."""
        offset: Int64s = self._address - self.start
        if self._pieces > 1:
            offset = (offset[:, None] + self.span_bytes * np.arange(self._pieces)).ravel()
        return offset

    def cut(self, pieces: int) -> "Rows":
        """Return the same rows of contiguous bytes, each in so many pieces of equal length."""
        rows = copy(self)
        rows.__dict__.pop("offset", None)
        rows._pieces = pieces
        rows.n, rows.count = self.n * pieces, self.count // pieces
        rows.even, rows.gap_bytes = self.dense, self.gap_bytes // pieces
        rows.span_bytes = self.span_bytes // pieces
        return rows

    def meets(self, other: "Rows") -> bool:
        """Tell whether the two spans of addresses overlap."""
        return self.start < other.stop and other.start < self.stop

    def index(self) -> torch.Tensor:
        """Return where each row begins, in elements of `windows`."""
        item = self.dtype.itemsize
        return torch.from_numpy(self.offset if item == 1 else self.offset // item)

    def windows(self) -> torch.Tensor:
        """Return the row that begins at every element: [positions, count]."""
        flat = torch.frombuffer(self._buffer, dtype=self.dtype)
        positions = (self.stop - self.start - self.span_bytes) // self.dtype.itemsize + 1
        return flat.as_strided((positions, self.count), (1, self.step))

    def even_rows(self) -> torch.Tensor:
        """Return all rows [n, count] of an even set, in place."""
        flat = torch.frombuffer(self._buffer, dtype=self.dtype)
        gap = self.gap_bytes // self.dtype.itemsize
        return flat.as_strided((self.n, self.count), (gap, self.step))

    def voids(self, part: slice) -> Voids:
        """Return contiguous rows as one void element each; in place where the set is even."""
        if self.even:
            kind = f"V{self.span_bytes}"
            return np.ndarray((self.n,), kind, self._buffer, strides=(self.gap_bytes,))[part]
        values: Voids = self._void_windows()[self.offset[part]]
        return values

    def take(self, source: "Rows", part: slice) -> None:
        """Copy contiguous rows from equally many of equal length."""
        self.put_voids(part, source.voids(part))

    def put_voids(self, part: slice, values: Voids) -> None:
        """Write contiguous rows."""
        self._void_windows()[self.offset[part]] = values

    def read(self, part: slice) -> torch.Tensor:
        """Return the rows [m, count]; in place where the set is even."""
        if self.even:
            return self.even_rows()[part]
        if self.step == 1:
            rows = torch.from_numpy(self.voids(part).view(np.uint8))
            return rows.view(self.dtype).view(-1, self.count)
        return self.windows()[self.index()[part]]

    def write(self, part: slice, values: torch.Tensor) -> None:
        """Cast the values [m, count] and write them to the rows."""
        if self.even:
            self.even_rows()[part].copy_(values)
        elif self.step == 1:
            raw = values.to(self.dtype).contiguous().view(torch.uint8).numpy()
            self.put_voids(part, raw.view(f"V{self.span_bytes}").ravel())
        else:
            self.windows().index_put_((self.index()[part],), values.to(self.dtype))

    def _void_windows(self) -> Voids:
        n = self.stop - self.start - self.span_bytes + 1
        return np.ndarray((n,), f"V{self.span_bytes}", self._buffer, strides=(1,))


def _buffer(address: int, length_bytes: int) -> Any:
    return (ctypes.c_char * length_bytes).from_address(address)


def _exhaust(calls: Iterable[object]) -> None:
    deque(calls, maxlen=0)
