"""Processes that are killed and stopped."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked.server import pipe, start
from forked.signals import send, stop

PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def warm_up() -> None:
    """Start the fork server, so that the first process takes no longer than later processes."""
    start(os.getpid).join()


class Member:
    """A process, by a name that people read."""

    def __init__(self, name: str, pid: int) -> None:
        self.name, self.pid = name, pid
        self.alive, self.stopped = True, False

    def kill(self) -> None:
        """Kill the process at once."""
        self.signal(signal.SIGKILL)
        self.alive = False

    def stop(self) -> None:
        """Stop the process with SIGSTOP: it stays alive and stands still."""
        self.stopped = True
        if self.alive:
            stop(self.pid)

    def go_on(self) -> None:
        """Continue the process after a stop."""
        self.stopped = False
        self.signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process is gone: another process may have its number by now."""
        if self.alive:
            send(self.pid, number)

    @property
    def resident_bytes(self) -> int:
        """Return the resident memory, own and shared, or 0 when the process is gone."""
        with contextlib.suppress(OSError, IndexError):
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * PAGE_BYTES
        return 0

    @property
    def open_files(self) -> int:
        """Return the number of open descriptors, or 0 when the process is gone."""
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{self.pid}/fd"))
        return 0


class Child(Member):
    """A member that runs a function of ours, and says something on a pipe."""

    def __init__(self, name: str, main: Callable[..., None], *args: object) -> None:
        """Start a process that runs ``main(pipe, *args)``."""
        self.pipe, theirs = pipe()
        self._process = start(main, theirs, *args)
        theirs.close()
        super().__init__(name, self._process.pid or 0)

    def tell(self, something: Any) -> None:
        """Send a message to the process; a process that is gone hears nothing."""
        with contextlib.suppress(OSError):
            self.pipe.send(something)

    def reap(self) -> None:
        """Wait for the end of a process that was killed."""
        self._process.join()
        self.pipe.close()
