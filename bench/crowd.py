"""Engines and agents that only stay connected, with the clients' own streams and pauses.

python bench/crowd.py BROKERS FIRST COUNT: so many engines of eight ranks, until killed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from dataclasses import asdict

import uvloop

from restow.agents.link.kept_stream import Link
from restow.broker.client import EngineSession
from restow.broker.errors import RestowError
from restow.broker.families import (
    AttentionSpec,
    EngineSettings,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Layout
from restow.broker.logs import log_to_stderr
from restow.broker.rpc import wire_program
from restow.v1 import agent_link_pb2 as pb
from restow.v1 import broker_pb2

RANKS = 8
METADATA_BYTES = 1024
LIFE = "life"


def crowd_layout() -> Layout:
    """Of eight ranks."""
    dtype = DType.BFLOAT16
    layers = (Mamba2Spec(0, 8, 16, 16, 8, 4, dtype, DType.FLOAT32), AttentionSpec(1, 8, 16, dtype))
    return build_layout(ModelSpec("crowd", layers), EngineSettings(tp=RANKS, page_tokens=16))


class CrowdAgent:
    """Says Hello, and does nothing."""

    def __init__(self, broker: str, engine_id: str, rank: int, layout: Layout) -> None:
        self._hello = pb.Hello(
            engine=broker_pb2.EngineRef(engine_id=engine_id, incarnation=LIFE),
            rank=rank,
            agent_name=f"{engine_id}.{rank}",
            nixl_metadata=bytes(METADATA_BYTES),
            host=engine_id,
            model=broker_pb2.ModelName(**asdict(layout.model.identity)),
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
        self._link.begin()

    async def hello(self) -> pb.Hello:
        return self._hello

    def welcomed(self, broker_epoch: str) -> None:
        """Nothing is to be said again."""

    def take(self, order: pb.AgentOrder) -> None:
        """Nothing is done."""


async def _engine(broker: str, engine_id: str, layout: Layout) -> tuple[EngineSession, object]:
    while True:
        session = EngineSession(engine_id, LIFE, layout, broker)
        try:
            await session.start(60.0)
            break
        except RestowError:
            continue
    agents = [CrowdAgent(broker, engine_id, rank, layout) for rank in range(RANKS)]
    for agent in agents:
        agent.begin()
    return session, agents


async def _crowd(broker: str, first: int, count: int) -> None:
    gc.disable()  # a quarter of the time, for thousands in one process: real ones have their own
    layout = crowd_layout()
    kept = [await _engine(broker, f"e{n}", layout) for n in range(first, first + count)]
    await asyncio.Event().wait()
    del kept


if __name__ == "__main__":
    log_to_stderr(level=logging.ERROR)
    uvloop.run(_crowd(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
