"""Handing states over to a store: a few at a time, until it has each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from restow.broker.client.engine.prefixes.chains import Holders, Prefix, PrefixChain
from restow.broker.errors import RestowError

AT_ONCE = 4
LOOK_EVERY_S = 0.05
PATIENCE_S = 3.0
"""After which states that nobody has taken are given up: there is no store, or no room in it."""


async def hand_over(
    prefixes: Sequence[Prefix],
    engine_id: str,
    keep: Callable[[Prefix], None],
    find: Callable[[Sequence[PrefixChain]], Awaitable[Holders]],
) -> int:
    """Have others hold ``prefixes``, which ``engine_id`` holds; return how many are held then.

    They go in their order. Where none of some at once is taken in time, the rest is not tried.
    """
    taken = 0
    for first in range(0, len(prefixes), AT_ONCE):
        some = prefixes[first : first + AT_ONCE]
        for one in some:
            keep(one)
        held = await _await_held(some, engine_id, find)
        if not held:
            return taken
        taken += held
    return taken


async def _await_held(
    prefixes: Sequence[Prefix],
    engine_id: str,
    find: Callable[[Sequence[PrefixChain]], Awaitable[Holders]],
) -> int:
    """How many of them others hold after a while."""
    chains = [one.chain for one in prefixes]
    end_s = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        try:
            found = await find(chains)
        except RestowError:
            found = [[] for _ in chains]
        held = sum(
            any(one.engine_id != engine_id and one.tokens == prefix.position_tokens for one in some)
            for prefix, some in zip(prefixes, found, strict=True)
        )
        if held == len(prefixes) or asyncio.get_running_loop().time() > end_s:
            return held
        await asyncio.sleep(LOOK_EVERY_S)
