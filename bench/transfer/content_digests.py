"""What content digests cost: the same handoffs with every digest checked, and with none.

The cases are a real model's size in pages of 64 tokens, and pieces of one size.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import uvloop

from bench.engine_pairs import EnginePair, running_pairs
from bench.model_sizes import real_models
from bench.processes import running_broker
from bench.report import Put, Row, compared
from bench.transfer.strategies import WARM_UPS, Case, pieces
from restow.broker.families import ConvLayout, EngineSettings, build_layout
from restow.broker.planner import make_plan

SUITE = "content-digests"
MODEL = "nemotron3-nano-30b"
PAIRS = ((1, 1), (2, 4))
TOKENS = 8192
MODES = ("all", "off")


def cases() -> Iterator[Case]:
    """Yield the model at equal and unequal TP, then pieces over shared memory."""
    for p_tp, d_tp in PAIRS:
        layouts = [
            build_layout(
                real_models()[MODEL],
                EngineSettings(tp=tp, page_tokens=64, conv_layout=ConvLayout.DS),
            )
            for tp in (p_tp, d_tp)
        ]
        name = f"{MODEL}, P{p_tp} to D{d_tp}, pages of 64"
        yield Case(name, make_plan(*layouts), TOKENS, read_threads=1)
    yield from (case for case in pieces() if not case.environment)


def run(put: Put, repeats: int) -> None:
    """Measure each case in turns under two brokers."""
    with (
        running_broker("--digests", "all") as checking,
        running_broker() as trusting,
    ):
        addresses = (checking.address, trusting.address)
        brokers = dict(zip(MODES, addresses, strict=True))
        for index, case in enumerate(cases()):
            put(uvloop.run(_measure(case, f"{index}", brokers, repeats)))


async def _measure(case: Case, name: str, brokers: dict[str, str], repeats: int) -> Row:
    layouts = (case.plan.source, case.plan.destination)
    pairs = {mode: EnginePair(layouts, brokers[mode], case.read_threads) for mode in MODES}
    taken: dict[str, list[float]] = {mode: [] for mode in MODES}
    rng = np.random.default_rng(0)
    async with running_pairs(name, pairs, case.tokens) as engines:
        for repeat in range(-WARM_UPS, repeats):
            for mode in MODES:
                seconds = await engines.hand_over(mode, repeat, rng)
                if repeat >= 0:
                    taken[mode].append(seconds)
    size_bytes = case.plan.bytes_at(case.tokens)
    return compared(
        SUITE, case.name, taken["all"], "digests off", taken["off"], size_bytes=size_bytes
    )
