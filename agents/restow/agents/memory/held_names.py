"""Names of shared memory that somebody has mapped, or nobody any more: a lock tells.

Each process that maps an object whose name begins with `PREFIX` holds a shared lock on it (`flock`)
for as long as the mapping lives, however the process ends. A pid would not tell: engines and their
daemon may be in containers that count processes for themselves.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat

FOLDER = "/dev/shm"  # noqa: S108 - where POSIX shared memory lives on Linux
PREFIX = "restow-mem-"


def new_name() -> str:
    """A name that nobody has."""
    return f"{PREFIX}{secrets.token_hex(8)}"


def hold(fd: int, name: str) -> bool:
    """Take the lock of an object that is about to be mapped. False: it was removed as left.

    Names of other forms have no lock. It goes with the mapping, which has a copy of ``fd``.
    """
    if not name.startswith(PREFIX):
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # it is being removed: only where nobody holds it
        return False
    return os.fstat(fd).st_nlink > 0


def remove_left() -> list[str]:
    """Remove this user's objects that nobody has mapped; returns their names."""
    return [one for one in os.listdir(FOLDER) if one.startswith(PREFIX) and _is_removed(one)]


def _is_removed(name: str) -> bool:
    path = f"{FOLDER}/{name}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # somebody else's, no file, or removed meanwhile
        return False
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except OSError:  # somebody holds it, or removes it himself
        return False
    finally:
        os.close(fd)
    return True
