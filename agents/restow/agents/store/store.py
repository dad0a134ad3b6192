"""The store, which receives states as D does and gives them back as P does, and never computes."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

from restow.agents.agent import Agent
from restow.agents.link.settings import AgentFigures
from restow.agents.store.commands import StateCommands
from restow.agents.store.giving import Giving
from restow.agents.store.holdings import DiskThread, StoredStates, StoreMemory, run
from restow.agents.store.requests import StateRequests
from restow.agents.store.room import Room, Shape, in_room
from restow.agents.store.shelf import Shelf
from restow.broker.client import BlockingSession, Credentials, Offer, Prefix
from restow.broker.errors import RestowError
from restow.broker.layout import Layout
from restow.broker.layout.store_layout import store_layout
from restow.broker.logs import get_logger


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The options of a store."""

    engine_id: str
    """The store's name as an engine."""
    broker: str | None
    """HOST:PORT of the broker; None means RESTOW_BROKER."""
    memory_bytes: int
    """Host memory for states."""
    block_tokens: int | None = None
    """Tokens of a block; None means the smallest block of the layout from which it is made."""
    disk: Path | None = None
    """A folder for evicted states; with None they are gone."""
    disk_bytes: int = 0
    """Limit of the states on disk."""
    pin_bytes: int | None = None
    """Limit of the pinned states; None means half of the memory."""


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """A store's present content, and counts since its start: `cli` describes each field."""

    states: int
    memory_used_bytes: int
    memory_bytes: int
    evictions: int
    disk_runs: int
    disk_used_bytes: int
    disk_lost: int
    waiting: int
    dropped: int
    asked: int
    kept: int
    offered: int
    given: int
    declined: int
    pinned: int
    pinned_bytes: int


class Store:
    """A store for one model: it requests states worth keeping, and answers offers.

    States of each revision of the model's weights are kept apart. A prefix without a revision
    belongs to the layout's revision.

    Use it as a context manager. Its methods may be called from any thread.
    """

    def __init__(
        self,
        layout: Layout,
        options: StoreOptions,
        credentials: Credentials | None = None,
        on_lost: Callable[[RestowError], None] = lambda _: None,
    ) -> None:
        """Prepare for the model of ``layout``, from any engine of the model; ``with`` starts it.

        ``options`` are the operator's; ``credentials`` None means those of the environment.
        ``on_lost`` is called, on any thread, with the reason why the store is no longer an engine.
        Raises `WeightsUnknownError`, `RoomTooSmallError`, `LayoutFormError`, `DiskInUseError`,
        `DiskOtherError` and `DiskUnusableError`.
        """
        layout.model.identity.check_weights()
        self.layout = in_room(store_layout(layout, options.block_tokens))
        """The store's own layout."""
        self._shape = Shape.of(self.layout)
        self._room = Room(self._shape.page_bytes, options.memory_bytes)
        self._options, self._credentials, self._on_lost = options, credentials, on_lost
        self._shelf: Shelf | None = None
        if options.disk is not None:
            self._shelf = Shelf(options.disk, self.layout, self._room.strides, options.disk_bytes)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Register with the broker, and start the agent. Raises what these raise."""
        with ExitStack() as stack:
            if self._shelf is not None:
                stack.callback(self._shelf.close)
            memory = StoreMemory(self._room)
            stack.callback(memory.close)
            session, agent = self._engine(memory)
            self._agent = agent
            self._holdings = StoredStates(self._shape, self._room, memory, self._shelf, session)
            worker = ThreadPoolExecutor(1, thread_name_prefix="restow-store")
            stack.callback(worker.shutdown)
            work = partial(run, worker)
            disk: DiskThread | None = None
            if self._shelf is not None:
                disk = DiskThread(self._shelf, self._holdings, self._room.usable_bytes)
                stack.callback(disk.close)
            # The disk and the worker give each other work, so first finish what the session left.
            stack.callback(lambda: worker.submit(int).result())
            written = disk.write if disk is not None else lambda _: None
            self._asking = StateRequests(session, self._holdings, work, written)
            self._giving = Giving(session, agent, self._holdings, disk, work)
            pin_bytes = self._options.pin_bytes
            if pin_bytes is None:
                pin_bytes = self._room.usable_bytes // 2
            self._commands = StateCommands(
                session, self._holdings, self._asking, disk, pin_bytes, work
            )
            self._disk = disk
            stack.enter_context(session)
            stack.enter_context(agent)
            self._holdings.tell_everything()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the store; states that are not on the disk are gone."""
        self._stack.close()

    @property
    def block_tokens(self) -> int:
        """Tokens of a block: a multiple of the distance between the hashes of prefixes."""
        return self._shape.block_tokens

    @property
    def figures(self) -> StoreFigures:
        """The store's present content, and counts of its work."""
        holdings, asking, giving, shelf = self._holdings, self._asking, self._giving, self._shelf
        return StoreFigures(
            states=holdings.states,
            memory_used_bytes=holdings.used_bytes,
            memory_bytes=self._room.usable_bytes,
            evictions=holdings.evictions,
            disk_runs=len(shelf) if shelf is not None else 0,
            disk_used_bytes=shelf.used_bytes if shelf is not None else 0,
            disk_lost=shelf.lost if shelf is not None else 0,
            waiting=len(asking.waiting),
            dropped=asking.waiting.dropped,
            asked=asking.asked,
            kept=asking.kept,
            offered=giving.offered,
            given=giving.given,
            declined=giving.declined,
            pinned=self._commands.pins,
            pinned_bytes=self._commands.pinned_bytes,
        )

    @property
    def agent_figures(self) -> AgentFigures:
        """Memory in use and reads so far, of the store's agent."""
        return self._agent.figures

    def holds(self, prefix: Prefix) -> bool:
        """Return whether the store has the state of ``prefix``, in memory or on disk.

        Raises `ChainFormError` and `ChainInvalidError` for a prefix that it can never have.
        """
        named = self._named(prefix)
        self._holdings.check(named)
        return self._holdings.holds(named)

    def keep(self, prefix: Prefix) -> None:
        """Request the state of ``prefix``, as if an engine had reported that it is worth keeping.

        A holder of the state gives it; if nobody holds it, nothing is kept.
        """
        self._asking.hear(self._named(prefix))

    def forget_revision(self, revision: str) -> None:
        """Drop the states that weights of ``revision`` computed, in memory and on disk.

        A state that is being read is dropped after its last reader.
        """
        self._holdings.forget_revision(revision)
        if self._disk is not None:
            self._disk.forget_revision(revision)
        get_logger("restow.store").info("states of a revision are dropped", revision=revision)

    # -- inside -----------------------------------------------------------------------------------

    def _engine(self, memory: StoreMemory) -> tuple[BlockingSession, Agent]:
        options = self._options
        given = options.engine_id, uuid.uuid4().hex
        session = BlockingSession(
            *(*given, self.layout, options.broker, self._credentials, self._on_lost),
            block_counts=self._room.page_counts,
            publishes=True,
            asks=True,
            on_offer=self._offered,
            on_keep=self.keep,
            on_forget=self.forget_revision,
            on_command=lambda order: self._commands.hear(order),
        )
        names = [region.name for region in self.layout.ranks[0].regions]
        agent = Agent(
            *(options.broker, *given, 0, memory.regions(names)),
            credentials=self._credentials,
            on_lost=self._on_lost,
        )
        return session, agent

    def _offered(self, offer: Offer) -> None:
        self._giving.hear(replace(offer, prefix=self._named(offer.prefix)))

    def _named(self, prefix: Prefix) -> Prefix:
        """Return the prefix with its revision, because a store has states of several revisions."""
        return replace(prefix, revision=prefix.revision or self.layout.model.revision)
