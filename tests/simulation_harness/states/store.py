"""A simulated store: the parts of the real store, on one loop in place of its threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentSettings
from restow.agents.store.commands import StateCommands
from restow.agents.store.giving import Giving
from restow.agents.store.holdings import StoredStates, StoreMemory
from restow.agents.store.requests import StateRequests
from restow.agents.store.room import PieceKey, Room, Shape, in_room
from restow.broker.client import EngineSession, HashForm, Offer, Prefix
from restow.broker.client.engine.chains import Holders, PrefixChain
from restow.broker.client.engine.commands import StateOrder
from restow.broker.errors import RestowError
from restow.broker.layout import Layout
from restow.broker.layout.store_layout import store_layout
from restow.broker.state_commands import Answer
from simulation_harness.states.promises import Promises
from simulation_harness.virtual_loop import Process, VirtualLoop
from stamped.kept_states import FORM

STAGING_BYTES = 32 << 10
DRAIN_S = 20.0


class Ground:
    """The layout and the memory of a store, which all of its lives share."""

    def __init__(self, name: str, layout: Layout, pages: int) -> None:
        """Lay out room for ``pages`` pages of the largest group."""
        self.name = name
        self.layout = in_room(store_layout(layout))
        self.shape = Shape.of(self.layout)
        largest_bytes = max(Room(self.shape.page_bytes, 1 << 20).strides.values())
        self.size_bytes = (pages + 1) * largest_bytes
        self.memory = StoreMemory(self.room())

    def room(self) -> Room:
        """Return the memory's pages, all of them free."""
        return Room(self.shape.page_bytes, self.size_bytes)


class Store:
    """One life of a store."""

    def __init__(
        self,
        loop: VirtualLoop,
        ground: Ground,
        life: str,
        brokers: str,
        promises: Promises,
        broke: Callable[[BaseException], None],
        replaced: Callable[[Store], None],
    ) -> None:
        """Begin a life, without states."""
        self.ground, self.life, self.name = ground, life, ground.name
        self.process = Process(loop, ground.name, ground.name.lower())
        self._brokers, self._broke, self._replaced = brokers, broke, replaced
        self.promises = promises
        self.room = ground.room()
        self.held: set[PieceKey] = set()
        """The pieces that it has told of."""
        self.session: EngineSession | None = None
        self.agent: AsyncAgent | None = None
        self.process.spawn(self._guard(self._live()))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Have the store's process do something."""
        self.process.spawn(self._guard(work))

    def pieces(self, prefix: Prefix) -> list[PieceKey]:
        """Return the pieces of a state."""
        listed = self.ground.shape.pieces(self._named(prefix)).values()
        return [key for keys in listed for key in keys if key is not None]

    def has_told(self, prefix: Prefix) -> bool:
        """Return whether the store has told that it holds a state."""
        return self.held.issuperset(self.pieces(prefix))

    def is_listed(self, prefix: Prefix) -> bool:
        """Return whether the store keeps a state, and not only for those who read it."""
        return any(
            state.position_tokens == prefix.position_tokens and state.pieces == self.pieces(prefix)
            for state in self.holdings._kept._states.by_key.values()
        )

    def unfinished(self) -> str:
        """Return what the store has not given back; a state that needs all room finds it last."""
        if self.agent is None:
            return f"{self.name} has no session"
        executor = self.agent._executor
        if any(pool.used_bytes for pool in executor.staging):
            return f"{self.name} has not all of its staging back"
        if kept := executor.gathering._held:
            return f"{self.name} keeps what it staged or hashed for {sorted(kept)}"
        if self.requests._open or self.holdings._kept._writing:
            return f"{self.name} waits for states"
        reserved = self.holdings.reserve(self._named(self._largest()))
        if reserved is None:
            return f"{self.name} has no room, {self.commands.pins} pins and {len(self.held)} pieces"
        self.holdings.give_up(reserved)
        return f"{self.name} has pages of nobody" if self.holdings.used_bytes else ""

    def _largest(self) -> Prefix:
        """Return a state that needs all pages, one of them for its snapshot."""
        blocks = self.room.usable_bytes // self.room.slab_bytes - 1
        tokens = blocks * self.ground.shape.block_tokens
        quanta = range(tokens // FORM.quantum_tokens)
        return Prefix(FORM, tokens, tuple(one.to_bytes(FORM.hash_bytes) for one in quanta))

    def drain(self) -> Coroutine[Any, Any, None]:
        """Take nothing new, and wait for what is open."""
        return self._drain()

    # -- inside -----------------------------------------------------------------------------------

    async def _drain(self) -> None:
        if self.session is not None:
            await self.session.drain(DRAIN_S)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - the history ends with it
            if self.process.alive:
                self._broke(error)

    async def _live(self) -> None:
        shape, memory = self.ground.shape, self.ground.memory
        counts = self.room.page_counts
        regions = memory.regions([region.name for region in self.ground.layout.ranks[0].regions])
        settings = AgentSettings(
            STAGING_BYTES, read_threads=1, try_metadata=False, host_reads=False
        )
        while self.session is None:
            session = EngineSession(
                *(self.name, self.life, self.ground.layout, self._brokers),
                on_lost=self._lost,
                block_counts=counts,
                publishes=True,
                asks=True,
                on_offer=self._offered,
                on_keep=lambda prefix: self.requests.hear(self._named(prefix)),
                on_forget=self._forget,
                on_command=lambda order: self.commands.hear(order),
            )
            agent = AsyncAgent(self._brokers, self.name, self.life, 0, regions, settings)
            said = BesideThreads(self, session)
            work = self.process.soon
            self.holdings = StoredStates(shape, self.room, memory, None, said)
            self.requests = StateRequests(said, self.holdings, work, lambda prefix: None)  # type: ignore[arg-type]
            self.giving = Giving(said, agent, self.holdings, None, work)  # type: ignore[arg-type]
            pin_bytes = self.room.usable_bytes // 2
            given = said, self.holdings, self.requests, None, pin_bytes, work
            self.commands = Commands(self, *given)
            try:
                await session.start(5.0)
            except RestowError:
                await asyncio.sleep(0.2)
                continue
            agent.begin()
            self.session, self.agent = session, agent

    def _lost(self, error: RestowError) -> None:
        if error.reason == "ENGINE_REPLACED":
            self._replaced(self)

    def _offered(self, offer: Offer) -> None:
        self.giving.hear(replace(offer, prefix=self._named(offer.prefix)))

    def _forget(self, revision: str) -> None:
        self.promises.forgets(self)
        self.holdings.forget_revision(revision)

    def _named(self, prefix: Prefix) -> Prefix:
        return replace(prefix, revision=prefix.revision or self.ground.layout.model.revision)


class Commands(StateCommands):
    """The store's commands; each one, and each answer, is looked at."""

    def __init__(self, store: Store, *given: Any) -> None:
        super().__init__(*given)
        self._store = store

    def _carry_out(self, order: StateOrder) -> None:
        self._store.promises.ordered(self._store, order)
        super()._carry_out(order)

    def _say(self, order: StateOrder, answer: Answer) -> None:
        self._store.promises.answered(self._store, order, answer)
        super()._say(order, answer)


class BesideThreads:
    """A store's session as its parts use it: what it does is looked at."""

    def __init__(self, store: Store, session: EngineSession) -> None:
        self._store, self._session = store, session
        self.request, self.publish = session.request, session.publish
        self.decline_offer, self.answer_command = session.decline_offer, session.answer_command

    def find(self, chains: Sequence[PrefixChain], limit: int) -> Future[Holders]:
        """Ask who holds prefixes."""
        found: Future[Holders] = Future()

        async def ask() -> None:
            try:
                found.set_result(await self._session.find(chains, limit=limit))
            except RestowError as error:
                found.set_exception(error)

        self._store.spawn(ask())
        return found

    def hold(
        self, form: HashForm, group: str, hashes: Iterable[bytes], *, salt: str, revision: str
    ) -> None:
        """Tell of what is held."""
        listed = list(hashes)
        self._store.held.update(PieceKey(group, salt, one, revision) for one in listed)
        self._session.hold(form, group, listed, salt=salt, revision=revision)

    def evict(
        self, form: HashForm, group: str, hashes: Iterable[bytes], *, salt: str, revision: str
    ) -> None:
        """Tell of what is held no more."""
        listed = list(hashes)
        gone = {PieceKey(group, salt, one, revision) for one in listed}
        self._store.held -= gone
        self._store.promises.gone(self._store, gone)
        self._session.evict(form, group, listed, salt=salt, revision=revision)
