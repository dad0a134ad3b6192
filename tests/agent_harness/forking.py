"""A program that uses everything public, forks for each verb, and prints how each child ended.

``python forking.py BROKER SOCKET``; prints a JSON object: by verb, what the child's error was.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

from restow.agents import Agent, RegionMemory
from restow.agents.daemon.server import AgentDaemon
from restow.agents.link.async_agent import AsyncAgent
from restow.broker.client import AdminClient, AsyncAdminClient, BlockingSession, EngineSession
from restow.broker.errors import RestowError
from restow.broker.layout import DType, Field, Kind, Layout, Model, RankLayout, Region, Shard, Span

HANGS_S = 5.0
LAYOUT = Layout(
    Model("toy", (Field("h", Kind.SNAPSHOT, ("head",), (8,)),)),
    (
        RankLayout(
            0,
            (Region("state", "state", 32, None),),
            (Shard("h", (Span(0, 8),), DType.FLOAT32, "state", 0, (4,)),),
        ),
    ),
)
BLOCKS = {"state": [1]}


def end_of(verb: Callable[[], object]) -> str:
    """Return how a forked child ends that calls ``verb``."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        try:
            verb()
            words = "nothing is wrong"
        except RestowError as error:
            words = error.reason
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent shows it
            words = repr(error)
        os.write(theirs, words.encode())
        os._exit(0)
    os.close(theirs)
    until_s = time.monotonic() + HANGS_S
    status = 0
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hangs"
        time.sleep(0.01)
    words = os.read(ours, 1 << 16).decode()
    os.close(ours)
    return words or f"ended without a word, {status}"


def on_a_loop(work: Callable[[], Coroutine[Any, Any, object]]) -> Callable[[], object]:
    """Run on a loop of the child's own."""

    def run() -> object:
        loop = asyncio.new_event_loop()
        asyncio._set_running_loop(None)  # the parent's, which the child believes to run
        return loop.run_until_complete(work())

    return run


async def ends(broker: str, socket: Path) -> dict[str, str]:
    """Return how a forked child ends with each verb."""
    memory = np.zeros((4, 8), np.float32)
    regions = [RegionMemory("state", memory.ctypes.data, 4, memory.strides[0])]
    unused = BlockingSession("unused", "1", LAYOUT, broker)
    async with (
        EngineSession("e", "1", LAYOUT, broker) as session,
        AsyncAdminClient(broker) as async_admin,
    ):
        agent = Agent(broker, "e", "1", 0, regions)
        await asyncio.to_thread(agent.start)
        async_agent = AsyncAgent(broker, "e", "1", 0, regions)
        daemon = AgentDaemon(broker, socket)
        await daemon.start()
        blocking = BlockingSession("b", "1", LAYOUT, broker)
        await asyncio.to_thread(blocking.start)
        admin = AdminClient(broker)
        asked = blocking.request("asked", BLOCKS)
        verbs = {
            "EngineSession.publish": lambda: session.publish("h", BLOCKS, 1),
            "EngineSession.request": lambda: session.request("h", BLOCKS),
            "EngineSession.decline": lambda: session.decline("h"),
            "EngineSession.cancel": lambda: session.cancel("h"),
            "EngineSession.close": on_a_loop(session.close),
            "a new EngineSession": on_a_loop(EngineSession("n", "1", LAYOUT, broker).start),
            "BlockingSession.publish": lambda: blocking.publish("h", BLOCKS, 1).result(),
            "BlockingSession.request": lambda: blocking.request("h", BLOCKS).result(),
            "BlockingSession.cancel": lambda: blocking.cancel("h"),
            "BlockingSession.close": blocking.close,
            "BlockingDelivery.cancel": asked.cancel,
            "a new BlockingSession": BlockingSession("n", "1", LAYOUT, broker).start,
            "a session that was not started": unused.start,
            "AdminClient.status": admin.status,
            "AdminClient.close": admin.close,
            "a new AdminClient": lambda: AdminClient(broker).status(),
            "AsyncAdminClient.status": on_a_loop(async_admin.status),  # type: ignore[arg-type]
            "AsyncAdminClient.close": on_a_loop(async_admin.close),
            "Agent.fence": lambda: agent.fence("h"),
            "Agent.close": agent.close,
            "a new Agent": Agent(broker, "n", "1", 0, regions).start,
            "AsyncAgent.fence": lambda: async_agent.fence("h"),
            "AsyncAgent.begin": async_agent.begin,
            "AsyncAgent.start": on_a_loop(async_agent.start),
            "AsyncAgent.close": on_a_loop(async_agent.close),
            "a new AsyncAgent": lambda: AsyncAgent(broker, "n", "1", 0, regions),
            "AgentDaemon.close": on_a_loop(daemon.close),
            "a new AgentDaemon": on_a_loop(AgentDaemon(broker, socket).start),
        }
        found = {name: end_of(verb) for name, verb in verbs.items()}
        ended = await session.decline("still here")  # the parent is none the worse for it
        found["the parent"] = ended.reason
        await asyncio.to_thread(agent.close)
        await async_agent.close()
        await daemon.close()
        await asyncio.to_thread(blocking.close)
        admin.close()
        return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(ends(sys.argv[1], Path(sys.argv[2])))))
