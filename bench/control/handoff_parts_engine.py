"""The process of one engine of `handoff_parts`: a session, and the agent of its only rank.

It reads lines of JSON from stdin: first its name and broker, then handoffs to publish or to
request. Its answer to each is the times at which the agent's steps were done, by the host's clock.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import torch
import uvloop

from bench.model_sizes import tiny_hybrid
from bench.rank_process import touched
from restow.agents import Agent
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.memory.regions import RegionMemory
from restow.agents.reading.lane import Lane
from restow.broker.client import EngineSession
from restow.broker.logs import log_to_stderr
from restow.v1 import agent_link_pb2 as pb

LIFE = "parts"
PAGES = 64
Stamps = dict[str, float]


class StepTimes:
    """The times of the steps of this process' agent."""

    def __init__(self) -> None:
        self.stamps: Stamps = {}

    def begin(self) -> None:
        """Wrap the agent's methods, so that they note their times."""
        take, post, ended, send = AsyncAgent.take, Lane.post, Lane.has_ended, AsyncAgent._send

        def taking(agent: AsyncAgent, order: pb.AgentOrder) -> None:
            if order.WhichOneof("body") == "execute":
                self.stamps["ordered"] = time.monotonic()
            take(agent, order)

        def posting(lane: Lane, *arguments: Any) -> Any:
            self.stamps["posted"] = time.monotonic()
            flight = post(lane, *arguments)
            if flight.done:
                self.stamps["landed"] = time.monotonic()
            return flight

        def ending(lane: Lane, flight: Any) -> bool:
            was, is_over = flight.done, ended(lane, flight)
            if is_over and not was:
                self.stamps["landed"] = time.monotonic()
            return is_over

        def sending(agent: AsyncAgent, message: pb.AgentMessage) -> None:
            if message.WhichOneof("body") == "settled":
                self.stamps["reported"] = time.monotonic()
            send(agent, message)

        watched: tuple[tuple[type, str, Callable[..., Any]], ...] = (
            (AsyncAgent, "take", taking),
            (AsyncAgent, "_send", sending),
            (Lane, "post", posting),
            (Lane, "has_ended", ending),
        )
        for owner, name, noted in watched:
            setattr(owner, name, noted)


async def _serve() -> None:
    log_to_stderr(level=logging.WARNING)
    torch.set_num_threads(1)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    settings = json.loads(await lines.readline())
    broker, engine_id, tokens = settings["broker"], settings["engine_id"], settings["tokens"]
    times, layout = StepTimes(), tiny_hybrid(1)
    times.begin()
    memory = [touched(PAGES * region.page_stride_bytes) for region in layout.ranks[0].regions]
    regions = [
        RegionMemory(region.name, view.ctypes.data, PAGES, region.page_stride_bytes)
        for region, view in zip(layout.ranks[0].regions, memory, strict=True)
    ]
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(EngineSession(engine_id, LIFE, layout, broker))
        arguments = (broker, engine_id, LIFE, 0, regions)
        if settings["thread"]:
            agent: Agent | AsyncAgent = stack.enter_context(Agent(*arguments))
        else:
            agent = AsyncAgent(*arguments)
            await agent.start()
            stack.push_async_callback(agent.close)
        blocks = _blocks(layout.ranks[0].regions, tokens)
        print("ready", flush=True)
        while line := await lines.readline():
            wanted = json.loads(line)
            times.stamps = stamps = {"began": time.monotonic()}
            if name := wanted.get("publish"):
                session.publish(name, blocks, tokens)
                agent.fence(name)
            else:
                ended = await session.request(wanted["ask"], blocks, position_tokens=tokens)
                stamps["ended"] = time.monotonic()
                if not ended.done:
                    raise RuntimeError(f"{ended.reason}: {ended.detail}")
            print(json.dumps(stamps), flush=True)


def _blocks(regions: Sequence[Any], tokens: int) -> dict[str, list[int]]:
    pages = {region.group: region.page_tokens for region in regions}
    rng = np.random.default_rng(0)
    return {
        group: rng.permutation(PAGES)[: -(-tokens // size) if size else 1].tolist()
        for group, size in pages.items()
    }


if __name__ == "__main__":
    uvloop.run(_serve())
