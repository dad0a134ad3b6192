"""The broker is killed under a steady load: how soon all goes on.

Real engines' sessions, real agents and NIXL in a process for each rank, small states; the broker is
killed with -9 and started again at once. Times count from the moment when it listens again.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import uvloop
from restarts import serve
from rows import Yield, compared
from scene import Engines, Scene, scene

from restow.broker.client.admin import AdminClient
from restow.broker.errors import RestowError
from restow.broker.families import (
    AttentionSpec,
    EngineSettings,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Layout

RATE_PER_S = 200
TOKENS = 256
RANKS = 2
BEFORE_S = 3.0
AFTER_S = 6.0
GOAL_S = 3.0
KIND = "load"


@dataclass
class Handoff:
    """When it was asked for, and how it ended."""

    begun_s: float
    ended_s: float = 0.0
    end: str = ""


@dataclass(frozen=True)
class Killed:
    """What one kill did, on one clock."""

    killed_s: float
    back_s: float
    whole_s: float
    handoffs: list[Handoff]
    left: int
    """Handoffs that the broker still knows as live when all of them have ended."""

    def of(self, wanted: Callable[[Handoff], bool]) -> list[Handoff]:
        """Some of the handoffs."""
        return [one for one in self.handoffs if wanted(one)]


def run(put: Yield, repeats: int) -> None:
    """One kill for each repeat."""
    found = [uvloop.run(_killed(number)) for number in range(min(repeats, 5))]
    away = statistics.median(one.back_s - one.killed_s for one in found)
    ends: Counter[str] = Counter(h.end for one in found for h in one.handoffs)
    asked = sum(len(one.handoffs) for one in found)
    at_work = [len(one.of(lambda h, k=one: h.begun_s < k.killed_s < h.ended_s)) for one in found]  # type: ignore[misc]
    others = ", ".join(f"{count} {end}" for end, count in ends.items() if end != "DONE") or "none"
    for name, seconds, note in (
        (
            "directory whole after the broker's return",
            [one.whole_s - one.back_s for one in found],
            f"2 engines, {2 * RANKS} agents; the broker was away for {away:.1f} s",
        ),
        (
            "all asked for before its return are handed over",
            [
                max(h.ended_s for h in one.of(lambda h, k=one: h.begun_s < k.back_s)) - one.back_s  # type: ignore[misc]
                for one in found
            ],
            f"{asked} handoffs at {RATE_PER_S} a second, not DONE: {others}; live when all had "
            f"ended: {sum(one.left for one in found)}; "
            f"{min(at_work)} to {max(at_work)} at work when it was killed",
        ),
        (
            "the slowest asked for after its return",
            [
                max(h.ended_s - h.begun_s for h in one.of(lambda h, k=one: h.begun_s >= k.back_s))  # type: ignore[misc]
                for one in found
            ],
            "from the demand to its end",
        ),
    ):
        reference = f"budget of {GOAL_S:g} s"
        put(compared("killed", name, seconds, reference, [GOAL_S], goal=1.0, note=note))


def small_layout() -> Layout:
    """Of a hybrid model, two ranks, 16 tokens in a page."""
    dtype = DType.BFLOAT16
    layers = (Mamba2Spec(0, 8, 16, 16, 2, 4, dtype, DType.FLOAT32), AttentionSpec(1, 2, 16, dtype))
    return build_layout(ModelSpec("load", layers), EngineSettings(tp=RANKS, page_tokens=16))


async def _killed(number: int) -> Killed:
    broker, address = serve("127.0.0.1:0")
    layout = small_layout()
    try:
        kinds = {KIND: Engines((layout, layout), address, 1)}
        async with scene(f"killed{number}", kinds, TOKENS) as made:
            await whole(address)
            handoffs: list[Handoff] = []
            tasks: set[asyncio.Task[None]] = set()
            load = asyncio.create_task(steady_load(made, handoffs, tasks))
            await asyncio.sleep(BEFORE_S)
            killed_s = time.monotonic()
            broker.kill()
            broker.wait()
            broker, _ = await asyncio.to_thread(serve, address)
            back_s = time.monotonic()
            whole_s = await whole(address)
            await asyncio.sleep(max(0.0, back_s + AFTER_S - time.monotonic()))
            load.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await load
            async with asyncio.timeout(60):
                await asyncio.gather(*tasks)
            with AdminClient(address, timeout_s=5.0) as admin:
                left = (await asyncio.to_thread(admin.status)).handoffs_live
            return Killed(killed_s, back_s, whole_s, handoffs, left)
    finally:
        broker.kill()
        broker.wait()


async def steady_load(made: Scene, handoffs: list[Handoff], tasks: set[asyncio.Task[None]]) -> None:
    """Ask for handoffs at a steady rate, whatever becomes of those before."""
    rng = np.random.default_rng(0)
    began_s = time.monotonic()
    while True:
        one = Handoff(time.monotonic())
        handoffs.append(one)
        task = asyncio.create_task(_hand_over(made, len(handoffs), one, rng))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(began_s + len(handoffs) / RATE_PER_S - time.monotonic())


async def _hand_over(made: Scene, number: int, one: Handoff, rng: np.random.Generator) -> None:
    try:
        ended = await made.asked(KIND, str(number), rng)
        one.end = ended.reason or ended.state
    except RestowError as error:
        one.end = error.reason
    one.ended_s = time.monotonic()


async def whole(address: str, ranks: int = RANKS) -> float:
    """When the broker knows every engine and agent."""
    with AdminClient(address, timeout_s=5.0) as admin:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(RestowError):
                    status = await asyncio.to_thread(admin.status)
                    if (status.engines, status.agents) == (2, 2 * ranks):
                        return time.monotonic()
                await asyncio.sleep(0.02)
