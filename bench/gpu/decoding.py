"""Handoffs into the memory of a D that works: late writes, decoding steps and CUDA graphs.

P and D have a rank each, in processes on one GPU. D's rank computes while its agent reads. Every
part checks the bytes that arrived, and the results of all steps are compared.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvloop

from bench.engine_pairs import EnginePair, RunningPairs, must_be_done, running_pairs
from bench.gpu.device import on_gpu
from bench.gpu.engine_work import KERNELS, REPLAY
from bench.model_sizes import real_models, tiny_hybrid
from bench.processes import running_broker
from bench.report import Put, compared
from bench.transfer.at_once import AUTO, MODEL, PAGE_TOKENS
from bench.transfer.strategies import READ_THREADS, WARM_UPS
from restow.broker.families import EngineSettings, build_layout
from restow.broker.layout import Layout

SUITE = "gpu-decoding"
PLACES, A_SECOND = 4, 20
"""Places at D to which handoffs go in turns, and handoffs a second."""
STEPS = {
    KERNELS: "step of small kernels",
    "thread_local": "step with the capture of a graph (thread_local)",
    REPLAY: "step of a graph",
    "global": "step with the capture of a graph (global)",
}
"""How D decodes. Captures in torch's own mode, global, come last: other threads may break them."""


@dataclass(frozen=True)
class Size:
    """What is handed over, and what D computes meanwhile."""

    layout: Layout
    tokens: int
    late_s: float
    window_s: float
    """Time for which steps are timed, once with handoffs and once without."""
    steps: dict[str, int]


def run(put: Put, repeats: int) -> None:
    """Measure on the first GPU, or rehearse. Raises `RuntimeError` as `on_gpu` does."""
    gpu = on_gpu()
    if gpu:
        layout = build_layout(real_models()[MODEL], EngineSettings(page_tokens=PAGE_TOKENS))
        size = Size(layout, 8192, 0.05, 1.5, {"layers": 64, "width": 4096})
    else:
        size = Size(tiny_hybrid(1), 64, 0.1, 0.3, {"layers": 4, "width": 64})
        print("LEFT OUT: CUDA graphs beside handoffs, which only a GPU can capture")
    uvloop.run(_measure(put, repeats, size, gpu))


async def _measure(put: Put, repeats: int, size: Size, gpu: bool) -> None:
    with running_broker() as broker:
        pairs = {AUTO: EnginePair((size.layout, size.layout), broker.address, READ_THREADS)}
        async with running_pairs(SUITE, pairs, size.tokens, on_gpu=gpu, prompts=PLACES) as engines:
            await engines.check_bytes(AUTO, PLACES)
            busy = BusyEngines(engines, size)
            await busy.write_late(put, repeats)
            for how, words in STEPS.items():
                if gpu or how == KERNELS:
                    await busy.decode(put, repeats, how, words)


@dataclass
class BusyEngines:
    """Engines whose D works while states are handed over to it."""

    engines: RunningPairs
    size: Size
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Numbers of handoffs and of write marks."""

    async def hand_over(self, place: int = 0, mark: int = 0) -> float:
        """Hand the state over to a place; return the seconds from publication to the end."""
        begun_s, rng = time.perf_counter(), np.random.default_rng(0)
        name = f"busy-{next(self.numbers)}"
        must_be_done(await self.engines.attempt_in_place(AUTO, name, place, rng, mark))
        return time.perf_counter() - begun_s

    async def write_late(self, put: Put, repeats: int) -> None:
        """Hand over while D's earlier work is still to write to the same pages."""
        engines, late_s = self.engines, self.size.late_s
        seconds: tuple[list[float], ...] = ([], [], [], [])
        plain, marked, late, apart = seconds
        for _ in range(WARM_UPS):
            await self.hand_over()
        for _ in range(repeats):
            plain.append(await self.hand_over())
            await engines.overwrite(AUTO, 1, mark=(mark := next(self.numbers)))
            marked.append(await self.hand_over(mark=mark))
            begun_s = time.perf_counter()
            await engines.overwrite(AUTO, 1, late_s, wait=True)
            written_s = time.perf_counter()
            await engines.overwrite(AUTO, 1, late_s, mark=(mark := next(self.numbers)))
            await self.hand_over(mark=mark)
            late.append(time.perf_counter() - written_s)
            apart.append(written_s - begun_s + plain[-1])
            await engines.check(AUTO, 1)
        await engines.overwrite(AUTO, 1, late_s)
        await self.hand_over()
        wrong = await engines.wrong_bytes(AUTO, 1)
        name = f"handoff behind a write of {late_s * 1e3:.0f} ms"
        note = f"no byte is wrong; without a write mark {wrong}"
        put(compared(SUITE, name, late, "the write, then a handoff", apart, note=note))
        put(compared(SUITE, "handoff with a write mark", marked, "without", plain))

    async def decode(self, put: Put, repeats: int, how: str, words: str) -> None:
        """Time D's steps beside handoffs and without, in turns."""
        ours: list[dict[str, float]] = []
        alone: list[dict[str, float]] = []
        for _ in range(1 + repeats):
            alone.append(await self.run_steps(how, 0))
            ours.append(await self.run_steps(how, A_SECOND))
            await self.engines.check(AUTO, PLACES)
        del alone[0], ours[0]  # to warm up
        lost_s = statistics.median(
            (1 - one["mean"] / other["mean"]) / A_SECOND
            for one, other in zip(alone, ours, strict=True)
        )
        note = f"all results equal; a handoff costs {lost_s * 1e3:.2f} ms of steps"
        for part in ("p50", "p99"):
            values, others = ([one[part] for one in steps] for steps in (ours, alone))
            put(compared(SUITE, f"{words}: {part}", values, "no handoffs", others, note=note))

    async def run_steps(self, how: str, a_second: int) -> dict[str, float]:
        """Have D decode for a while beside so many handoffs a second; return its times."""
        command = {"steps": how, "seconds": self.size.window_s, **self.size.steps}
        await self.engines.overwrite(AUTO, PLACES, wait=True)
        steps = asyncio.create_task(self.engines.ask("D", AUTO, command))
        under_way = [
            asyncio.create_task(self._hand_over_until(steps, place, PLACES / a_second))
            for place in range(PLACES if a_second else 0)
        ]
        await asyncio.wait([steps, *under_way])
        times: dict[str, float] = steps.result()[0]
        for handing_over in under_way:
            handing_over.result()
        if times["wrong"]:
            raise RuntimeError(f"{how}: {times['wrong']} numbers differ between steps")
        return times

    async def _hand_over_until(
        self, steps: asyncio.Task[list[Any]], place: int, every_s: float
    ) -> None:
        """Hand over to a place, at least once, until D's steps have ended."""
        await asyncio.sleep(place * every_s / PLACES)
        while True:
            spent_s = await self.hand_over(place)
            if steps.done():
                return
            await asyncio.sleep(max(0.0, every_s - spent_s))
