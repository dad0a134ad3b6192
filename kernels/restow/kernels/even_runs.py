"""Runs of evenly spaced addresses (numpy only).

even_runs: int64 [n] arrays -> bool [n], True where row i continues the run of row i - 1.
Inside a run every array grows by a constant step of its own.
"""

import numpy as np

from restow.kernels.codes import Bools, Int64s


def even_runs(*arrays: Int64s, same: Bools | None = None) -> Bools:
    """Mark the rows that continue the run of the row before them.

    A step joins two rows only if a neighbouring step equals it, so the jump from one run to the
    next belongs to neither. `same[i]` False forbids row i to join row i - 1.

    >>> even_runs(np.array([0, 2, 4, 100, 102, 104, 9]))
    array([False,  True,  True, False,  True,  True, False])
    """
    n = len(arrays[0])
    joined = np.zeros(n, dtype=np.bool_)
    if n < 3:
        return joined
    allowed = np.ones(n - 1, dtype=np.bool_) if same is None else same[1:]
    alike = np.zeros(n, dtype=np.bool_)  # alike[i]: step i equals step i - 1
    alike[1:-1] = allowed[1:] & allowed[:-1]
    for array in arrays:
        step = np.diff(array)
        alike[1:-1] &= step[1:] == step[:-1]
    linked = (alike[:-1] | alike[1:]) & allowed
    joined[1:] = linked
    joined[2:] &= ~linked[:-1] | alike[1:-1]  # two runs that meet in a row: the first keeps it
    return joined
