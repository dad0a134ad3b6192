"""`looks` lets a command look again and again, until Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import itertools
import select
import signal
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interruption() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets: a KeyboardInterrupt amid a call of gRPC can get lost."""
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def looks(every_s: float, count: int | None = None) -> Iterator[int]:
    """Yield the number of each look, from 0, at once and then regularly.

    Looks end at Ctrl-C, or when nobody reads stdout any more.
    """
    if count == 1:
        yield 0
        return
    with interruption() as interrupted:
        for number in itertools.count() if count is None else range(count):
            if number and (interrupted.wait(every_s) or _unread()):
                return
            yield number


def _unread() -> bool:
    """Return whether stdout is a closed pipe: a write would fail, but there may be no write."""
    with contextlib.suppress(io.UnsupportedOperation):
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(flags & select.POLLERR for _, flags in poll.poll(0))
    return False
