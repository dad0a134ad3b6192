"""A state that is asked for by its content, beside the same one under a router's id, in turns.

P's and D's ranks are processes of their own, with NIXL between them. By content the broker looks up
who holds it, and offers it; P publishes it then. Under an id P publishes as D asks.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping

import numpy as np
import uvloop
from geometry import geometries
from restarts import serve
from rows import Yield, compared
from scene import Engines, Scene, scene

from restow.broker.client import AsyncAdminClient, Offer, PrefixChain, chain_of
from restow.broker.families import EngineSettings, build_layout
from restow.broker.layout import Layout

SUITE = KIND = "offers"
TOKENS = 8192
CASES: Mapping[str, tuple[int, int]] = {"lfm2-like": (1, 1), "nemotron3-nano-30b": (1, 2)}
"""Geometries, with P's and D's TP."""
TURNS = 20
"""Of each, for every repetition that is asked for."""
GOAL_S = 0.0015


def run(put: Yield, repeats: int) -> None:
    """Each geometry with a broker and engines of its own."""
    for name, (p_tp, d_tp) in CASES.items():
        spec = geometries()[name]
        p, d = (build_layout(spec, EngineSettings(tp=tp, page_tokens=16)) for tp in (p_tp, d_tp))
        plain, offered, found = uvloop.run(_measure((p, d), TURNS * max(repeats // 3, 1)))
        case = f"{name}, P{p_tp} to D{d_tp}, 8,192 tokens"
        put(compared(SUITE, f"{case}, by content", offered, "under an id", plain))
        added_s = statistics.median(offered) - statistics.median(plain)
        words = f"{case}, what the offer adds"
        put(compared(SUITE, words, [added_s], "budget of 1.5 ms", [GOAL_S], goal=1.0))
        put(compared(SUITE, f"{case}, Find alone", found, "under an id", plain))


async def _measure(
    layouts: tuple[Layout, Layout], turns: int
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of handoffs under an id, of those by content, and of finding who holds it."""
    broker, address = serve("127.0.0.1:0")
    rng = np.random.default_rng(0)
    chain = chain_of(range(TOKENS + 1))  # a token is left to compute
    scenes: list[Scene] = []

    def give(offer: Offer) -> None:
        scenes[0].give(KIND, offer.handoff_id, rng, offer.content)

    try:
        kinds = {KIND: Engines(layouts, address, 1, on_offer=give)}
        async with scene("offers", kinds, TOKENS) as made:
            scenes.append(made)
            await all_there(address, sum(len(one.ranks) for one in layouts))
            _tell(made, chain)
            while not (await made.sessions["D", KIND].find([chain]))[0]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            plain, offered, found = [], [], []
            for number in range(turns + 2):
                began_s = time.perf_counter()
                ended = await made.asked(KIND, f"{number}", rng)
                if not ended.done:
                    raise RuntimeError(f"{number}: {ended.reason}: {ended.detail}")
                took_s = time.perf_counter() - began_s
                d = made.sessions["D", KIND]
                began_s = time.perf_counter()
                ((holder,),) = await d.find([chain])
                found_s = time.perf_counter() - began_s
                prefix = chain.prefix(holder.tokens)
                blocks = made.blocks(layouts[1], rng)
                began_s = time.perf_counter()
                ended = await d.request(f"by-content-{number}", blocks, prefix=prefix)
                if not ended.done:
                    raise RuntimeError(f"by content {number}: {ended.reason}: {ended.detail}")
                if number > 1:  # the first ones have the plan and the peers
                    offered.append(time.perf_counter() - began_s)
                    plain.append(took_s)
                    found.append(found_s)
            return plain, offered, found
    finally:
        broker.kill()
        broker.wait()


async def all_there(address: str, ranks: int) -> None:
    """Wait until each rank's agent is."""
    async with AsyncAdminClient(address) as client:
        while len(await client.agents()) < ranks:  # noqa: ASYNC110 - the broker tells no events
            await asyncio.sleep(0.1)


def _tell(made: Scene, chain: PrefixChain) -> None:
    """P says that it holds the prompt: all of its blocks, and a snapshot at its end."""
    p, layout = made.sessions["P", KIND], made.layouts[KIND][0]
    for group, tokens in {r.group: r.page_tokens for k in layout.ranks for r in k.regions}.items():
        p.hold(chain.form, group, chain.hashes if tokens else chain.hashes[-1:])
