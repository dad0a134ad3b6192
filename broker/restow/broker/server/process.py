"""Limits of the broker's process: open files and memory."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from typing import Final

KEPT_FILES: Final = 192
"""Files kept free for probes, logs and the broker itself."""
M_ARENA_MAX: Final = -8
ARENAS: Final = 2
M_MMAP_THRESHOLD: Final = -3
LARGE_BYTES: Final = 1 << 20


def set_up() -> None:
    """Raise the limit of open files, and make glibc return freed memory to the host.

    Otherwise each of gRPC's threads would keep an arena with memory that a flood of calls has
    freed, and large messages would leave their memory behind.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(AttributeError):  # another C library
        set_option = ctypes.CDLL(None).mallopt
        set_option(M_ARENA_MAX, ARENAS)
        set_option(M_MMAP_THRESHOLD, LARGE_BYTES)


def room_for(connections: int) -> int:
    """Return the number of connections, or fewer if open files leave no room for it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return connections
    return min(connections, max(soft // 2, soft - KEPT_FILES))
