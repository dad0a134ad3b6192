"""The reference executor: what READ, GATHER and SCATTER mean, over one poisoned arena.

Independent of the product's executors on purpose. Every access must lie inside one registered
piece of memory, an element at a multiple of its size, as devices load nothing else; and every byte
counts how often it was read and written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import numpy.typing as npt

from laws.values import POISON, to_bits, to_floats
from restow.agents.binding.copies import Copies
from restow.agents.binding.reads import Descriptors
from restow.broker.layout import DType

Int64s = npt.NDArray[np.int64]
ARENA_BYTES = 1 << 21
_FLOATS = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
"""By the kernels' code."""
_UINTS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Arena:
    """Host memory, all 0xA5, handed out in registered pieces."""

    def __init__(self) -> None:
        self.data = np.full(ARENA_BYTES, POISON, np.uint8)
        self.writes = np.zeros(ARENA_BYTES, np.uint8)
        self.reads = np.zeros(ARENA_BYTES, np.uint8)
        self.base: int = self.data.ctypes.data
        self.used = 64
        self._starts = np.empty(0, np.int64)
        self._stops = np.empty(0, np.int64)

    def allocate(self, size_bytes: int, guard_bytes: int) -> int:
        """Return the offset of a new registered piece, with ``guard_bytes`` behind it."""
        start = -(-self.used // 4) * 4
        self.used = start + size_bytes + guard_bytes
        assert self.used <= ARENA_BYTES, f"the arena is too small for {self.used} bytes"
        self._starts = np.append(self._starts, start)
        self._stops = np.append(self._stops, start + size_bytes)
        return start

    def address(self, offset: int) -> int:
        return self.base + offset

    def places(self, address: Int64s, length_bytes: Int64s) -> Int64s:
        """Return the offset of each byte of runs, in order."""
        return _bytes_of_runs(address - self.base, length_bytes)

    def read(self, descriptors: Descriptors) -> None:
        """Copy runs of bytes."""
        lengths = descriptors.length_bytes
        assert (lengths > 0).all(), "a descriptor of no bytes"
        src = self._offsets(descriptors.src_address, lengths)
        dst = self._offsets(descriptors.dst_address, lengths)
        self._move(_bytes_of_runs(src, lengths), _bytes_of_runs(dst, lengths))

    def copy(self, copies: Copies) -> None:
        """Copy strided rows, element by element, with a cast where the dtypes differ."""
        for row in rows_of(copies):
            src_at, dst_at, count, src_step, dst_step, src_number, dst_number = row
            src_dtype, dst_dtype = DType(src_number), DType(dst_number)
            src = self._elements(src_at, count, src_step, src_dtype.itemsize_bytes)
            dst = self._elements(dst_at, count, dst_step, dst_dtype.itemsize_bytes)
            if src_dtype is dst_dtype:
                self._move(src.ravel(), dst.ravel())
                continue
            self._count(self.reads, src.ravel())
            self._count(self.writes, dst.ravel())
            patterns = self.data[src].view(_UINTS[src_dtype.itemsize_bytes])[:, 0]
            cast = to_bits(to_floats(patterns, src_dtype), dst_dtype)
            self.data[dst] = cast[:, None].view(np.uint8)

    def project(self, rows: Int64s) -> None:
        """Make the products of a project table, element by element at the places that it names."""
        for row in rows.tolist():
            src, src_tap, taps, hidden, weight, weight_step, channels = row[:7]
            dst, dst_step, dst_tap, code, dst_code = row[7:]
            dtype, dst_dtype = _FLOATS[code], _FLOATS[dst_code]
            inputs = self._box(src, (taps, hidden), (src_tap, dtype.itemsize_bytes), dtype)
            weights = self._box(
                weight, (channels, hidden), (weight_step, dtype.itemsize_bytes), dtype
            )
            self._count(self.reads, inputs.ravel())
            one, other = (
                to_floats(self.data[at].view(_UINTS[dtype.itemsize_bytes])[..., 0], dtype)
                for at in (inputs, weights)
            )
            products = to_floats(to_bits((one @ other.T).astype(np.float32), dtype), dtype)
            at = self._box(dst, (taps, channels), (dst_tap, dst_step), dst_dtype)
            self._count(self.writes, at.ravel())
            self.data[at] = to_bits(products, dst_dtype)[..., None].view(np.uint8)

    def _box(
        self, address: int, sizes: tuple[int, int], steps: tuple[int, int], dtype: DType
    ) -> Int64s:
        """Return the offsets of the bytes of a box, ``[*sizes, item]``."""
        item = dtype.itemsize_bytes
        _check_straight(address, sizes, steps, item)
        reach = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)) + item
        start = self._offsets(np.array([address]), np.array([reach]))
        outer, inner = (np.arange(n) * step for n, step in zip(sizes, steps, strict=True))
        offsets: Int64s = start + outer[:, None, None] + inner[:, None] + np.arange(item)
        return offsets

    def zero(self, copies: Copies) -> None:
        """Zero what the copies would write."""
        for _, at, count, _, step, _, number in rows_of(copies):
            dst = self._elements(at, count, step, DType(number).itemsize_bytes).ravel()
            self._count(self.writes, dst)
            self.data[dst] = 0

    def _elements(self, address: int, count: int, step: int, item: int) -> Int64s:
        assert count > 0, "a copy of no elements"
        assert count == 1 or step >= item, f"step {step} folds elements of {item} bytes"
        _check_straight(address, (count,), (step,), item)
        reach = np.array([(count - 1) * step + item])
        start = self._offsets(np.array([address]), reach)
        return start[:, None] + step * np.arange(count)[:, None] + np.arange(item)

    def _offsets(self, addresses: Int64s, lengths: Int64s) -> Int64s:
        """Return the offsets of runs, each of which lies inside one registered piece."""
        offsets = addresses - self.base
        piece = np.searchsorted(self._starts, offsets, side="right") - 1
        assert (piece >= 0).all(), "an address before all registered memory"
        inside = offsets + lengths <= self._stops[piece]
        assert inside.all(), f"bytes outside of a registered piece: {offsets[~inside][:4]}"
        return offsets

    def _move(self, src: Int64s, dst: Int64s) -> None:
        self._count(self.reads, src)
        self._count(self.writes, dst)
        self.data[dst] = self.data[src]

    @staticmethod
    def _count(counters: npt.NDArray[np.uint8], index: Int64s) -> None:
        np.add.at(counters, index, 1)


def _check_straight(address: int, sizes: Sequence[int], steps: Sequence[int], item: int) -> None:
    used = [step for size, step in zip(sizes, steps, strict=True) if size > 1]
    assert not any(place % item for place in (address, *used)), (
        f"elements of {item} bytes at {address}, steps {used}: not at multiples of their size"
    )


def rows_of(copies: Copies) -> list[list[int]]:
    """Return every row of the copies: addresses, count, steps, dtypes."""
    rows: list[list[int]] = []
    for grid in copies.grids:
        columns = np.broadcast_arrays(*(getattr(grid, field.name) for field in fields(grid)))
        assert columns[0].shape == grid.src_address.shape, "more rows than addresses"
        rows += np.stack([column.ravel() for column in columns], axis=1).tolist()
    return rows


def bytes_read_by(copies: Copies) -> int:
    """Return how many bytes the copies read."""
    return sum(row[2] * DType(row[5]).itemsize_bytes for row in rows_of(copies))


def _bytes_of_runs(starts: Int64s, lengths: Int64s) -> Int64s:
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    index: Int64s = np.repeat(starts - (ends - lengths), lengths) + np.arange(total)
    return index
