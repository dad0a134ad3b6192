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


def read_pages(path: Path, pages: Sequence[tuple[int, memoryview]]) -> None:
    """Read pages, each from its offset: of those that lie side by side many at once.

    Raises `OSError` and `RunLostError`.
    """
    fd = _open(path, os.O_RDONLY)
    try:
        beside: list[memoryview] = []
        begin = end = 0
        for offset_bytes, view in sorted(pages, key=lambda one: one[0]):
            if offset_bytes != end:
                _read(fd, beside, begin)
                beside, begin = [], offset_bytes
            beside.append(view)
            end = offset_bytes + len(view)
        _read(fd, beside, begin)
    finally:
        os.close(fd)


def _read(fd: int, pages: Sequence[memoryview], offset_bytes: int) -> None:
    _move(pages, lambda some, offset: os.preadv(fd, some, offset), offset_bytes)


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
