"""Rows whose elements alternate in memory: k rows with k elements' steps fill one run (numpy only).

A transposed copy looks so on one of its sides: the K-1 taps of a conv window, channel by channel.
"""

import numpy as np

from restow.kernels.codes import Int64s


def interlaced(address: Int64s, ways: int, unit_bytes: int) -> Int64s | None:
    """Order the rows so that every ``ways`` of them interlace; None where not all of them do.

    Rows that begin at ``address`` have elements of ``unit_bytes``, ``ways`` elements apart. Returns
    the rows' indices [runs, ways]: those of one run begin a unit after each other.
    """
    if ways < 2 or len(address) % ways:
        return None
    order = np.argsort(address, kind="stable").reshape(-1, ways)
    if np.any(np.diff(address[order], axis=1) != unit_bytes):
        return None
    return order
