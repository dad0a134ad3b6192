"""Processes with agents: a source engine's, and a daemon's."""

from __future__ import annotations

import contextlib
from multiprocessing.connection import Connection

from agent_harness.processes import READY
from agent_harness.world import make_case
from restow.agents import Agent, AgentSettings
from restow.agents.daemon.cli import run_agent_daemon

STAGING_BYTES = 8 << 20


def serve_source(
    pipe: Connection, case_name: str, broker: str, staging_bytes: int = STAGING_BYTES
) -> None:
    """Serve all ranks of a case's source; fence each handoff that the pipe names, until it ends."""
    case = make_case(case_name)
    memories = case.source_memory()
    settings = AgentSettings(staging_bytes=staging_bytes, try_metadata=False)  # it never reads
    agents = [
        Agent(broker, "P", "life-1", rank, memory.regions, settings=settings)
        for rank, memory in memories.items()
    ]
    for agent in agents:
        agent.start()
    pipe.send(READY)
    with contextlib.suppress(EOFError):
        while True:
            handoff_id = pipe.recv()
            for agent in agents:
                agent.fence(handoff_id)
    for agent in agents:
        agent.close()


def serve_daemon(pipe: Connection, broker: str, socket: str) -> None:
    pipe.send(READY)
    run_agent_daemon(broker, socket)
