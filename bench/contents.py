"""A handoff whose content both sides name, beside one of equal size where none does."""

from __future__ import annotations

import statistics
import time

import numpy as np
import uvloop
from killed import small_layout, whole
from restarts import serve
from rows import Yield, compared
from scene import Engines, scene

from restow.broker.client.engine.chains import content_of

KIND = "content"
SAMPLES_A_REPEAT = 40
GOAL = 1 / 1.02


def run(put: Yield, repeats: int) -> None:
    """Prompts of two lengths. Each side names the content while it has other work; told beside."""
    for tokens in (256, 8192):
        uvloop.run(_measure(put, tokens, repeats * SAMPLES_A_REPEAT))


async def _measure(put: Yield, tokens: int, count: int) -> None:
    broker, address = serve("127.0.0.1:0")
    try:
        kinds = {KIND: Engines((small_layout(),) * 2, address, 1)}
        async with scene(f"content{tokens}", kinds, tokens) as made:
            await whole(address)
            rng = np.random.default_rng(0)
            prompt = rng.integers(0, 1 << 17, tokens).tolist()
            naming_s: list[float] = []
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for number in range(20 + 2 * count):
                named, name = bool((number + number // 2) % 2), f"{number}"
                began_s = time.perf_counter()
                content = content_of(prompt, tokens)
                naming_s.append(time.perf_counter() - began_s)
                content = content if named else b""
                began_s = time.perf_counter()
                made.publish(KIND, name, rng, content=content)
                ended = await made.ask(KIND, name, rng, content=content)
                took_s = time.perf_counter() - began_s
                if not ended.done:
                    raise RuntimeError(f"{name}: {ended.reason}: {ended.detail}")
                if number >= 20:  # programs, introductions and costs are known by then
                    seconds[named].append(took_s)
        case = f"a prompt of {tokens} tokens, with its content"
        note = f"naming it takes {statistics.median(naming_s) * 1e3:.2f} ms on either side"
        ours, without = seconds[True], seconds[False]
        put(compared("content", case, ours, "without", without, goal=GOAL, note=note))
    finally:
        broker.kill()
        broker.wait()
