"""A `DiskThread` reads and writes a store's shelf: what somebody waits for first."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Protocol

from restow.agents.store.books.kept import Kept, Pinned, Recomputing, recomputing_cost
from restow.agents.store.books.room import PieceKey, Room, Shape
from restow.agents.store.disk.files import RunLostError
from restow.agents.store.disk.shelf import Page, Shelf
from restow.agents.store.options import StoreMemory
from restow.broker.client import HashForm, Prefix, SessionClosedError
from restow.broker.errors import ChainFormError
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


class Teller(Protocol):
    """What tells, as a session does."""

    def hold(
        self, form: HashForm, group: str, hashes: Iterable[bytes], *, salt: str, revision: str
    ) -> None:
        """Say that these are held."""

    def evict(
        self, form: HashForm, group: str, hashes: Iterable[bytes], *, salt: str, revision: str
    ) -> None:
        """Say that these are held no longer."""


class Holdings:
    """The states of one store. Any thread may call it; only what it moves in memory takes time."""

    def __init__(
        self,
        shape: Shape,
        room: Room,
        memory: StoreMemory,
        recomputing: Recomputing,
        shelf: Shelf | None,
        teller: Teller,
    ) -> None:
        """Have what is on the disk. Nothing is told before `tell_everything`."""
        self.shape = shape
        self.form = shelf.hash_form if shelf is not None else None
        """How the hashes of all that it has are made; None: it never had anything."""
        self._room, self._memory = room, memory
        self._kept = Kept(shape, room, recomputing_cost, recomputing, self._note)
        self._shelf, self._teller = shelf, teller
        self._lock = threading.Lock()
        self._changed: list[tuple[PieceKey, bool]] = []
        if shelf is not None:
            shelf.on_gone = self._gone_from_disk

    def tell_everything(self) -> None:
        """Tell what a life before this one left on the disk."""
        if self._shelf is not None:
            with self._lock:
                self._tell(self._shelf.pieces, held=True)

    def check(self, prefix: Prefix) -> None:
        """Raise `ChainFormError` or `ChainInvalidError` for what can't be kept here.

        All hashes have one form, that of the first state that came: others name no tokens that
        anybody knows to be the same.
        """
        self.shape.check(prefix)
        if self.form not in (None, prefix.form):
            raise ChainFormError(
                f"the store has states by {self.form}, and this one is by {prefix.form}: have all "
                f"engines hash alike, or start another store"
            )

    @property
    def states(self) -> int:
        """How many are in memory."""
        return len(self._kept)

    @property
    def evictions(self) -> int:
        """How many had to make room in memory."""
        return self._kept.evictions

    @property
    def used_bytes(self) -> int:
        """Of memory."""
        with self._lock:
            return self._room.usable_bytes - self._room.free_bytes

    def holds(self, prefix: Prefix) -> bool:
        """Whether it has the state, in its memory or on its disk."""
        with self._lock:
            missing = self._kept.missing(prefix)
        return not missing or self._on_disk(missing)

    def use(self, prefix: Prefix) -> None:
        """Somebody wanted a state: it is evicted later, if it is in memory."""
        pinned = self.pin(prefix)
        if pinned is not None:
            self.give_up(pinned)

    def reserve(self, prefix: Prefix) -> Pinned | None:
        """Find pages for a state of which some may be here; None: there is no room for it."""
        with self._changing():
            reserved = self._kept.reserve(prefix, time.monotonic())
            if reserved is None:
                return None
            self._memory.move(reserved.moves)
            return reserved.pinned

    def commit(self, pinned: Pinned) -> None:
        """The pages of a state are written: keep it. Raises as `check`, and has given it up."""
        with self._changing():
            try:
                self.check(pinned.prefix)
            except ChainFormError:  # another one came meanwhile, and first
                self._kept.give_up(pinned)
                raise
            self.form = pinned.prefix.form
            self._kept.commit(pinned, time.monotonic())

    def pin(self, prefix: Prefix) -> Pinned | None:
        """Have a state that is wanted stay where it is; None: it is not in memory."""
        with self._lock:
            return self._kept.pin(prefix, time.monotonic())

    def pin_quietly(self, prefix: Prefix) -> Pinned | None:
        """Have it stay though nobody wants it."""
        with self._lock:
            return self._kept.pin_quietly(prefix)

    def give_up(self, pinned: Pinned) -> None:
        """Nothing reads or writes the pages any more."""
        with self._changing():
            self._kept.give_up(pinned)

    def forget_revision(self, revision: str) -> None:
        """Drop the states in memory that some weights computed."""
        with self._changing():
            self._kept.forget_revision(revision)

    def size_bytes(self, pinned: Pinned) -> int:
        """Of its pages that are not to be written."""
        return sum(self._room.strides[key.group] for key in pinned.held)

    def pages(self, pages: Iterable[tuple[PieceKey, int]]) -> list[Page]:
        """The bytes of pinned pages."""
        return [(key, self._memory.page(key.group, page)) for key, page in pages]

    # -- inside -----------------------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Tell what comes and goes meanwhile, in the order in which it does."""
        with self._lock:
            try:
                yield
            finally:
                changed, self._changed = self._changed, []
                self._tell((key for key, there in changed if there), held=True)
                gone = (key for key, there in changed if not there)
                self._tell((key for key in gone if not self._on_disk([key])), held=False)

    def _note(self, key: PieceKey, there: bool) -> None:
        self._changed.append((key, there))

    def _gone_from_disk(self, keys: Sequence[PieceKey]) -> None:
        with self._lock:
            self._tell(self._kept.lacks(keys), held=False)

    def _on_disk(self, keys: Iterable[PieceKey]) -> bool:
        return self._shelf is not None and self._shelf.has(keys)

    def _tell(self, keys: Iterable[PieceKey], held: bool) -> None:
        by_group: dict[tuple[str, str, str], list[bytes]] = defaultdict(list)
        for key in keys:
            by_group[key.group, key.salt, key.revision].append(key.hash)
        say = self._teller.hold if held else self._teller.evict
        for (group, salt, revision), hashes in by_group.items():
            if self.form is not None:
                with suppress(SessionClosedError):  # what is held is forgotten with the session
                    say(self.form, group, hashes, salt=salt, revision=revision)
