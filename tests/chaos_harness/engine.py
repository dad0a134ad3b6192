"""The processes of a real engine: a scheduler with a session, and a worker with an agent a rank.

All map the engine's memory. Workers hear from their scheduler what to fence; the scheduler hears
from the driver what to hand over, and tells it what came of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import numpy as np

from chaos_harness.hosts import enter
from restow.agents import Agent
from restow.agents.link.settings import AgentSettings
from restow.broker.client import EngineSession
from restow.broker.errors import RestowError
from restow.broker.layout import Layout
from stamped.kept_states import KeptStates
from stamped.keys import Words
from stamped.memory import HostMemory
from stamped.requests import Prompt, Requests
from stamped.stamps import Stamps, Violation

READY = ("ready",)
Said = tuple[Any, ...]
"""What a process tells the driver: a word, and what belongs to it."""


@dataclass(frozen=True)
class Life:
    """One life of an engine, as its processes must know it."""

    side: str
    name: str
    seed: int
    layout: Layout
    page_counts: Mapping[str, int]
    memory: str
    """A file as large as the memory of all ranks."""
    broker: str
    namespace: str
    environment: Mapping[str, str]
    staging_bytes: int
    quarantine_s: float
    log: str

    def mapped(self) -> HostMemory:
        """Return the engine's memory, mapped into this process."""
        with open(self.memory, "r+b") as file:
            words: Words = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint16)
        return HostMemory(self.layout, self.page_counts, words)

    def stamps(self) -> Stamps:
        """Return the stamps that this side writes. P and D never write the same stamp."""
        stamps = Stamps(1, 1 << 15) if self.side == "P" else Stamps(1 << 15, 1 << 16)
        stamps.start_at(self.seed)
        return stamps

    def begin(self) -> None:
        """Make this process part of the engine."""
        with open(self.log, "ab") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        os.environ.update(self.environment)
        enter(self.namespace)


def serve_rank(driver: Connection, fences: Connection, life: Life, rank: int) -> None:
    """Serve as the worker of a rank, until the scheduler is gone."""
    life.begin()
    memory = life.mapped()
    settings = AgentSettings(
        staging_bytes=life.staging_bytes, quarantine_s=life.quarantine_s, read_threads=1
    )
    given = (life.broker, life.side, life.name, rank, memory.regions[rank])
    agent = Agent(*given, settings=settings)
    agent.begin()
    driver.send(READY)
    with contextlib.suppress(EOFError):
        while True:
            fence = fences.recv()
            if fence is None:
                pools = agent.figures.gather, agent.figures.scatter
                free = tuple(pool.size_bytes - pool.used_bytes for pool in pools)
                driver.send(("staging", free))
            else:
                handoff_id, tokens = fence
                agent.fence(handoff_id, None, tokens)
    agent.close()


def serve_scheduler(driver: Connection, workers: list[Connection], life: Life) -> None:
    """Serve as the scheduler, until the driver is gone."""
    life.begin()
    asyncio.run(_Scheduler(driver, workers, life).serve())


class _Scheduler:
    def __init__(self, driver: Connection, workers: list[Connection], life: Life) -> None:
        rng = Random(life.seed)  # noqa: S311 - reproducible, not secret
        self._driver, self._workers, self._life = driver, workers, life
        self._requests = Requests(self._ready, life.mapped(), life.stamps(), rng)
        self._kept = KeptStates(self._ready, self._requests, rng, self._fence, self._start)
        self._kept.for_stores = True
        self._session: EngineSession | None = None
        self._connected = asyncio.Event()
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        asyncio.get_running_loop().add_reader(self._driver.fileno(), self._hear)
        self._start(self._connect())
        self._driver.send(READY)
        await self._over.wait()
        if self._session is not None:
            await self._session.close()

    def _hear(self) -> None:
        try:
            word, what = self._driver.recv()
        except EOFError:
            self._over.set()
            return
        if word == "prompt":
            self._start(self._serve_prompt(what))
        elif word == "compute":
            self._start(self._kept.compute(what, self._computed))
        elif word == "ask":
            self._start(self._ask(*what))
        elif word == "evict":
            self._start(self._kept.evict_all() if what is None else self._kept.evict(what))
        elif word == "report":
            self._report()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Violation as violation:
            self._driver.send(("violation", f"{violation}"))
        except Exception as error:  # noqa: BLE001 - the driver's report ends with it
            self._driver.send(("violation", repr(error)))

    async def _connect(self) -> None:
        life = self._life
        while self._session is None:
            session = EngineSession(
                *(life.side, life.name, life.layout, life.broker), on_offer=self._kept.offered
            )
            try:
                await session.start(5.0)
            except RestowError:
                await asyncio.sleep(0.1)
                continue
            self._session = session
            self._connected.set()
        self._driver.send(("connected",))

    async def _ready(self) -> EngineSession:
        await self._connected.wait()
        if self._session is None:
            raise RuntimeError("connected without a session")
        return self._session

    async def _serve_prompt(self, prompt: Prompt) -> None:
        self._requests.pending.add(prompt.name)
        if self._life.side == "P":
            await self._requests.prefill(prompt, self._computed, self._fence)
        else:
            await self._requests.decode(prompt, self._received)
        self._say_over(prompt.name)

    async def _ask(self, prompt: Prompt, name: str, keeps: bool) -> None:
        self._requests.pending.add(name)
        await self._kept.ask(prompt, self._computed, self._received, name, keeps)
        self._say_over(name)

    def _say_over(self, name: str) -> None:
        state, reason = self._requests.said.pop(name)
        late_s = self._requests.late_s.pop(name, 0.0)
        self._driver.send(("over", name, state, reason, late_s))

    def _computed(self, name: str, stamp: int) -> None:
        self._driver.send(("computed", name, stamp))

    def _received(self, name: str, found: set[int]) -> None:
        self._driver.send(("received", name, found))

    def _fence(self, handoff_id: str, tokens: int = 0) -> None:
        self._tell_workers((handoff_id, tokens))

    def _tell_workers(self, fence: tuple[str, int] | None) -> None:
        """Send a fence to the workers; with None they report how much of their staging is free."""
        for worker in self._workers:
            with contextlib.suppress(OSError):  # one that was killed
                worker.send(fence)

    def _report(self) -> None:
        requests = self._requests
        self._tell_workers(None)
        if not requests.pending:
            self._start(self._check())
        pending = tuple(sorted(requests.pending))
        self._driver.send(("report", pending, requests.pages.all_free))

    async def _check(self) -> None:
        self._requests.pages.check()
