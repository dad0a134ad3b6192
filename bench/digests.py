"""What content digests cost: the same handoffs with all of them checked, and with none.

A real model's size at pages of 64 tokens, and pieces of one size.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import uvloop
from choice import WARM_UPS, Case, pieces
from control import BROKER, listening
from geometry import geometries
from rows import Row, Yield, compared
from scene import Engines, scene

from restow.broker.families import ConvLayout, EngineSettings, build_layout
from restow.broker.planner import make_plan

GEOMETRY = "nemotron3-nano-30b"
PAIRS = ((1, 1), (2, 4))
TOKENS = 8192
MODES = ("all", "off")


def cases() -> Iterator[Case]:
    """The model at equal and unequal TP, then pieces over shared memory."""
    for p_tp, d_tp in PAIRS:
        layouts = [
            build_layout(
                geometries()[GEOMETRY],
                EngineSettings(tp=tp, page_tokens=64, conv_layout=ConvLayout.DS),
            )
            for tp in (p_tp, d_tp)
        ]
        name = f"{GEOMETRY}, P{p_tp} to D{d_tp}, pages of 64"
        yield Case(name, make_plan(*layouts), TOKENS, read_threads=1)
    yield from (case for case in pieces() if not case.environment)


def run(put: Yield, repeats: int) -> None:
    """Each case in turns under two brokers."""
    with (
        listening([*BROKER, "--digests", "all"]) as checking,
        listening(BROKER) as trusting,
    ):
        brokers = dict(zip(MODES, (checking, trusting), strict=True))
        for index, case in enumerate(cases()):
            put(uvloop.run(_measure(case, f"{index}", brokers, repeats)))


async def _measure(case: Case, name: str, brokers: dict[str, str], repeats: int) -> Row:
    layouts = (case.plan.source, case.plan.destination)
    kinds = {mode: Engines(layouts, brokers[mode], case.read_threads) for mode in MODES}
    taken: dict[str, list[float]] = {mode: [] for mode in MODES}
    rng = np.random.default_rng(0)
    async with scene(name, kinds, case.tokens) as made:
        for repeat in range(-WARM_UPS, repeats):
            for mode in MODES:
                seconds = await made.hand_over(mode, f"{repeat}", rng)
                if repeat >= 0:
                    taken[mode].append(seconds)
    size_bytes = case.plan.bytes_at(case.tokens)
    return compared(
        "digests", case.name, taken["all"], "digests off", taken["off"], size_bytes=size_bytes
    )
