"""A hundred handoffs at once through staging pools that fit three."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from agent_harness.handover import programs
from agent_harness.live import SETTINGS, Live
from agent_harness.source_main import serve_source
from agent_harness.waiting import WAIT_S
from agent_harness.world import POISON, Case, RankMemory, make_case
from broker.fakes import broker
from restow.agents.binding.pages import Blocks, TokenRange
from restow.agents.execute.gathering import GatheredRun
from restow.agents.execute.order_reads import StagedReads
from restow.agents.execute.orders import ExecuteOrder, Source
from restow.agents.memory.staging import ALIGN_BYTES
from restow.broker.core.common.keys import State
from restow.broker.planner import Program, Strategy

HANDOFFS = 100
FIT = 3


def aligned(length_bytes: int) -> int:
    return -(-length_bytes // ALIGN_BYTES) * ALIGN_BYTES


def gathered_bytes(case: Case, strategy: Strategy) -> int:
    """Return how many bytes one handoff stages at the busiest rank of P."""
    found: Counter[int] = Counter()
    for program in programs(case, strategy).values():
        for rank in program.staging_ranks:
            run = GatheredRun.at_source(program, rank, TokenRange(0, case.tokens))
            found[rank] += aligned(run.length_bytes)
    return max(found.values(), default=ALIGN_BYTES)


def arriving_bytes(case: Case, program: Program) -> int:
    """Return how many bytes one handoff stages at a rank of D."""
    sources = tuple(Source(rank, "", 0, 0) for rank in program.src_ranks)
    none = Blocks({})
    order = ExecuteOrder(0, "", none, none, TokenRange(0, case.tokens), sources, 1.0)
    return aligned(StagedReads(program, order).length_bytes)


def ids_of(case: Case, number: int) -> dict[str, tuple[int, ...]]:
    """Return D's blocks of one of the handoffs."""
    return {
        group: tuple(1 + number * len(ids) + index for index in range(len(ids)))
        for group, ids in case.dst_ids.items()
    }


@pytest.mark.parametrize("strategy", [Strategy.WHOLE, Strategy.PACK, Strategy.INTERLEAVE])
async def test_a_hundred_handoffs_through_pools_for_three(strategy: Strategy) -> None:
    case = make_case("wide")
    last = ids_of(case, HANDOFFS - 1)
    memory = {rank.rank: RankMemory(rank, last) for rank in case.destination.ranks}
    arriving = [arriving_bytes(case, one) for one in programs(case, strategy).values()]
    names = [f"h{number}" for number in range(HANDOFFS)]
    async with (
        broker(strategy=strategy) as running,
        Live("wide", running.address, memory) as both,
    ):
        await both.start_engines()
        await both.start_source(serve_source, FIT * gathered_bytes(case, strategy))
        await both.start_agents(replace(SETTINGS, staging_bytes=FIT * max(arriving)))
        released = [both.p.publish(name, case.src_ids, case.tokens) for name in names]
        asked = [both.d.request(n, ids_of(case, i)) for i, n in enumerate(names)]
        for name in names:
            both.fence(name)
        ended = asyncio.gather(*asked)
        most_at_once = 0
        while not ended.done():
            states = Counter(h.state for h in running.hub.directory.ledger.live.values())
            most_at_once = max(most_at_once, states[State.STAGING] + states[State.READING])
            await asyncio.wait([ended], timeout=0.002)
        assert all(one.done for one in await asyncio.wait_for(ended, WAIT_S))
        assert all(one.done for one in await asyncio.wait_for(asyncio.gather(*released), WAIT_S))
        assert most_at_once > FIT, "they did not meet"
        both.check_staging_is_free()
    for rank, own in memory.items():
        image = np.full_like(own.data, POISON)
        for number in range(HANDOFFS):
            own.ids = ids_of(case, number)
            own.write(case.fields, case.tokens, image)
        assert (own.data == image).all(), f"rank {rank}"
