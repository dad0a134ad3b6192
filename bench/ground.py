"""How much of a handoff is the ground's: NIXL alone reads the same pieces, in turns with ours.

Of the time of a contiguous handoff some is NIXL's and some is not: orders, reports, turns on busy
processors. A handoff of scattered pieces pays that too, NIXL's time for its own pieces, and the
turning of windows.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack

import numpy as np
import uvloop
from bare import ALONE, ALONE_CONTIGUOUS, ALONE_TURNED, bare
from choice import Case, models, named
from control import BROKER, listening
from processor import spent_s
from rows import Row, Yield, compared
from scene import Engines, Scene, contiguous, page_counts, scene

from restow.broker.layout import Layout
from restow.broker.planner import make_plan

WARM_UPS = 3
REST_S = 0.01
"""What an agent does after its report belongs to the handoff."""
AUTO, CONTIGUOUS = "auto", "contiguous READ"
PROCESSOR = ", processor"
"""After a reference: what a reading rank spends of a processor, instead of the time."""


def run(put: Yield, repeats: int, words: Sequence[str] = ()) -> None:
    """Every geometry with unequal TP, as in the suite `models`."""
    unequal = (case for case in named(models(), words) if len(case.plan.source.ranks) > 1)
    with listening(BROKER) as broker:
        for index, case in enumerate(unequal):
            for row in uvloop.run(_measure(case, f"{index}", broker, repeats)):
                put(row)


async def _measure(case: Case, name: str, broker: str, repeats: int) -> list[Row]:
    runs = contiguous(case.plan, case.tokens)
    kinds = {
        AUTO: Engines((case.plan.source, case.plan.destination), broker, case.read_threads),
        CONTIGUOUS: Engines(runs, broker, 1),
    }
    taken: dict[str, list[float]] = defaultdict(list)
    spent: dict[str, list[float]] = defaultdict(list)
    readers = len(case.plan.destination.ranks)
    rng = np.random.default_rng(0)
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(scene(name, kinds, case.tokens))
        for warm_up in range(WARM_UPS):
            for kind in kinds:
                await made.hand_over(kind, f"warm-{warm_up}", rng)
        grounds = {}
        for reference, plan in ((ALONE, case.plan), (ALONE_CONTIGUOUS, make_plan(*runs))):
            ground = stack.enter_context(
                bare(plan, case.tokens, page_counts(plan.source, case.tokens))
            )
            if ground.complete:
                sides = plan.source, plan.destination
                grounds[reference] = ground, sides, False
                if ground.turns:
                    grounds[ALONE_TURNED] = ground, sides, True
        for ground, sides, turn in grounds.values():
            ground.prepare(*_drawn(made, sides, rng), turn=turn)()
            ground.rest()
        for repeat in range(repeats):
            for kind in kinds:
                before_s = spent_s(made.pids("D"))
                taken[kind].append(await made.hand_over(kind, f"{repeat}", rng))
                await asyncio.sleep(REST_S)
                spent[kind].append((spent_s(made.pids("D")) - before_s) / readers)
            for reference, (ground, sides, turn) in grounds.items():
                prepared = ground.prepare(*_drawn(made, sides, rng), turn=turn)
                before_s = spent_s(ground.pids)
                taken[reference].append(prepared())
                spent[reference].append((spent_s(ground.pids) - before_s) / readers)
    size_bytes = case.plan.bytes_at(case.tokens)
    return [
        compared(
            "ground",
            case.name,
            seconds[AUTO],
            reference + what,
            seconds[reference],
            goal=case.read_goal if reference + what == CONTIGUOUS else None,
            size_bytes=size_bytes,
        )
        for seconds, what in ((taken, ""), (spent, PROCESSOR))
        for reference in seconds
        if reference != AUTO
    ]


def _drawn(
    made: Scene, sides: tuple[Layout, Layout], rng: np.random.Generator
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    return made.blocks(sides[0], rng), made.blocks(sides[1], rng)
