"""Simulated engines: a scheduler with a session, and a worker with an agent for each rank."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentSettings
from restow.broker.client import EngineSession
from restow.broker.errors import RestowError
from simulation_harness.virtual_loop import Process, VirtualLoop
from stamped.kept_states import KeptStates
from stamped.memory import HostMemory
from stamped.requests import Prompt, Requests
from stamped.stamps import Stamps, Violation

STAGING_BYTES = 32 << 10


class Engine:
    """One life of an engine."""

    def __init__(
        self,
        loop: VirtualLoop,
        side: str,
        life: str,
        memory: HostMemory,
        stamps: Stamps,
        rng: Random,
        broke: Callable[[BaseException], None],
        replaced: Callable[[Engine], None],
        brokers: str,
        lost_since: Callable[[str, str], bool],
        revision: str = "",
    ) -> None:
        """Begin a life; ``lost_since`` tells whether a rank was lost since a handoff ended."""
        self.side, self.life = side, life
        self.requests = Requests(self._ready, memory, stamps, rng)
        self.kept = KeptStates(self._ready, self.requests, rng, self._fence, self.spawn)
        self.requests.revision = revision
        self.stamped: dict[str, int] = {}
        """P: the stamps of handoffs."""
        self._memory, self._rng, self._broke = memory, rng, broke
        self._replaced, self._brokers, self._lost_since = replaced, brokers, lost_since
        host = side.lower()
        self._loop = loop
        self.lost_s = 0.0
        """When a rank's memory was lost last."""
        self.scheduler = Process(loop, f"{side}.scheduler", host)
        self.workers = [Process(loop, f"{side}.{rank}", host) for rank in memory.regions]
        self.agents: dict[int, AsyncAgent] = {}
        self.session: EngineSession | None = None
        self._connected = asyncio.Event()
        for rank, worker in zip(memory.regions, self.workers, strict=True):
            worker.spawn(self._guard(self._work(rank)))
        self.scheduler.spawn(self._guard(self._connect()))

    @property
    def processes(self) -> Sequence[Process]:
        return (self.scheduler, *self.workers)

    def prefill(self, prompt: Prompt) -> None:
        """Begin with a prompt as P."""
        self.requests.pending.add(prompt.name)
        work = self.requests.prefill(prompt, self.stamped.__setitem__, self._fence)
        self.scheduler.spawn(self._guard(work))

    def decode(self, prompt: Prompt, stamps_of: Callable[[str], set[int]]) -> None:
        """Ask for a prompt's state as D; ``stamps_of`` tells which stamps are right."""
        self.requests.pending.add(prompt.name)
        work = self.requests.decode(prompt, self._checked(stamps_of))
        self.scheduler.spawn(self._guard(work))

    def _checked(self, stamps_of: Callable[[str], set[int]]) -> Callable[[str, set[int]], None]:
        def received(name: str, found: set[int]) -> None:
            right = stamps_of(name)
            # Of what ended well before the loss the engine knows by itself that it is lost.
            if self.requests.pages.lost and self._lost_since(self.side, name):
                return
            if len(found) != 1 or not found <= right:
                raise Violation(f"{name} is DONE with {found} instead of {right}")
            revisions = self.requests.stamps.revisions
            if {revisions.get(one, "") for one in found} != {self.requests.revision}:
                raise Violation(f"{name} is DONE with a state of other weights")

        return received

    def ask(
        self,
        prompt: Prompt,
        name: str,
        computed: Callable[[str, int], None],
        stamps_of: Callable[[str], set[int]],
        keeps: bool,
    ) -> None:
        """Ask for a state by its content; ``stamps_of`` tells which stamps are right."""
        self.requests.pending.add(name)
        work = self.kept.ask(prompt, computed, self._checked(stamps_of), name, keeps)
        self.spawn(work)

    def revise(self, revision: str) -> None:
        """Replace the engine's weights."""
        if revision != self.requests.revision:
            self.requests.revision = revision
            self.kept.forget()
            if self.session is not None:
                self.session.set_revision(revision)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Have the scheduler do something beside its prompts."""
        self.scheduler.spawn(self._guard(work))

    def _fence(self, handoff_id: str, tokens: int = 0) -> None:
        for worker, agent in zip(self.workers, self.agents.values(), strict=False):
            worker.later(self._rng.uniform(0.0, 0.05), agent.fence, handoff_id, None, tokens)

    async def _guard(self, work: Any) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - the history ends with it
            if self.scheduler.alive:  # what is left of a killed one is swept up, and may complain
                self._broke(error)

    async def _work(self, rank: int) -> None:
        agent = AsyncAgent(
            self._brokers,
            self.side,
            self.life,
            rank,
            self._memory.regions[rank],
            AgentSettings(STAGING_BYTES, read_threads=1, try_metadata=False, host_reads=False),
        )
        agent.begin()
        self.agents[rank] = agent

    def replace_worker(self, number: int) -> None:
        """Start another process for a rank whose process is dead, with other memory."""
        if not self.scheduler.alive:
            return
        rank = list(self._memory.regions)[number]
        self.lost_s = self._loop.time()
        self.requests.pages.lose(rank)
        self.kept.lose()
        worker = Process(self._loop, f"{self.side}.{rank}", self.side.lower())
        self.workers[number] = worker
        worker.spawn(self._guard(self._work(rank)))

    async def _connect(self) -> None:
        while self.session is None:
            session = EngineSession(
                *(self.side, self.life, self._memory.layout, self._brokers),
                on_offer=self.kept.offered,
                on_lost=self._lost,
            )
            if said := self.requests.revision:
                session.set_revision(said)
            try:
                await session.start(5.0)
            except RestowError:
                await asyncio.sleep(0.2)
                continue
            if said != self.requests.revision:
                session.set_revision(self.requests.revision)
            self.session = session
            self._connected.set()

    def _lost(self, error: RestowError) -> None:
        if error.reason == "ENGINE_REPLACED":
            self._replaced(self)

    async def _ready(self) -> EngineSession:
        await self._connected.wait()
        if self.session is None:
            raise RuntimeError("connected without a session")
        return self.session
