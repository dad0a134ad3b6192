"""How many of its own Python functions the broker calls for one handoff.

Time has noise, and this count has none: a change that makes handoffs dearer is seen at once. Each
stream says its part when the broker has handled the part before: P publishes, P's agent fences, D
asks. Run as a module, this file prints the count and the functions, and fails above `MOST`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from bench.control.counted_broker import BEGIN, END
from bench.control.simulated_engines import Side, Stream, block_lists, settle, side
from bench.processes import module, running_broker
from restow.v1 import agent_link_pb2, broker_pb2

LIMIT = 126.0
"""Calls per handoff. A commit that needs more raises it, and says here what they are for; a commit
that needs fewer lowers it. Pythons after 3.11 call less: comprehensions are no functions there."""
MOST = 1.05 * LIMIT
TOKENS, PER_ROUND, ROUNDS = 64, 60, 5
HANDOFFS = PER_ROUND * ROUNDS
PATIENCE_S = 60.0


async def _until(stream: Stream, is_last: Callable[[Any], bool]) -> None:
    """Read what the broker says, up to the last of what is waited for."""
    async for response in stream.read():
        if is_last(response):
            return
    raise RuntimeError("the broker has ended a stream")


async def _all_told(engine: Side, count: int) -> None:
    """Wait until an engine was told the ends of ``count`` handoffs."""
    told = 0

    def is_last(response: broker_pb2.SessionResponse) -> bool:
        nonlocal told
        told += len(response.events)
        return told >= count

    await _until(engine.session, is_last)


async def _hand_over(
    source: Side, destination: Side, names: Sequence[str], ended: str | None
) -> None:
    """Hand over; what is said again of a handoff that has ``ended`` is answered after the rest."""
    blocks = block_lists(TOKENS)
    for name in names:
        publication = broker_pb2.Publication(
            handoff_id=name, blocks=blocks[0], position_tokens=TOKENS, final=True
        )
        source.session.put(broker_pb2.EngineMessage(publish=publication))
    if ended is not None:
        renew = broker_pb2.Renewal(handoff_id=ended)
        source.session.put(broker_pb2.EngineMessage(renew=renew))
        await _all_told(source, 1)
    for name in names if ended is None else (*names, ended):
        fenced = agent_link_pb2.Fenced(handoff_id=name)
        source.agent.put(agent_link_pb2.AgentMessage(fenced=fenced))
    if ended is not None:
        await _until(
            source.agent,
            lambda response: ended in [order.unfence.handoff_id for order in response.orders],
        )
    for name, wanted in zip(names, blocks, strict=False):
        demand = broker_pb2.Demand(handoff_id=name, blocks=wanted)
        destination.session.put(broker_pb2.EngineMessage(request=demand))
    await asyncio.gather(*(_all_told(engine, len(names)) for engine in (source, destination)))


async def _hand_over_rounds(address: str, pid: int) -> None:
    async with side(address, "p") as source, side(address, "d") as destination:
        settling = asyncio.create_task(settle(destination))
        await _hand_over(source, destination, ["first"], None)
        for turn in range(ROUNDS + 1):
            if turn == 1:  # what is done once for a pair of engines is done
                os.kill(pid, BEGIN)
            names = [f"{turn}/{number}" for number in range(PER_ROUND)]
            await asyncio.wait_for(_hand_over(source, destination, names, "first"), PATIENCE_S)
        os.kill(pid, END)
        settling.cancel()


def counted() -> dict[str, float]:
    """Return the calls per handoff of each function, the most first.

    Left out is what the broker does now and then: its clock, and what it does for a batch.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "counts.json"
        command = (*module("bench.control.counted_broker"), str(file), "serve")
        with running_broker(command=command) as broker:
            uvloop.run(_hand_over_rounds(broker.address, broker.pid))
            give_up_s = time.monotonic() + PATIENCE_S
            while not file.exists():
                if time.monotonic() > give_up_s:
                    raise RuntimeError("the broker wrote no counts")
                time.sleep(0.01)
            counts: dict[str, int] = json.loads(file.read_text())
    often = sorted(counts.items(), key=lambda item: -item[1])
    return {name: count / HANDOFFS for name, count in often if 2 * count >= HANDOFFS}


def main() -> int:
    """Print what was counted; return 1 if it is too much."""
    calls = counted()
    for name, count in calls.items():
        print(f"{count:6.2f}  {name}")
    whole = sum(calls.values())
    print(f"{whole:.1f} Python calls of the broker for a handoff; the limit is {LIMIT:.0f} + 5 %")
    return int(whole > MOST)


if __name__ == "__main__":
    sys.exit(main())
