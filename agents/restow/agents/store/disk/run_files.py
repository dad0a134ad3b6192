"""One file a run: pages one after the other, written and read directly, many in a system call.

Of pages that lie scattered in memory and side by side in the file one ``pwritev`` or ``preadv``
takes up to a thousand. So they go as fast as the disk does, as with NIXL's POSIX plug-in on
io_uring (docs/store.md has both), and nothing but the system is needed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from restow.agents.store.disk.errors import RunLostError

MAX_PIECES = 1024
"""Of one call (IOV_MAX)."""
MAX_CALL_BYTES = 1 << 30
"""Of one call: the system takes less than 2 GiB."""


def write_run(path: Path, pages: Sequence[memoryview]) -> None:
    """Write a file that does not exist, for good. Raises `OSError`; then there is none."""
    fd = _open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        _move(pages, lambda some, offset: os.pwritev(fd, some, offset), 0)
        os.fdatasync(fd)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def read_run(path: Path, offset_bytes: int, pages: Sequence[memoryview]) -> None:
    """Read pages that lie side by side from there on. Raises `OSError` and `RunLostError`."""
    fd = _open(path, os.O_RDONLY)
    try:
        _move(pages, lambda some, offset: os.preadv(fd, some, offset), offset_bytes)
    finally:
        os.close(fd)


def _open(path: Path, flags: int) -> int:
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that reads nothing directly
            raise
        return os.open(path, flags & ~os.O_EXCL, 0o600)


def _move(
    pages: Sequence[memoryview], call: Callable[[list[memoryview], int], int], offset_bytes: int
) -> None:
    left = list(reversed(pages))
    while left:
        some: list[memoryview] = []
        size = 0
        while left and len(some) < MAX_PIECES and size + len(left[-1]) <= MAX_CALL_BYTES:
            some.append(left.pop())
            size += len(some[-1])
        if not some:  # one page that is longer than a call
            some, size = [left[-1][:MAX_CALL_BYTES]], MAX_CALL_BYTES
            left[-1] = left[-1][MAX_CALL_BYTES:]
        moved = call(some, offset_bytes)
        if not moved:
            raise RunLostError("a run ends before its last page")
        offset_bytes += moved
        for page in reversed(some):  # what was not moved is the next call's
            size -= len(page)
            if moved <= size:
                left.append(page)
            elif moved < size + len(page):
                left.append(page[moved - size :])
