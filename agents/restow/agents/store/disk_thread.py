"""A `DiskThread` reads and writes a store's shelf: what somebody waits for first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from restow.agents.store.books.kept import Pinned
from restow.agents.store.disk.errors import RunLostError
from restow.agents.store.disk.shelf import Shelf
from restow.agents.store.holdings import Holdings
from restow.broker.client import Prefix
from restow.broker.logs import get_logger


class DiskThread:
    """One thread of its own. Any thread may give it work."""

    def __init__(self, shelf: Shelf, holdings: Holdings, memory_bytes: int) -> None:
        """Start. Half of the memory may wait to be written."""
        self._shelf, self._holdings = shelf, holdings
        self._most_unwritten_bytes = memory_bytes // 2
        self._unwritten_bytes = 0
        self._reads: deque[Callable[[], None]] = deque()
        self._writes: deque[Callable[[], None]] = deque()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="restow-disk")
        self._log = get_logger("restow.store").bind(folder=str(shelf.folder))

    def close(self) -> None:
        """Do what is left, and end."""
        self._executor.shutdown()

    def read(self, work: Callable[[], None]) -> None:
        """Have the thread do ``work``, which reads a state, before it writes any."""
        self._reads.append(work)
        run(self._executor, self._next)

    def load(self, pinned: Pinned) -> None:
        """Read the pages of a state that are to be written. Only on the thread.

        Raises `RunLostError`.
        """
        self._shelf.read(self._holdings.pages(pinned.new.items()))

    def write(self, prefix: Prefix) -> None:
        """Have a state written. It stays in memory until it is, unless too much waits for that."""
        pinned = self._holdings.pin_quietly(prefix)
        if pinned is None:
            return
        size_bytes = self._holdings.size_bytes(pinned)
        if self._unwritten_bytes + size_bytes > self._most_unwritten_bytes:
            self._holdings.give_up(pinned)
            self._log.warning("a state is in memory alone", detail="the disk is too slow")
            return
        self._unwritten_bytes += size_bytes
        self._writes.append(lambda: self._spill(pinned, size_bytes))
        run(self._executor, self._next)

    def forget_revision(self, revision: str) -> None:
        """Drop the states of a revision, those that wait to be written too."""
        self._writes.append(lambda: self._shelf.forget_revision(revision))
        run(self._executor, self._next)

    def _next(self) -> None:
        (self._reads or self._writes).popleft()()

    def _spill(self, pinned: Pinned, size_bytes: int) -> None:
        try:
            self._shelf.write(pinned.prefix.form, self._holdings.pages(pinned.pages()))
        except RunLostError as error:
            self._log.warning("a state is in memory alone", detail=error.message)
        finally:
            self._unwritten_bytes -= size_bytes
            self._holdings.give_up(pinned)


def run(executor: ThreadPoolExecutor, work: Callable[[], None]) -> None:
    """Have a thread do ``work``; a fault of it is logged, and ends nothing else."""
    executor.submit(work).add_done_callback(_tell_fault)


def _tell_fault(done: Future[None]) -> None:
    done.result()  # what a callback raises is logged, with its traceback
