"""The time of the first handoff between two engines, beside a later one.

The engines have been connected for some seconds, in which the broker plans the pair, has costs
measured, and sends agents their programs and peers. The first handoff pays for the rest.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping

import numpy as np
import uvloop

from bench.engine_pairs import EnginePair, connected, must_be_done, running_pairs
from bench.model_sizes import real_models
from bench.processes import running_broker
from bench.report import Put, compared
from restow.broker.client import AdminClient
from restow.broker.families import EngineSettings, build_layout
from restow.broker.layout import Layout

SUITE, PAIR = "first-handoff", "first"
CONNECTED_S = 5.0
"""Time between the engines' connection and the first prompt."""
TOKENS = 256
CASES: Mapping[str, tuple[int, int]] = {
    "lfm2-like": (1, 1),
    "nemotron3-nano-30b": (2, 4),
    "falcon-h1-34b-like": (2, 4),
}
"""Models, with P's and D's TP: small, usual, and so large that a process plans it."""
LATER_HANDOFFS = 5
MAX_SAMPLES = 5
"""Each sample starts a broker and all rank processes."""


def run(put: Put, repeats: int) -> None:
    """Measure each model with a new broker and new engines for each sample."""
    for name, (p_tp, d_tp) in CASES.items():
        spec = real_models()[name]
        p, d = (build_layout(spec, EngineSettings(tp=tp, page_tokens=16)) for tp in (p_tp, d_tp))
        first: list[float] = []
        later: list[float] = []
        granted: list[float] = []
        for _ in range(min(repeats, MAX_SAMPLES)):
            took_s, more_s, granted_s = uvloop.run(_measure((p, d)))
            first.append(took_s)
            later += more_s
            granted.append(granted_s)
        shards = sum(len(rank.shards) for layout in (p, d) for rank in layout.ranks)
        note = f"{shards} shards; until the grant {statistics.median(granted) * 1e3:.0f} ms"
        case = f"the first handoff, {name}, P{p_tp} to D{d_tp}"
        put(compared(SUITE, case, first, "a later one", later, note=note))


async def _measure(layouts: tuple[Layout, Layout]) -> tuple[float, list[float], float]:
    """Return the seconds of the first handoff, of later handoffs, and until the first grant."""
    with running_broker() as broker:
        pairs = {PAIR: EnginePair(layouts, broker.address, 1)}
        async with running_pairs("first", pairs, TOKENS) as engines:
            await connected(broker.address, 2, sum(len(layout.ranks) for layout in layouts))
            await asyncio.sleep(CONNECTED_S)
            rng = np.random.default_rng(0)
            seconds = []
            for number in range(1 + LATER_HANDOFFS):
                began_s = time.perf_counter()
                must_be_done(await engines.attempt(PAIR, number, rng))
                seconds.append(time.perf_counter() - began_s)
            first = engines.handoff_id(PAIR, 0)
            granted_s = await asyncio.to_thread(_granted_after_s, broker.address, first)
            return seconds[0], seconds[1:], granted_s


def _granted_after_s(address: str, handoff_id: str) -> float:
    """Return the time from the first message about a handoff to its grant."""
    with AdminClient(address) as admin:
        return next(
            entry.at_ms / 1e3
            for entry in admin.handoff(handoff_id).timeline
            if entry.event == "granted"
        )
