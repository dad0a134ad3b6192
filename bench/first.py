"""The first handoff between two engines that have been there for some seconds, beside a later one.

The first has all that is found out once for a pair: the plan, what reading costs between the two
hosts, the programs that agents are given, and whom they are introduced to.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping

import numpy as np
import uvloop
from geometry import geometries
from killed import whole
from restarts import serve
from rows import Yield, compared
from scene import Engines, scene

from restow.broker.client import AdminClient
from restow.broker.families import EngineSettings, build_layout
from restow.broker.layout import Layout

KIND = "first"
THERE_S = 5.0
"""How long both engines are there before the first prompt comes."""
TOKENS = 256
CASES: Mapping[str, tuple[int, int]] = {
    "lfm2-like": (1, 1),
    "nemotron3-nano-30b": (2, 4),
    "falcon-h1-34b-like": (2, 4),
}
"""Geometries, with P's and D's TP: a small one, a usual one, and one planned in a process."""
LATER = 5
MOST = 5
"""Samples: each starts a broker and all rank processes."""


def run(put: Yield, repeats: int) -> None:
    """Each geometry with a broker and engines of its own for each sample."""
    for name, (p_tp, d_tp) in CASES.items():
        spec = geometries()[name]
        p, d = (build_layout(spec, EngineSettings(tp=tp, page_tokens=16)) for tp in (p_tp, d_tp))
        first: list[float] = []
        later: list[float] = []
        granted: list[float] = []
        for _ in range(min(repeats, MOST)):
            took_s, more_s, granted_s = uvloop.run(_measure((p, d)))
            first.append(took_s)
            later += more_s
            granted.append(granted_s)
        shards = sum(len(rank.shards) for layout in (p, d) for rank in layout.ranks)
        note = f"{shards} shards; until the grant {statistics.median(granted) * 1e3:.0f} ms"
        case = f"the first handoff, {name}, P{p_tp} to D{d_tp}"
        put(compared("first", case, first, "a later one", later, note=note))


async def _measure(layouts: tuple[Layout, Layout]) -> tuple[float, list[float], float]:
    """Seconds of the first handoff, of later ones, and of the first one until it was granted."""
    broker, address = serve("127.0.0.1:0")
    try:
        kinds = {KIND: Engines(layouts, address, 1)}
        async with scene("first", kinds, TOKENS) as made:
            await whole(address, sum(len(one.ranks) for one in layouts) // 2)
            await asyncio.sleep(THERE_S)
            rng = np.random.default_rng(0)
            seconds = []
            for number in range(1 + LATER):
                began_s = time.perf_counter()
                ended = await made.asked(KIND, f"{number}", rng)
                seconds.append(time.perf_counter() - began_s)
                if not ended.done:
                    raise RuntimeError(f"{number}: {ended.reason}: {ended.detail}")
            granted_s = await asyncio.to_thread(_granted_after_s, address, f"{KIND}-first-0")
            return seconds[0], seconds[1:], granted_s
    finally:
        broker.kill()
        broker.wait()


def _granted_after_s(address: str, handoff_id: str) -> float:
    """From the first word of a handoff to its grant."""
    with AdminClient(address) as admin:
        return next(
            one.at_ms / 1e3 for one in admin.handoff(handoff_id).timeline if one.event == "granted"
        )
