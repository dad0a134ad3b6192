"""Simulated engines and agents, which send the messages of real engines and move no bytes.

They do as little as they can, because they share the machine with the broker that is measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from uuid import uuid4

import grpc
import numpy as np

from bench.model_sizes import tiny_hybrid
from restow.broker.client.connection.channel import open_channel
from restow.broker.client.engine.session import MAX_BATCH
from restow.broker.rpc import wire, wire_program
from restow.v1 import agent_link_pb2, agent_link_pb2_grpc, broker_pb2, broker_pb2_grpc

PROMPT_TOKENS = 8192
BLOCK_TOKENS = 16
PAGES = 1 << 20
MAX_UNDER_WAY = 2048
"""Handoffs under way at once for which D has blocks."""


@dataclass
class Tally:
    """Counts of one run."""

    wanted: int
    started_s: dict[str, float] = field(default_factory=dict)
    latency_s: list[float] = field(default_factory=list)
    ends_heard: int = 0
    failures: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    room: asyncio.Event = field(default_factory=asyncio.Event)


class Stream:
    """A stream whose queued messages leave in batches, as those of the client do."""

    def __init__(self, call: grpc.aio.StreamStreamCall, make: type) -> None:  # type: ignore[type-arg]
        self._call = call
        self._make = make
        self._queue: list[object] = []
        self._wake = asyncio.Event()

    def put(self, message: object) -> None:
        """Queue a message."""
        self._queue.append(message)
        self._wake.set()

    async def write(self) -> None:
        """Write queued messages until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            queue, self._queue = self._queue, []
            for first in range(0, len(queue), MAX_BATCH):
                batch = queue[first : first + MAX_BATCH]
                await self._call.write(self._make(messages=batch))

    async def read(self) -> AsyncIterator[object]:
        """Yield what comes, until the stream ends."""
        while (response := await self._call.read()) is not grpc.aio.EOF:
            yield response


@dataclass
class Side:
    """An engine: its session, and its only agent."""

    ref: broker_pb2.EngineRef
    session: Stream
    agent: Stream


@asynccontextmanager
async def side(address: str, engine_id: str) -> AsyncIterator[Side]:
    """Register an engine of one rank, whose memory is never read."""
    layout = tiny_hybrid(1)
    async with open_channel(address) as channel:
        ref = broker_pb2.EngineRef(engine_id=engine_id, incarnation=str(time.time_ns()))
        broker = broker_pb2_grpc.BrokerStub(channel)
        await broker.RegisterEngine(
            broker_pb2.RegisterEngineRequest(engine=ref, layout=wire.layout_to_proto(layout))
        )
        link = agent_link_pb2_grpc.AgentLinkStub(channel).Connect()
        hello = agent_link_pb2.Hello(
            engine=ref,
            rank=0,
            agent_name=f"{engine_id}/0",
            program_form=wire_program.PROGRAM_FORM,
            regions=[
                agent_link_pb2.RegionMemory(
                    name=r.name,
                    base_address=(1 + at) << 40,
                    page_count=PAGES,
                    page_stride_bytes=r.page_stride_bytes,
                )
                for at, r in enumerate(layout.ranks[0].regions)
            ],
        )
        first = agent_link_pb2.AgentMessage(hello=hello)
        await link.write(agent_link_pb2.ConnectRequest(messages=[first]))
        await link.read()
        call = broker.Session()
        await call.write(broker_pb2.SessionRequest(engine=ref))
        await call.read()
        session = Stream(call, broker_pb2.SessionRequest)
        agent = Stream(link, agent_link_pb2.ConnectRequest)
        writers = [asyncio.create_task(session.write()), asyncio.create_task(agent.write())]
        try:
            yield Side(ref, session, agent)
        finally:
            for writer in writers:
                writer.cancel()


def block_lists(tokens: int) -> list[list[broker_pb2.BlockList]]:
    """Return shuffled blocks for many prompts, which have no block in common."""
    count = -(-tokens // BLOCK_TOKENS)
    prompts = min(MAX_UNDER_WAY, PAGES // count)
    ids = np.random.default_rng(0).permutation(prompts * count).reshape(prompts, count)
    return [wire.block_lists({"attention": own, "state": [at]}) for at, own in enumerate(ids)]


async def hear_ends(source: Side, destination: Side, tally: Tally, in_flight: int) -> None:
    """Count the handoffs whose end both engines were told.

    The latency of a handoff ends when D is told, which is before P on purpose.
    """
    live: dict[str, int] = {}

    async def hear(engine: Side) -> None:
        async for response in engine.session.read():
            now_s = time.perf_counter()
            for event in response.events:  # type: ignore[attr-defined]
                ended = event.ended
                name = ended.handoff_id
                if ended.state != broker_pb2.HANDOFF_STATE_DONE:
                    tally.failures += 1
                if engine is destination:
                    tally.latency_s.append(now_s - tally.started_s[name])
                heard = live.get(name, 0) + 1
                if heard < 2:
                    live[name] = heard
                    continue
                del live[name], tally.started_s[name]
                tally.ends_heard += 1
            if len(tally.started_s) < in_flight:
                tally.room.set()
            if tally.ends_heard + tally.failures >= tally.wanted:
                tally.done.set()

    await asyncio.gather(hear(source), hear(destination))


async def settle(destination: Side) -> None:
    """Answer every Execute order at once, as if the read took no time."""
    async for response in destination.agent.read():
        for order in response.orders:  # type: ignore[attr-defined]
            if order.WhichOneof("body") == "execute":
                settled = agent_link_pb2.Settled(handoff=order.execute.handoff, bytes=1)
                destination.agent.put(agent_link_pb2.AgentMessage(settled=settled))


async def run_handoffs(
    address: str, count: int, in_flight: int, tokens: int, rate: float | None = None
) -> tuple[float, list[float]]:
    """Run handoffs; return the seconds that all of them took, and the latency of each.

    ``rate`` handoffs begin each second; with None, ``in_flight`` handoffs are kept under way.
    """
    tally = Tally(count)
    stamp = uuid4().hex
    async with side(address, f"p{stamp}") as source, side(address, f"d{stamp}") as destination:
        blocks = block_lists(tokens)
        tasks = [
            asyncio.create_task(hear_ends(source, destination, tally, in_flight)),
            asyncio.create_task(settle(destination)),
        ]
        begun_s = time.perf_counter()
        for index in range(count):
            if rate is not None:
                wait_s = begun_s + index / rate - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
            else:
                while len(tally.started_s) >= in_flight:
                    tally.room.clear()
                    await tally.room.wait()
            name = f"{stamp}-{index}"
            tally.started_s[name] = time.perf_counter()
            publication = broker_pb2.Publication(
                handoff_id=name, blocks=blocks[0], position_tokens=tokens, final=True
            )
            source.session.put(broker_pb2.EngineMessage(publish=publication))
            fenced = agent_link_pb2.Fenced(handoff_id=name)
            source.agent.put(agent_link_pb2.AgentMessage(fenced=fenced))
            wanted = blocks[index % len(blocks)]
            demand = broker_pb2.Demand(handoff_id=name, blocks=wanted)
            destination.session.put(broker_pb2.EngineMessage(request=demand))
        await asyncio.wait_for(tally.done.wait(), 120)
        took_s = time.perf_counter() - begun_s
        for task in tasks:
            task.cancel()
    if tally.failures:
        raise RuntimeError(f"{tally.failures} handoffs did not end as DONE")
    return took_s, tally.latency_s
