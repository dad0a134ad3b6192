"""Cut a strided box into rows: the normal form of every copy.

A row is ``count`` elements with a constant step. A box with any number of axes becomes a few equal
rows and a table of their beginnings. Contiguous axes are merged first, so that rows are as long as
possible. The same function serves a single side (which bytes does a shard cover?) and two sides
(which bytes are copied where?).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from restow.broker.errors import TooManyPiecesError

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MAX_ROWS = 1 << 21
"""Limit for a box, and for all programs of a plan together."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Equal rows of ``count`` elements.

    ``steps_bytes`` has a step per side; ``offsets_bytes`` is int64 ``[rows, sides]``.
    """

    count: int
    steps_bytes: tuple[int, ...]
    offsets_bytes: Int64s

    def elements(self) -> Rows:
        """Return the same elements, each as a row of its own."""
        steps = np.arange(self.count, dtype=np.int64)[:, None] * np.array(self.steps_bytes)
        offsets = self.offsets_bytes[:, None, :] + steps
        return Rows(1, self.steps_bytes, offsets.reshape(-1, len(self.steps_bytes)))


@dataclass(frozen=True, slots=True)
class _Axis:
    size: int
    strides: tuple[int, ...]


def cut_rows(
    sizes: Sequence[int], sides: Sequence[Sequence[int]], items_bytes: Sequence[int]
) -> Rows:
    """Cut a box of ``sizes`` into rows; ``sides`` has the strides of each side.

    A row runs along the axis that is contiguous on every side, or else along the longest axis.
    Raises `TooManyPiecesError` for more than ``MAX_ROWS`` rows.

    >>> cut_rows([4, 3], [[6, 2], [6, 2]], [2, 2]).count
    12
    >>> cut_rows([4, 3], [[6, 2], [2, 8]], [2, 2]).steps_bytes
    (6, 2)
    """
    axes = _merged(sizes, sides)
    contiguous = [axis for axis in axes if axis.strides == tuple(items_bytes)]
    row = contiguous[0] if contiguous else max(axes, key=lambda axis: axis.size)
    others = [axis for axis in axes if axis is not row]
    if math.prod(axis.size for axis in others) > MAX_ROWS:
        raise TooManyPiecesError(
            f"a box of {list(sizes)} elements falls into more than {MAX_ROWS} pieces when it is "
            f"copied between its two forms"
        )
    offsets = np.zeros((1, len(sides)), np.int64)
    for axis in others:
        steps = np.arange(axis.size, dtype=np.int64)[:, None] * np.array(axis.strides)
        offsets = (offsets[None, :, :] + steps[:, None, :]).reshape(-1, len(sides))
    return Rows(row.size, row.strides, offsets)


def count_rows(sizes: Sequence[int], strides: Sequence[int], item_bytes: int) -> int:
    """Return the number of contiguous runs of a box on a single side, without creating them."""
    total = 1
    for axis in _merged(sizes, [strides]):
        if axis.strides != (item_bytes,):
            total *= axis.size
    return total


def _merged(sizes: Sequence[int], sides: Sequence[Sequence[int]]) -> list[_Axis]:
    """Return axes from inner to outer (by the last side), merged where they are contiguous."""
    by_axis = zip(sizes, zip(*sides, strict=True), strict=True)
    axes = [_Axis(size, strides) for size, strides in by_axis if size > 1]
    axes.sort(key=lambda axis: (axis.strides[-1], axis.strides))
    merged: list[_Axis] = []
    for axis in axes:
        inner = merged[-1] if merged else None
        if inner and axis.strides == tuple(inner.size * stride for stride in inner.strides):
            merged[-1] = _Axis(inner.size * axis.size, inner.strides)
        else:
            merged.append(axis)
    return merged or [_Axis(1, tuple(0 for _ in sides))]
