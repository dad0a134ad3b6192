"""Simulated engines and agents: they say what real ones say, and move no bytes.

As lean as Python can be, because they share the machine with the broker that is measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np

from restow.broker.client.connection.channel import open_channel
from restow.broker.client.engine.session import MAX_BATCH
from restow.broker.families import (
    AttentionSpec,
    EngineSettings,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Layout
from restow.broker.rpc import wire, wire_program
from restow.v1 import agent_link_pb2, agent_link_pb2_grpc, broker_pb2, broker_pb2_grpc

PROMPT_TOKENS = 8192
BLOCK_TOKENS = 16
PAGES = 1 << 20
MOST_UNDER_WAY = 2048
"""Handoffs of which D has blocks for each at the same time."""


def small_layout() -> Layout:
    """A hybrid model's layout with one layer of each kind: page lists as long as a real one's."""
    dtype = DType.BFLOAT16
    layers = (Mamba2Spec(0, 8, 16, 16, 2, 4, dtype, DType.FLOAT32), AttentionSpec(1, 2, 16, dtype))
    return build_layout(ModelSpec("bench", layers), EngineSettings(page_tokens=BLOCK_TOKENS))


@dataclass
class Tally:
    """What a run saw."""

    wanted: int
    started_s: dict[str, float] = field(default_factory=dict)
    latency_s: list[float] = field(default_factory=list)
    ends_heard: int = 0
    failures: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    room: asyncio.Event = field(default_factory=asyncio.Event)


class Stream:
    """A bidi stream whose queued messages leave in batches, as the client's do."""

    def __init__(self, call: grpc.aio.StreamStreamCall, make: type) -> None:  # type: ignore[type-arg]
        self._call = call
        self._make = make
        self._queue: list[object] = []
        self._wake = asyncio.Event()

    def put(self, message: object) -> None:
        self._queue.append(message)
        self._wake.set()

    async def write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            queue, self._queue = self._queue, []
            for first in range(0, len(queue), MAX_BATCH):
                batch = queue[first : first + MAX_BATCH]
                await self._call.write(self._make(messages=batch))

    async def read(self) -> AsyncIterator[object]:
        while (response := await self._call.read()) is not grpc.aio.EOF:
            yield response


@dataclass
class Side:
    """One engine with its session and its one agent."""

    ref: broker_pb2.EngineRef
    session: Stream
    agent: Stream


@asynccontextmanager
async def side(address: str, engine_id: str) -> AsyncIterator[Side]:
    """Register an engine with one rank; its memory is an address nobody reads."""
    layout = small_layout()
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
    """Return blocks for each of many prompts, shuffled: no two prompts have one in common."""
    count = -(-tokens // BLOCK_TOKENS)
    prompts = min(MOST_UNDER_WAY, PAGES // count)
    ids = np.random.default_rng(0).permutation(prompts * count).reshape(prompts, count)
    return [wire.block_lists({"attention": own, "state": [at]}) for at, own in enumerate(ids)]


async def hear_ends(source: Side, destination: Side, tally: Tally, in_flight: int) -> None:
    """Count the ends that both engines are told; a handoff is full when both know.

    Its latency ends where D knows: that D's are told first is meant, and P's a while later.
    """
    live: dict[str, int] = {}

    async def hear(one: Side) -> None:
        async for response in one.session.read():
            now_s = time.perf_counter()
            for event in response.events:  # type: ignore[attr-defined]
                ended = event.ended
                name = ended.handoff_id
                if ended.state != broker_pb2.HANDOFF_STATE_DONE:
                    tally.failures += 1
                if one is destination:
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
    """Answer every Execute at once, as if the read took no time."""
    async for response in destination.agent.read():
        for order in response.orders:  # type: ignore[attr-defined]
            if order.WhichOneof("body") == "execute":
                settled = agent_link_pb2.Settled(handoff=order.execute.handoff, bytes=1)
                destination.agent.put(agent_link_pb2.AgentMessage(settled=settled))


async def run_handoffs(
    address: str, count: int, in_flight: int, tokens: int, rate: float | None = None
) -> tuple[float, list[float]]:
    """Run full handoffs; returns the seconds that all took, and each one's latency.

    ``rate`` starts so many a second (open loop); without it ``in_flight`` are kept under way.
    """
    tally = Tally(count)
    stamp = time.time_ns()
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
