"""What the broker's process may take of its host: files and memory."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from typing import Final

KEPT_FILES: Final = 192
"""What no connection of gRPC takes: files for probes, logs and the broker itself."""
M_ARENA_MAX: Final = -8
ARENAS: Final = 2
M_MMAP_THRESHOLD: Final = -3
LARGE_BYTES: Final = 1 << 20


def set_up() -> None:
    """Let this process open as many files as it may ask for, and give memory back.

    Each of gRPC's threads would have an arena of glibc's, and keep there what a flood has freed;
    what large messages took would be kept for the next ones.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(AttributeError):  # another C library
        set_option = ctypes.CDLL(None).mallopt
        set_option(M_ARENA_MAX, ARENAS)
        set_option(M_MMAP_THRESHOLD, LARGE_BYTES)


def room_for(connections: int) -> int:
    """So many connections, or as many as the process's files leave room for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return connections
    return min(connections, max(soft // 2, soft - KEPT_FILES))
