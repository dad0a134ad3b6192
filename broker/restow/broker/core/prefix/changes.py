"""Changes of what engines hold, for watchers: a bounded log, and followers that read it.

A follower is told a snapshot first, and then the changes since the snapshot began. The snapshot is
taken in pieces while changes go on, so a change may be told that a piece contains already. All
changes since the beginning are told after it, in order, so the last word on each hash is right.

A follower that is slower than the log is long begins again with another snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from restow.broker.core.prefix.prefixes import Announcements

MAX_CHANGES = 16_384
MAX_LOG_BYTES = 16 << 20
"""Limits of a tenant's log."""
PART_BYTES = 512 << 10
CHANGE_BYTES = 400
"""Memory of a change beside its hashes."""


class Kind(StrEnum):
    """What a change says of an engine; with ``BEGAN`` and ``ENDED`` nothing known of it counts."""

    BEGAN = "began"
    HELD = "held"
    EVICTED = "evicted"
    ENDED = "ended"


class Change(NamedTuple):
    """A change of what an engine holds."""

    kind: Kind
    teller: Announcements
    """The engine, and how it reports."""
    group: str = ""
    revision: str = ""
    salt: str = ""
    hashes: bytes = b""
    """The hashes, concatenated; a hash may have been held, or not held, before."""

    @property
    def size_bytes(self) -> int:
        """Return about how much memory the change takes."""
        return CHANGE_BYTES + len(self.hashes)


class ChangeLog:
    """The last changes of a tenant's engines, numbered from 0."""

    def __init__(self) -> None:
        """Begin without changes."""
        self.first = 0
        """Number of the oldest change that is kept."""
        self.wakers: set[Callable[[], object]] = set()
        """Called after each change; they must only take a note."""
        self._changes: deque[Change] = deque()
        self._size_bytes = 0

    @property
    def end(self) -> int:
        """Return the number of the next change."""
        return self.first + len(self._changes)

    def add(self, change: Change) -> None:
        """Append a change; drop the oldest changes beyond the limits."""
        self._changes.append(change)
        self._size_bytes += change.size_bytes
        while len(self._changes) > MAX_CHANGES or self._size_bytes > MAX_LOG_BYTES:
            self._size_bytes -= self._changes.popleft().size_bytes
            self.first += 1
        for wake in self.wakers:
            wake()

    def since(self, number: int) -> Iterator[Change]:
        """Return the changes from ``number`` on."""
        return islice(self._changes, number - self.first, None)


class Part(NamedTuple):
    """What a follower is told at once."""

    begins: bool
    """Whether a snapshot begins: all that was told before must be forgotten."""
    changes: list[Change]
    current: bool
    """Whether the follower now knows all that the broker knows."""


class Follower:
    """Reads a log from a snapshot on. It has no queue of its own."""

    def __init__(self, log: ChangeLog, snapshot: Callable[[], Iterator[Change]]) -> None:
        """Follow ``log``, beginning with a ``snapshot``, which is read step by step."""
        self._log, self._take_snapshot = log, snapshot
        self.begin_again()

    def begin_again(self) -> None:
        """Begin with another snapshot."""
        # What changes while the snapshot is read is told after it: so note the place first.
        self._next = self._log.end
        self._snapshot: Iterator[Change] | None = self._take_snapshot()
        self._begins = True

    def take(self) -> Part | None:
        """Return what comes next; None if the follower knows everything."""
        if self._next < self._log.first:
            self.begin_again()
        begins, self._begins = self._begins, False
        if self._snapshot is not None:
            changes = _some(self._snapshot)
            if changes:
                return Part(begins, changes, False)
            self._snapshot = None
        elif self._next == self._log.end:
            return None
        changes = _some(self._log.since(self._next))
        self._next += len(changes)
        return Part(begins, changes, self._next == self._log.end)


def _some(changes: Iterable[Change]) -> list[Change]:
    taken: list[Change] = []
    size_bytes = 0
    for change in changes:
        taken.append(change)
        size_bytes += change.size_bytes
        if size_bytes >= PART_BYTES:
            break
    return taken
