"""The process of one rank: attaches the engine's memory and embeds the rank's agent in itself.

Speaks in lines of JSON on stdin: first whom it serves and where the memory is, then fences. Ends
with its stdin.
"""

from __future__ import annotations

import json
import sys

from restow.agents import Agent
from restow.agents.engines.transformers.ranks import READY_WORD
from restow.agents.memory import SharedMemory, SharedRegion


def main() -> None:
    """Serve until stdin ends."""
    told = json.loads(sys.stdin.readline())
    regions = [SharedRegion(**region) for region in told["regions"]]
    names = {region.shared_memory for region in regions}
    attached = {name: SharedMemory.attach(name) for name in names}
    agent = Agent(
        broker=told["broker"],
        engine_id=told["engine_id"],
        incarnation=told["incarnation"],
        rank=told["rank"],
        regions=[region.memory(attached[region.shared_memory]) for region in regions],
    )
    with agent:
        print(READY_WORD, flush=True)
        for line in sys.stdin:
            agent.fence(json.loads(line)["fence"])
    for memory in attached.values():
        memory.close()


if __name__ == "__main__":
    main()
