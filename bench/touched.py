"""Memory as all processes of the data-plane benchmarks have it: pages of 4 KiB, each one touched.

Arrays of numpy may lie in huge pages, which are read faster.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt


def touched(size_bytes: int) -> npt.NDArray[np.uint8]:
    """A mapping of its own; it lives as long as the array."""
    view = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    view[:] = 7
    return view
