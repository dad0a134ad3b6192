"""The time added when D requests a state by its content instead of by a router's handoff id.

For a request by content, the broker looks up who holds the state and offers it to P, which then
publishes it. For a request by id, P publishes while D requests. Both are measured in turns.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping

import numpy as np
import uvloop

from bench.engine_pairs import (
    EnginePair,
    RunningPairs,
    connected,
    must_be_done,
    page_tokens_of,
    running_pairs,
)
from bench.model_sizes import real_models
from bench.processes import running_broker
from bench.report import Put, compared
from restow.broker.client import Offer, PrefixChain, chain_of
from restow.broker.families import EngineSettings, build_layout
from restow.broker.layout import Layout

SUITE, PAIR = "by-content", "offers"
TOKENS = 8192
CASES: Mapping[str, tuple[int, int]] = {"lfm2-like": (1, 1), "nemotron3-nano-30b": (1, 2)}
"""Models, with P's and D's TP."""
HANDOFFS_PER_TURN = 20
"""Handoffs of each kind for three repeats."""
GOAL_S = 0.0015


def run(put: Put, repeats: int) -> None:
    """Measure each model with a broker and engines of its own."""
    for name, (p_tp, d_tp) in CASES.items():
        spec = real_models()[name]
        p, d = (build_layout(spec, EngineSettings(tp=tp, page_tokens=16)) for tp in (p_tp, d_tp))
        plain, offered, finding = uvloop.run(
            _measure((p, d), HANDOFFS_PER_TURN * max(repeats // 3, 1))
        )
        case = f"{name}, P{p_tp} to D{d_tp}, 8,192 tokens"
        put(compared(SUITE, f"{case}, by content", offered, "by an id", plain))
        added_s = statistics.median(offered) - statistics.median(plain)
        words = f"{case}, what the offer adds"
        put(compared(SUITE, words, [added_s], "budget of 1.5 ms", [GOAL_S], goal=1.0))
        put(compared(SUITE, f"{case}, Find alone", finding, "by an id", plain))


async def _measure(
    layouts: tuple[Layout, Layout], handoffs: int
) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of handoffs by an id, of those by content, and of calls of Find."""
    rng = np.random.default_rng(0)
    chain = chain_of(range(TOKENS + 1))  # one token is left to compute
    running: list[RunningPairs] = []

    def give(offer: Offer) -> None:
        running[0].publish_as(PAIR, offer.handoff_id, rng, offer.content)

    with running_broker() as broker:
        pairs = {PAIR: EnginePair(layouts, broker.address, 1, on_offer=give)}
        async with running_pairs("offers", pairs, TOKENS) as engines:
            running.append(engines)
            await connected(broker.address, 2, sum(len(layout.ranks) for layout in layouts))
            _report_held(engines, chain)
            d = engines.sessions["D", PAIR]
            while not (await d.find([chain]))[0]:  # noqa: ASYNC110 - the broker sends no event
                await asyncio.sleep(0.01)
            plain, offered, finding = [], [], []
            for number in range(handoffs + 2):
                began_s = time.perf_counter()
                must_be_done(await engines.attempt(PAIR, number, rng))
                plain_s = time.perf_counter() - began_s
                began_s = time.perf_counter()
                ((holder,),) = await d.find([chain])
                found_s = time.perf_counter() - began_s
                prefix = chain.prefix(holder.tokens)
                blocks = engines.blocks(layouts[1], rng)
                began_s = time.perf_counter()
                must_be_done(await d.request(f"by-content-{number}", blocks, prefix=prefix))
                if number > 1:  # the first handoffs make the plan and introduce the peers
                    offered.append(time.perf_counter() - began_s)
                    plain.append(plain_s)
                    finding.append(found_s)
            return plain, offered, finding


def _report_held(engines: RunningPairs, chain: PrefixChain) -> None:
    """Have P report that it holds the prompt: all of its blocks, and a snapshot at its end."""
    p, layout = engines.sessions["P", PAIR], engines.layouts[PAIR][0]
    for group, tokens in page_tokens_of(layout).items():
        p.hold(chain.form, group, chain.hashes if tokens else chain.hashes[-1:])
