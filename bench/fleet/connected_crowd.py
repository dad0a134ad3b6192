"""The process of a crowd: engines and agents that only stay connected, by the clients' own streams.

    python -m bench.fleet.connected_crowd BROKERS FIRST COUNT RANKS

It connects COUNT engines of RANKS ranks each, numbered from FIRST, and runs until it is killed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys

import uvloop

from bench.model_sizes import tiny_hybrid
from restow.agents.link.broker_link import Link
from restow.broker.client import EngineSession
from restow.broker.errors import RestowError
from restow.broker.layout import Layout
from restow.broker.logs import log_to_stderr
from restow.broker.rpc import wire_program
from restow.v1 import agent_link_pb2 as pb
from restow.v1 import broker_pb2

METADATA_BYTES = 1024
LIFE = "life"


class CrowdAgent:
    """An agent that says Hello and ignores all orders."""

    def __init__(self, broker: str, engine_id: str, rank: int, layout: Layout) -> None:
        self._hello = pb.Hello(
            engine=broker_pb2.EngineRef(engine_id=engine_id, incarnation=LIFE),
            rank=rank,
            agent_name=f"{engine_id}.{rank}",
            nixl_metadata=bytes(METADATA_BYTES),
            host=engine_id,
            program_form=wire_program.PROGRAM_FORM,
            regions=[
                pb.RegionMemory(
                    name=region.name,
                    base_address=(1 + at) << 40,
                    page_count=1 << 10,
                    page_stride_bytes=region.page_stride_bytes,
                )
                for at, region in enumerate(layout.ranks[rank].regions)
            ],
        )
        self._link = Link(broker, self)

    def begin(self) -> None:
        """Connect all engines and agents of the crowd."""
        self._link.begin()

    async def hello(self) -> pb.Hello:
        """Return the first message of each stream."""
        return self._hello

    def welcomed(self, broker_epoch: str) -> None:
        """Do nothing: no message is sent again."""

    def take(self, order: pb.AgentOrder) -> None:
        """Ignore the order."""


async def _engine(broker: str, engine_id: str, layout: Layout) -> tuple[EngineSession, object]:
    while True:
        session = EngineSession(engine_id, LIFE, layout, broker)
        try:
            await session.start(60.0)
            break
        except RestowError:
            continue
    agents = [CrowdAgent(broker, engine_id, rank, layout) for rank in range(len(layout.ranks))]
    for agent in agents:
        agent.begin()
    return session, agents


async def _crowd(broker: str, first: int, count: int, ranks: int) -> None:
    gc.disable()  # it takes a quarter of the time with thousands of agents in one process
    layout = tiny_hybrid(ranks)
    kept = [await _engine(broker, f"e{n}", layout) for n in range(first, first + count)]
    await asyncio.Event().wait()
    del kept


if __name__ == "__main__":
    log_to_stderr(level=logging.ERROR)
    uvloop.run(_crowd(sys.argv[1], *map(int, sys.argv[2:])))
