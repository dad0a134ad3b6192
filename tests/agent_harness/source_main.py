"""The process of a source engine: all ranks of a case, in memory of its own.

It fences every handoff that it is told of, until its pipe ends.
"""

from __future__ import annotations

import contextlib
from multiprocessing.connection import Connection

from agent_harness.processes import READY
from agent_harness.world import RankMemory, make_case
from restow.agents import Agent

STAGING_BYTES = 8 << 20


def serve_source(
    pipe: Connection, case_name: str, broker: str, staging_bytes: int = STAGING_BYTES
) -> None:
    case = make_case(case_name)
    fields = {field.name: field for field in (*case.source.model.fields, *case.source.model.inputs)}
    memories = {rank.rank: RankMemory(rank, case.src_ids) for rank in case.source.ranks}
    for memory in memories.values():
        memory.write(fields, case.tokens)
    agents = [
        Agent(broker, "P", "life-1", rank, memory.regions, staging_bytes=staging_bytes)
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
