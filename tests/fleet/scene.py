"""P and D that hand over one state after the other, whichever broker owns their pool."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator

from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION
from fleet_harness.brokers import BrokerProcess, Fleet
from fleet_harness.linked_agents import LinkedAgent, linked_engine
from restow.broker.client import EngineSession
from restow.broker.client.engine.handoff_futures import HandoffEnded


class Pair:
    """P and D."""

    def __init__(
        self,
        p: tuple[EngineSession, list[LinkedAgent]],
        d: tuple[EngineSession, list[LinkedAgent]],
    ) -> None:
        (self.p, self.p_agents), (self.d, self.d_agents) = p, d
        self._numbers = itertools.count()

    def begin(self) -> tuple[asyncio.Future[HandoffEnded], asyncio.Future[HandoffEnded]]:
        """Publish and ask, as P and D do, which do not know of each other's broker."""
        name = f"{self.p.ref.engine_id}-{next(self._numbers)}"
        released = self.p.publish(name, P_BLOCKS, POSITION)
        for agent in self.p_agents:
            agent.fence(name)
        return released, self.d.request(name, D_BLOCKS)

    async def hand_over(self) -> HandoffEnded:
        released, asked = self.begin()
        ended = await asked
        await released
        return ended

    def leader(self, fleet: Fleet) -> BrokerProcess:
        """Return the broker to which both engines are connected."""
        at = {one._stream.brokers.current for one in (self.p, self.d)}
        assert len(at) == 1, at
        return fleet.at(at.pop())


@contextlib.asynccontextmanager
async def pair(addresses: str, model: str = "m") -> AsyncIterator[Pair]:
    async with (
        linked_engine(addresses, f"p-{model}", 2, model) as p,
        linked_engine(addresses, f"d-{model}", 1, model) as d,
    ):
        yield Pair(p, d)


class Traffic:
    """Handoffs of a pair that begin at a steady pace, and what became of them."""

    def __init__(self, pair: Pair, every_s: float) -> None:
        self._pair, self._every_s = pair, every_s
        self.done_s: list[float] = []
        """When each that is DONE was begun and ended, by the clock."""
        self.failed: list[HandoffEnded] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def _one(self) -> None:
        ended = await self._pair.hand_over()
        if ended.done:
            self.done_s.append(time.monotonic())
        else:
            self.failed.append(ended)

    async def run(self) -> None:
        while True:
            self._tasks.add(task := asyncio.create_task(self._one()))
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(self._every_s)

    async def ended(self) -> None:
        await asyncio.gather(*self._tasks)

    def longest_pause_s(self) -> float:
        return max(b - a for a, b in itertools.pairwise(self.done_s))


@contextlib.asynccontextmanager
async def traffic(pair: Pair, every_s: float = 0.02) -> AsyncIterator[Traffic]:
    """Run traffic inside the ``async with``; at its end, wait until all handoffs have ended."""
    one = Traffic(pair, every_s)
    running = asyncio.create_task(one.run())
    try:
        yield one
    finally:
        running.cancel()
        await one.ended()
