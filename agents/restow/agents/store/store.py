"""A `Store` takes states as D does and gives them back as P does. It never computes."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Self

from restow.agents.agent import Agent
from restow.agents.store.disk.errors import RunLostError
from restow.agents.store.disk.shelf import Page, Shelf
from restow.agents.store.errors import NotHeldError, NotKeptError, StoreFullError
from restow.agents.store.kept import Kept, Pinned
from restow.agents.store.memory import StoreMemory
from restow.agents.store.options import StoreFigures, StoreOptions
from restow.agents.store.prefix import Prefix
from restow.agents.store.room import Room
from restow.agents.store.shape import Shape, in_room
from restow.agents.store.worth import recomputing_cost
from restow.broker.client import BlockingDelivery, BlockingSession, Credentials, HandoffEnded
from restow.broker.errors import RestowError
from restow.broker.layout import Layout
from restow.broker.logs import get_logger
from restow.broker.stored import store_layout


class Store:
    """One store of one model. Any thread may call it."""

    def __init__(
        self,
        layout: Layout,
        options: StoreOptions,
        credentials: Credentials | None = None,
        on_lost: Callable[[RestowError], None] = lambda _: None,
    ) -> None:
        """Prepare for the model of ``layout``, any engine's of it; ``with`` starts.

        ``on_lost`` hears, on some thread, why the store is an engine no more.
        Raises `RoomTooSmallError`, `LayoutFormError`, `DiskInUseError`, `DiskOtherError` and
        `DiskUnusableError`.
        """
        self.layout = in_room(store_layout(layout, options.block_tokens))
        """Its own."""
        shape = Shape.of(self.layout)
        room = Room(shape.page_bytes, options.memory_bytes)
        self._kept = Kept(shape, room, recomputing_cost, options.recomputing)
        self._room = room
        self._options, self._credentials, self._on_lost = options, credentials, on_lost
        self._lock = threading.Lock()
        self._unwritten_bytes = 0
        """Of states that wait for the disk."""
        self._shelf: Shelf | None = None
        if options.disk is not None:
            self._shelf = Shelf(options.disk, self.layout, room.strides, options.disk_bytes)
        self._incarnation = uuid.uuid4().hex
        self._stack = ExitStack()
        self._log = get_logger("restow.store").bind(engine=options.engine_id)

    def __enter__(self) -> Self:
        """Register with the broker, and start the agent. Raises what these do."""
        with ExitStack() as stack:
            options = self._options
            if self._shelf is not None:
                stack.callback(self._shelf.close)
            self._memory = StoreMemory(self._room)
            stack.callback(self._memory.close)
            self._disk = ThreadPoolExecutor(1, thread_name_prefix="restow-disk")
            stack.callback(self._disk.shutdown)
            names = [region.name for region in self.layout.ranks[0].regions]
            given = (options.engine_id, self._incarnation)
            self._session = BlockingSession(
                *(*given, self.layout, options.broker, self._credentials, self._on_lost),
                block_counts=self._room.page_counts,
                publishes=True,
                asks=True,
            )
            stack.enter_context(self._session)
            self._agent = Agent(
                *(options.broker, *given, 0, self._memory.regions(names)),
                credentials=self._credentials,
                on_lost=self._on_lost,
            )
            stack.enter_context(self._agent)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop: what is not on the disk is gone."""
        self._stack.close()

    @property
    def block_tokens(self) -> int:
        """How many tokens its blocks have, and those of prefixes that it is asked for."""
        return self._kept.shape.block_tokens

    @property
    def figures(self) -> StoreFigures:
        """What it has at the moment."""
        with self._lock:
            memory = self._room.usable_bytes, self._kept.evictions
            used, states = memory[0] - self._room.free_bytes, len(self._kept)
        shelf = self._shelf
        disk = (len(shelf), shelf.used_bytes, shelf.lost) if shelf is not None else ()
        return StoreFigures(states, used, *memory, *disk)

    def holds(self, prefix: Prefix) -> bool:
        """Whether it has the state, in its memory or on its disk."""
        with self._lock:
            return self._kept.holds(prefix) or self._on_disk(prefix)

    def keep(self, handoff_id: str, prefix: Prefix, timeout_ms: int = 30_000) -> Future[None]:
        """Ask for the state of ``handoff_id``, which is that of ``prefix``, and keep it.

        The future is done when it is kept. A state that is here already is not moved again: its
        handoff is declined. The future raises `NotKeptError` with the reason if the handoff ends
        otherwise, `StoreFullError` if there is no room (P learns that the handoff is declined),
        and the broker's refusal.
        """
        done: Future[None] = Future()
        with self._lock:
            held = self._kept.holds(prefix)
            reserved = None if held else self._kept.reserve(prefix, _now_s())
            if reserved is not None:
                self._memory.move(reserved.moves)
        if reserved is None:
            why = "the store has it" if held else "the store has no room for it"
            self._session.decline(handoff_id, why)
            if held:
                done.set_result(None)
            else:
                done.set_exception(StoreFullError(f"handoff {handoff_id}: {why}"))
            return done
        pinned = reserved.pinned
        try:
            delivery = self._session.request(
                handoff_id,
                pinned.blocks,
                held_tokens=pinned.held_tokens,
                position_tokens=prefix.position_tokens,
                timeout_ms=timeout_ms,
                content=prefix.content,
            )
        except RestowError:
            self._give_up(pinned)
            raise
        _then(delivery, lambda _: self._arrived(delivery, pinned, done))
        return done

    def publish(self, handoff_id: str, prefix: Prefix, hold_ms: int = 60_000) -> Future[None]:
        """Publish the state of ``prefix`` under ``handoff_id``, for a D to take.

        The future is done when D has it: then the state may be evicted. It raises `NotHeldError` if
        the store has no such state, or can't read it from its disk; `StoreFullError` if there is no
        room to read it to; `NotKeptError` if the handoff ends other than DONE.
        """
        done: Future[None] = Future()
        with self._lock:
            pinned = self._kept.pin(prefix, _now_s())
            load = pinned is None and self._on_disk(prefix)
        if pinned is not None:
            self._lend(handoff_id, pinned, hold_ms, done)
        elif load and self._shelf is not None:
            given = self._shelf, handoff_id, prefix, hold_ms, done
            self._disk.submit(_told, done, lambda: self._load(*given))
        else:
            done.set_exception(NotHeldError(f"handoff {handoff_id}: the store has no such state"))
        return done

    # -- inside -----------------------------------------------------------------------------------

    def _arrived(self, delivery: BlockingDelivery, pinned: Pinned, done: Future[None]) -> None:
        error = _unless_done(delivery)
        if error is not None:
            _then(delivery.pages_free, lambda free: self._give_up_if(free, pinned))
            done.set_exception(error)
            return
        with self._lock:
            self._kept.commit(pinned, _now_s())
            written = self._to_write(pinned.prefix) if self._shelf is not None else None
        if self._shelf is not None and written is not None:
            self._disk.submit(self._spill, self._shelf, written)
        done.set_result(None)

    def _lend(self, handoff_id: str, pinned: Pinned, hold_ms: int, done: Future[None]) -> None:
        prefix = pinned.prefix
        try:
            self._agent.fence(handoff_id)
            end = self._session.publish(
                handoff_id,
                pinned.blocks,
                prefix.position_tokens,
                hold_ms=hold_ms,
                content=prefix.content,
            )
        except RestowError:
            self._give_up(pinned)
            raise

        def ended(_: object) -> None:
            self._give_up(pinned)
            error = _unless_done(end)
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        _then(end, ended)

    def _load(
        self, shelf: Shelf, handoff_id: str, prefix: Prefix, hold_ms: int, done: Future[None]
    ) -> None:
        """Read a state from the disk, keep it, and publish it."""
        with self._lock:
            reserved = self._kept.reserve(prefix, _now_s())
            if reserved is not None:
                self._memory.move(reserved.moves)
        if reserved is None:
            raise StoreFullError(f"handoff {handoff_id}: no room to read the state into")
        pinned = reserved.pinned
        try:
            shelf.read(self._pages(pinned.new))
        except RunLostError as error:
            self._give_up(pinned)
            raise NotHeldError(f"handoff {handoff_id}: {error.message}") from None
        with self._lock:
            self._kept.commit(pinned, _now_s())
            lent = self._kept.pin(prefix, _now_s())
        if lent is None:
            raise NotHeldError(f"handoff {handoff_id}: the state was evicted at once")
        self._lend(handoff_id, lent, hold_ms, done)

    def _to_write(self, prefix: Prefix) -> Pinned | None:
        """Have a state stay until it is on the disk, unless half of the memory waits for that."""
        pinned = self._kept.pin_quietly(prefix)
        if pinned is None:
            return None
        size = self._size_bytes(pinned)
        if self._unwritten_bytes + size > self._room.usable_bytes // 2:
            self._kept.give_up(pinned)
            self._log.warning("a state is in memory alone", detail="the disk is too slow")
            return None
        self._unwritten_bytes += size
        return pinned

    def _spill(self, shelf: Shelf, pinned: Pinned) -> None:
        """Write a state to the disk."""
        try:
            shelf.write(self._pages(dict(pinned.pages())))
        except RunLostError as error:
            self._log.warning("a state is in memory alone", detail=error.message)
        finally:
            with self._lock:
                self._unwritten_bytes -= self._size_bytes(pinned)
                self._kept.give_up(pinned)

    def _size_bytes(self, pinned: Pinned) -> int:
        return sum(self._room.strides[group] for group, _ in pinned.held)

    def _pages(self, pages: dict[tuple[str, bytes], int]) -> list[Page]:
        return [(key, self._memory.page(key[0], page)) for key, page in pages.items()]

    def _on_disk(self, prefix: Prefix) -> bool:
        return self._shelf is not None and self._shelf.has(self._kept.missing(prefix))

    def _give_up_if(self, free: Future[None], pinned: Pinned) -> None:
        """Have the pages back, unless nobody can say whether they are still written to."""
        if free.exception() is None:
            self._give_up(pinned)

    def _give_up(self, pinned: Pinned) -> None:
        with self._lock:
            self._kept.give_up(pinned)


def _now_s() -> float:
    return time.monotonic()


def _then(future: Future[Any], call: Callable[[Any], None]) -> None:
    future.add_done_callback(call)


def _told(done: Future[None], work: Callable[[], None]) -> None:
    try:
        work()
    except RestowError as error:
        done.set_exception(error)


def _unless_done(end: Future[HandoffEnded]) -> RestowError | None:
    """Why a handoff did not end as it should."""
    error = end.exception()
    if error is not None:
        return error if isinstance(error, RestowError) else NotKeptError(str(error))
    ended = end.result()
    if ended.done:
        return None
    return NotKeptError(
        f"handoff {ended.handoff_id} {ended.state}: {ended.reason}: {ended.detail}",
        handoff=ended.handoff_id,
        handoff_reason=ended.reason,
    )
