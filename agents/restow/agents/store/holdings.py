"""The states of a store: its memory, its disk, and the thread that reads and writes the disk."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Protocol

from restow.agents.memory.regions import RegionMemory, address_of
from restow.agents.store.kept import Kept, Pinned
from restow.agents.store.room import PageMove, PieceKey, Room, Shape
from restow.agents.store.run_files import RunLostError
from restow.agents.store.shelf import Page, Shelf
from restow.broker.client import HashForm, Prefix, SessionClosedError
from restow.broker.errors import ChainFormError
from restow.broker.logs import get_logger

MADV_POPULATE_WRITE = 23
"""Advice of Linux 5.14 and later, for which Python has no name."""


class StoreMemory:
    """Memory of one rank whose regions overlay each other."""

    def __init__(self, room: Room) -> None:
        """Allocate all bytes of ``room`` now, so that no handoff has to wait for them."""
        self._room = room
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._mapping = mmap.mmap(-1, room.size_bytes, flags=flags)
        for advice in (mmap.MADV_HUGEPAGE, MADV_POPULATE_WRITE):
            with suppress(OSError):  # the kernel may not know this advice
                self._mapping.madvise(advice)
        self.address = address_of(self._mapping)
        self._bytes = memoryview(self._mapping)

    def regions(self, names: Sequence[str]) -> list[RegionMemory]:
        """Return each group's region, which has the group's name."""
        counts, strides = self._room.page_counts, self._room.strides
        return [RegionMemory(name, self.address, counts[name], strides[name]) for name in names]

    def page(self, group: str, page: int) -> memoryview:
        """Return the bytes of one page, padding included."""
        stride = self._room.strides[group]
        return self._bytes[page * stride : (page + 1) * stride]

    def move(self, moves: Sequence[PageMove]) -> None:
        """Move pages, one after another."""
        for move in moves:
            stride = self._room.strides[move.group]
            target, source = (self.address + page * stride for page in (move.target, move.source))
            ctypes.memmove(target, source, stride)

    def close(self) -> None:
        """Release the memory once no page of it is in use."""
        self._bytes.release()
        try:
            self._mapping.close()
        except BufferError:
            return  # the disk thread still uses a page, and the mapping ends with it


class DiskThread:
    """Reads and writes the disk on a thread, reads first. Any thread may give it work."""

    def __init__(self, shelf: Shelf, holdings: StoredStates, memory_bytes: int) -> None:
        """Start the thread. Up to half of ``memory_bytes`` may wait to be written."""
        self._shelf, self._holdings = shelf, holdings
        self._most_unwritten_bytes = memory_bytes // 2
        self._unwritten_bytes = 0
        self._reads: deque[Callable[[], None]] = deque()
        self._writes: deque[Callable[[], None]] = deque()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="restow-disk")
        self._log = get_logger("restow.store").bind(folder=str(shelf.folder))

    def close(self) -> None:
        """Finish the remaining work, and stop."""
        self._executor.shutdown()

    def read(self, work: Callable[[], None]) -> None:
        """Run ``work``, which reads a state, before any writes."""
        self._reads.append(work)
        run(self._executor, self._next)

    def write(self, prefix: Prefix) -> None:
        """Write a state, which stays in memory until then, unless too much waits to be written."""
        pinned = self._holdings.pin_quietly(prefix)
        if pinned is None:
            return
        size_bytes = self._holdings.size_bytes(pinned)
        if self._unwritten_bytes + size_bytes > self._most_unwritten_bytes:
            self._holdings.give_up(pinned)
            self._log.warning("a state is kept only in memory", detail="the disk is too slow")
            return
        self._unwritten_bytes += size_bytes
        self._writes.append(lambda: self._spill(pinned, size_bytes))
        run(self._executor, self._next)

    def bring(self, prefix: Prefix) -> str:
        """Read a state into memory, and keep it; return why not. Must run on this thread."""
        pinned = self._holdings.reserve(prefix)
        if pinned is None:
            return "the memory has no room to read the state into"
        try:
            self._shelf.read(self._holdings.pages(pinned.new.items()))
            self._holdings.commit(pinned)
        except RunLostError as error:
            self._holdings.give_up(pinned)
            return error.message
        return ""

    def evict(self, prefix: Prefix) -> None:
        """Drop a state, after what waits to be written."""
        self._writes.append(lambda: self._shelf.forget_state(self._holdings.last_pieces(prefix)))
        run(self._executor, self._next)

    def forget_revision(self, revision: str) -> None:
        """Drop the states of a revision, including those that wait to be written."""
        self._writes.append(lambda: self._shelf.forget_revision(revision))
        run(self._executor, self._next)

    def _next(self) -> None:
        (self._reads or self._writes).popleft()()

    def _spill(self, pinned: Pinned, size_bytes: int) -> None:
        try:
            self._shelf.write(pinned.prefix.form, self._holdings.pages(pinned.pages()))
        except RunLostError as error:
            self._log.warning("a state is kept only in memory", detail=error.message)
        finally:
            self._unwritten_bytes -= size_bytes
            self._holdings.give_up(pinned)


def run(executor: ThreadPoolExecutor, work: Callable[[], None]) -> None:
    """Run ``work`` on a thread; log a failure of it, which ends nothing else."""
    executor.submit(work).add_done_callback(_log_failure)


def _log_failure(done: Future[None]) -> None:
    done.result()  # the executor logs what a callback raises, with its traceback


class Announcer(Protocol):
    """Tells the broker what is held, as a session does."""

    def hold(
        self, form: HashForm, group: str, hashes: Iterable[bytes], *, salt: str, revision: str
    ) -> None:
        """Report hashes that are held."""

    def evict(
        self, form: HashForm, group: str, hashes: Iterable[bytes], *, salt: str, revision: str
    ) -> None:
        """Report hashes that are no longer held."""


class StoredStates:
    """The states of one store. Thread-safe; only moving pages in memory takes time."""

    def __init__(
        self,
        shape: Shape,
        room: Room,
        memory: StoreMemory,
        shelf: Shelf | None,
        teller: Announcer,
    ) -> None:
        """Begin with the states on disk. Nothing is reported before `tell_everything`."""
        self.shape = shape
        self.form = shelf.hash_form if shelf is not None else None
        """The form of all hashes; None before the first state."""
        self._room, self._memory = room, memory
        self._kept = Kept(shape, room, self._note)
        self._shelf, self._teller = shelf, teller
        self._lock = threading.Lock()
        self._changed: list[tuple[PieceKey, bool]] = []
        self.before_reserve: Callable[[], object] = lambda: None
        """Called before room is looked for."""
        if shelf is not None:
            shelf.on_gone = self._gone_from_disk

    def tell_everything(self) -> None:
        """Report the states that an earlier process left on disk."""
        if self._shelf is not None:
            with self._lock:
                self._tell(self._shelf.pieces, held=True)

    def check(self, prefix: Prefix) -> None:
        """Raise `ChainFormError` or `ChainInvalidError` for a state that can't be kept here.

        All hashes have one form, that of the first state. Hashes of another form would not be known
        to name the same tokens.
        """
        self.shape.check(prefix)
        if self.form not in (None, prefix.form):
            raise ChainFormError(
                f"the store has states hashed by {self.form}, but this state is hashed by "
                f"{prefix.form}: have all engines hash alike, or start another store"
            )

    @property
    def states(self) -> int:
        """Number of states in memory."""
        return len(self._kept)

    @property
    def evictions(self) -> int:
        """Number of states evicted from memory."""
        return self._kept.evictions

    @property
    def used_bytes(self) -> int:
        """Bytes of memory in use."""
        with self._lock:
            return self._room.usable_bytes - self._room.free_bytes

    def holds(self, prefix: Prefix) -> bool:
        """Return whether the store has the state, in memory or on disk."""
        with self._lock:
            missing = self._kept.missing(prefix)
        return not missing or self._on_disk(missing)

    def keeps(self, prefix: Prefix) -> bool:
        """Return whether the state is in memory."""
        with self._lock:
            return self._kept.holds(prefix)

    def longest(self, prefix: Prefix) -> Prefix | None:
        """Return the longest state in memory whose tokens begin ``prefix``, or are all of it."""
        with self._lock:
            return self._kept.longest(prefix)

    def last_pieces(self, prefix: Prefix) -> list[PieceKey]:
        """Return the last piece of each group of a state: without these nobody has the state."""
        listed = self.shape.pieces(prefix).values()
        return [keys[-1] for keys in listed if keys and keys[-1] is not None]

    def evict(self, prefix: Prefix) -> bool:
        """Drop a state from memory; return False if no state ends after exactly its tokens."""
        with self._changing():
            return self._kept.evict(prefix)

    def use(self, prefix: Prefix) -> None:
        """Note that a state in memory was wanted, so that it is evicted later."""
        with self._changing():
            self._kept.use(prefix)

    def reserve(self, prefix: Prefix) -> Pinned | None:
        """Find pages for a state of which parts may be here; None if there is no room."""
        self.before_reserve()
        with self._changing():
            reserved = self._kept.reserve(prefix)
            if reserved is None:
                return None
            self._memory.move(reserved.moves)
            return reserved.pinned

    def commit(self, pinned: Pinned) -> None:
        """Keep a state whose pages are written. Raises as `check`, after giving the state up."""
        with self._changing():
            try:
                self.check(pinned.prefix)
            except ChainFormError:  # a state with another form arrived first
                self._kept.give_up(pinned)
                raise
            self.form = pinned.prefix.form
            self._kept.commit(pinned)

    def pin(self, prefix: Prefix) -> Pinned | None:
        """Pin a state that is wanted; None if it is not in memory."""
        with self._lock:
            return self._kept.pin(prefix)

    def pin_quietly(self, prefix: Prefix) -> Pinned | None:
        """Pin a state without counting it as wanted."""
        with self._lock:
            return self._kept.pin_quietly(prefix)

    def give_up(self, pinned: Pinned) -> None:
        """Unpin a state whose pages are no longer read or written."""
        with self._changing():
            self._kept.give_up(pinned)

    def forget_revision(self, revision: str) -> None:
        """Drop the states in memory that these weights computed."""
        with self._changing():
            self._kept.forget_revision(revision)

    def size_bytes(self, pinned: Pinned) -> int:
        """Return the size of its pages that are held already."""
        return sum(self._room.strides[key.group] for key in pinned.held)

    def pages(self, pages: Iterable[tuple[PieceKey, int]]) -> list[Page]:
        """Return the bytes of pinned pages."""
        return [(key, self._memory.page(key.group, page)) for key, page in pages]

    # -- inside -----------------------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Report what comes and goes in the body, in that order."""
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
                with suppress(
                    SessionClosedError
                ):  # the broker forgets what is held with the session
                    say(self.form, group, hashes, salt=salt, revision=revision)
