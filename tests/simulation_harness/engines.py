"""Engines whose pages carry stamps: who wrote a page last is seen from its bytes.

Every word of P's pages of one handoff holds that handoff's stamp, so D's pages must too, whatever
the two layouts are. A page that is given back is stamped anew at once: what is read from it
afterwards, or written to it, is found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from restow.agents.async_agent import AgentSettings, AsyncAgent
from restow.agents.memory import RegionMemory
from restow.broker.client import EngineSession
from restow.broker.errors import RestowError
from restow.broker.layout import Layout
from simulation_harness.virtual_loop import Process, VirtualLoop

ADDRESS = "broker:1"
STAGING_BYTES = 32 << 10
GROUP_PAGES = {"attention": 8, "state": 4}
WORD_BYTES = 2

Ids = dict[str, list[int]]


class Violation(AssertionError):
    """A promise was broken."""


class Stamps:
    """Numbers that no two writers share."""

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        self.last += 1
        if self.last >= 1 << (8 * WORD_BYTES):
            raise RuntimeError("a history of too many stamps")
        return self.last


class HostMemory:
    """The memory of all ranks of an engine; its next life has the same addresses."""

    def __init__(self, layout: Layout, stamps: Stamps) -> None:
        self.layout, self._stamps = layout, stamps
        self.regions: dict[int, list[RegionMemory]] = {}
        self._words: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in GROUP_PAGES}
        self._buffers = []
        for rank in layout.ranks:
            self.regions[rank.rank] = []
            for region in rank.regions:
                pages, stride = GROUP_PAGES[region.group], region.page_stride_bytes
                words = np.zeros((pages, stride // WORD_BYTES), np.uint16)
                self._buffers.append(words)
                self._words[region.group].append(words)
                self.regions[rank.rank].append(
                    RegionMemory(region.name, words.ctypes.data, pages, stride)
                )

    def stamp(self, ids: Ids, stamp: int) -> None:
        """Write pages whole, on all ranks."""
        for group, pages in ids.items():
            for words in self._words[group]:
                words[pages] = stamp

    def found(self, ids: Ids) -> set[int]:
        """The stamps that pages hold."""
        return {
            int(value)
            for group, pages in ids.items()
            for words in self._words[group]
            for value in np.unique(words[pages])
        }

    def scramble(self) -> None:
        """What a new process finds."""
        for group in GROUP_PAGES:
            self.stamp({group: list(range(GROUP_PAGES[group]))}, self._stamps.next())


class Pages:
    """Which pages are free, and what those hold that nobody may be writing to."""

    def __init__(self, memory: HostMemory, stamps: Stamps, rng: Random) -> None:
        self.memory, self._stamps, self._rng = memory, stamps, rng
        self._free = {group: list(range(count)) for group, count in GROUP_PAGES.items()}
        self._expected: dict[tuple[str, int], int] = {}
        memory.scramble()
        for group, pages in self._free.items():
            for page in pages:
                self.settle({group: [page]})

    @property
    def all_free(self) -> bool:
        return all(len(self._free[group]) == count for group, count in GROUP_PAGES.items())

    def take(self, counts: dict[str, int]) -> Ids | None:
        """Pages for a prompt, if there are enough."""
        if any(len(self._free[group]) < count for group, count in counts.items()):
            return None
        ids: Ids = {}
        for group, count in counts.items():
            self._rng.shuffle(self._free[group])
            ids[group] = [self._free[group].pop() for _ in range(count)]
        return ids

    def lend(self, ids: Ids) -> None:
        """Others may write to these from now on."""
        self.check(ids)
        for group, pages in ids.items():
            for page in pages:
                del self._expected[group, page]

    def settle(self, ids: Ids, stamp: int | None = None) -> None:
        """Nobody else may write to these from now on; without a stamp they get a new one."""
        if stamp is None:
            stamp = self._stamps.next()
            self.memory.stamp(ids, stamp)
        for group, pages in ids.items():
            for page in pages:
                self._expected[group, page] = stamp

    def give(self, ids: Ids) -> None:
        """These are free, and used for something else at once."""
        self.check(ids)
        self.settle(ids)
        for group, pages in ids.items():
            self._free[group] += pages

    def check(self, ids: Ids | None = None) -> None:
        """Raise `Violation` if somebody wrote to a page that is not lent."""
        for (group, page), stamp in self._expected.items():
            if ids is None or page in ids.get(group, ()):
                found = self.memory.found({group: [page]})
                if found != {stamp}:
                    raise Violation(f"{group} page {page} holds {found} instead of {stamp}")


@dataclass(frozen=True)
class Prompt:
    """What is handed over, and how the two sides behave."""

    name: str
    src_counts: dict[str, int]
    dst_counts: dict[str, int]
    position_tokens: int
    compute_s: float
    lease_ms: int
    hold_ms: int
    timeout_ms: int
    p_cancels_s: float
    """After which P gives it up; 0: never."""
    d_cancels_s: float


class Engine:
    """One life of an engine: a scheduler with a session, and a worker for each rank."""

    def __init__(
        self,
        loop: VirtualLoop,
        side: str,
        life: int,
        memory: HostMemory,
        stamps: Stamps,
        rng: Random,
        broke: Callable[[BaseException], None],
    ) -> None:
        self.side, self.life = side, f"life{life}"
        self.pages = Pages(memory, stamps, rng)
        self.stamped: dict[str, int] = {}
        """P: the stamps of handoffs."""
        self.said: dict[str, tuple[str, str]] = {}
        """How handoffs ended here."""
        self.late_s: dict[str, float] = {}
        """D: how long after their timeouts handoffs ended."""
        self.pending: set[str] = set()
        self._memory, self._stamps, self._rng, self._broke = memory, stamps, rng, broke
        host = side.lower()
        self.scheduler = Process(loop, f"{side}.scheduler", host)
        self.workers = [Process(loop, f"{side}.{rank}", host) for rank in memory.regions]
        self.agents: list[AsyncAgent] = []
        self.session: EngineSession | None = None
        self._connected = asyncio.Event()
        for rank, worker in zip(memory.regions, self.workers, strict=True):
            worker.spawn(self._guard(self._work(rank)))
        self.scheduler.spawn(self._guard(self._connect()))

    @property
    def processes(self) -> Sequence[Process]:
        return (self.scheduler, *self.workers)

    async def _guard(self, work: Any) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - the history ends with it
            self._broke(error)

    async def _work(self, rank: int) -> None:
        agent = AsyncAgent(
            ADDRESS,
            self.side,
            self.life,
            rank,
            self._memory.regions[rank],
            AgentSettings(staging_bytes=STAGING_BYTES, read_threads=1),
        )
        agent.begin()
        self.agents.append(agent)

    async def _connect(self) -> None:
        while self.session is None:
            session = EngineSession(self.side, self.life, self._memory.layout, ADDRESS)
            try:
                await session.start(5.0)
            except RestowError:
                await asyncio.sleep(0.2)
                continue
            self.session = session
            self._connected.set()

    async def _ready(self) -> EngineSession:
        await self._connected.wait()
        if self.session is None:
            raise RuntimeError("connected without a session")
        return self.session

    # -- P ----------------------------------------------------------------------------------------

    def prefill(self, prompt: Prompt) -> None:
        """Begin with a prompt."""
        self.pending.add(prompt.name)
        self.scheduler.spawn(self._guard(self._prefill(prompt)))

    async def _prefill(self, prompt: Prompt) -> None:
        session = await self._ready()
        if (ids := await self._take(prompt.src_counts)) is None:
            return self._end(prompt, "", "NO_PAGES")
        early = self._rng.random() < 0.3

        def publish() -> asyncio.Future[Any]:
            return session.publish(
                prompt.name,
                ids,
                prompt.position_tokens,
                lease_ms=prompt.lease_ms,
                hold_ms=prompt.hold_ms,
            )

        ended = publish() if early else None
        await asyncio.sleep(prompt.compute_s)
        if ended is None or not ended.done():
            stamp = self._stamps.next()
            self._memory.stamp(ids, stamp)
            self.pages.settle(ids, stamp)
            self.stamped[prompt.name] = stamp
            ended = ended or publish()
            for worker, agent in zip(self.workers, self.agents, strict=False):
                worker.later(self._rng.uniform(0.0, 0.05), agent.fence, prompt.name)
        await self._await_end(prompt, session, ended, prompt.p_cancels_s)
        self.pages.give(ids)

    # -- D ----------------------------------------------------------------------------------------

    def decode(self, prompt: Prompt, stamp_of: Callable[[str], set[int]]) -> None:
        """Ask for a prompt's state; ``stamp_of`` tells which are right."""
        self.pending.add(prompt.name)
        self.scheduler.spawn(self._guard(self._decode(prompt, stamp_of)))

    async def _decode(self, prompt: Prompt, stamp_of: Callable[[str], set[int]]) -> None:
        session = await self._ready()
        if (ids := await self._take(prompt.dst_counts)) is None:
            return self._end(prompt, "", "NO_PAGES")
        self.pages.lend(ids)
        loop = asyncio.get_running_loop()
        due_s = loop.time() + prompt.timeout_ms / 1000
        ended = session.request(
            prompt.name, ids, position_tokens=prompt.position_tokens, timeout_ms=prompt.timeout_ms
        )
        done = await self._await_end(prompt, session, ended, prompt.d_cancels_s)
        self.late_s[prompt.name] = loop.time() - due_s
        if done:
            found, right = self._memory.found(ids), stamp_of(prompt.name)
            if len(found) != 1 or not found <= right:
                raise Violation(f"{prompt.name} is DONE with {found} instead of {right}")
            self.pages.settle(ids, found.pop())
            await asyncio.sleep(self._rng.uniform(0.0, 5.0))
        else:
            self.pages.settle(ids)
        self.pages.give(ids)

    # -- both -------------------------------------------------------------------------------------

    async def _take(self, counts: dict[str, int]) -> Ids | None:
        for _ in range(20):
            if (ids := self.pages.take(counts)) is not None:
                return ids
            await asyncio.sleep(0.5)
        return None

    async def _await_end(
        self,
        prompt: Prompt,
        session: EngineSession,
        ended: asyncio.Future[Any],
        cancels_s: float,
    ) -> bool:
        """Whether it ended well."""
        if cancels_s:
            loop = asyncio.get_running_loop()
            loop.call_later(cancels_s, session.cancel, prompt.name)
        try:
            told = await ended
        except RestowError as error:
            self._end(prompt, "REFUSED", error.reason)
            return False
        self._end(prompt, told.state, told.reason)
        return bool(told.done)

    def _end(self, prompt: Prompt, state: str, reason: str) -> None:
        self.said[prompt.name] = state, reason
        self.pending.discard(prompt.name)
