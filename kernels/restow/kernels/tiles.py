"""Rows of different lengths cut into tiles of one size, one GPU program each (numpy only)."""

import numpy as np

from restow.kernels.codes import Int64s


def tiles(count: Int64s, block: int) -> Int64s:
    """Return (row, first element) int64 [t, 2] of every tile of `block` elements.

    >>> tiles(np.array([5, 0, 8, 1]), 4).tolist()
    [[0, 0], [0, 4], [2, 0], [2, 4], [3, 0]]
    """
    per_row = (count + block - 1) // block
    row = np.repeat(np.arange(len(count)), per_row)
    before = np.cumsum(per_row) - per_row  # tiles of the rows before
    return np.stack([row, (np.arange(len(row)) - before[row]) * block], axis=1).astype(np.int64)
