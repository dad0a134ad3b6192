"""Several handoffs at once, beside as many contiguous READs of the same bytes at once.

From the first publication to the last end, so that the broker and the agents' loops count too. The
note has the bytes a second of one handoff alone. ``at-once`` is measured in host memory,
``gpu-at-once`` in a GPU's, where the bytes of most handoffs at once are checked at the end.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np
import uvloop

from bench.engine_pairs import EnginePair, RunningPairs, contiguous, must_be_done, running_pairs
from bench.gpu.device import on_gpu
from bench.model_sizes import real_models, tiny_hybrid
from bench.processes import running_broker
from bench.report import Put, compared
from bench.transfer.strategies import CONTIGUOUS, WARM_UPS
from restow.broker.families import ConvLayout, EngineSettings, build_layout
from restow.broker.layout import Layout
from restow.broker.planner import Strategy, make_plan

MODEL, TOKENS, PAGE_TOKENS = "nemotron3-nano-30b", 1024, 64
RANKS = ((1, 1), (2, 4))
AUTO = Strategy.AUTO.value
ON_HOST, ON_GPU = (1, 8, 32), (1, 8, 64)
REHEARSED, REHEARSED_TOKENS = (1, 4), 64
GPU_SUITE = "gpu-at-once"


def run(put: Put, repeats: int) -> None:
    """Measure in host memory."""
    for p_tp, d_tp in RANKS:
        uvloop.run(_measure(put, repeats, _layouts(p_tp, d_tp), TOKENS, ON_HOST, "at-once"))


def run_gpu(put: Put, repeats: int) -> None:
    """Measure in a GPU's memory, or rehearse. Raises `RuntimeError` as `on_gpu` does."""
    if not on_gpu():
        tiny = tiny_hybrid(1), tiny_hybrid(2)
        uvloop.run(_measure(put, repeats, tiny, REHEARSED_TOKENS, REHEARSED, GPU_SUITE, False))
        return
    for p_tp, d_tp in RANKS:
        layouts = _layouts(p_tp, d_tp)
        uvloop.run(_measure(put, repeats, layouts, TOKENS, ON_GPU, GPU_SUITE, True))


def _layouts(p_tp: int, d_tp: int) -> tuple[Layout, Layout]:
    convs = ConvLayout.SD, ConvLayout.SD if p_tp == d_tp else ConvLayout.DS
    source, target = (
        build_layout(
            real_models()[MODEL], EngineSettings(tp=tp, page_tokens=PAGE_TOKENS, conv_layout=conv)
        )
        for tp, conv in zip((p_tp, d_tp), convs, strict=True)
    )
    return source, target


async def _measure(
    put: Put,
    repeats: int,
    layouts: tuple[Layout, Layout],
    tokens: int,
    counts: tuple[int, ...],
    suite: str,
    gpu: bool = False,
) -> None:
    plan = make_plan(*layouts)
    size_bytes = plan.bytes_at(tokens)
    with running_broker() as broker, running_broker("--strategy", "slices") as plain:
        pairs = {
            AUTO: EnginePair((plan.source, plan.destination), broker.address, 1),
            CONTIGUOUS: EnginePair(contiguous(plan, tokens), plain.address, 1),
        }
        prompts = max(counts)
        async with running_pairs(suite, pairs, tokens, on_gpu=gpu, prompts=prompts) as engines:
            alone_s = 0.0
            for count in counts:
                taken: dict[str, list[float]] = {pair: [] for pair in pairs}
                for repeat in range(-WARM_UPS, repeats):
                    for pair in pairs:
                        seconds = await at_once(engines, pair, f"{count}/{repeat}", count)
                        if repeat >= 0:
                            taken[pair].append(seconds)
                alone_s = alone_s or float(np.median(taken[AUTO]))
                ranks = "P{} to D{}".format(*(len(layout.ranks) for layout in layouts))
                words = f"{plan.source.model.name}, {ranks}, {count} at once"
                put(
                    compared(
                        suite,
                        words,
                        taken[AUTO],
                        "contiguous READ",
                        taken[CONTIGUOUS],
                        size_bytes=count * size_bytes,
                        note=f"one alone: {size_bytes / alone_s / 1e9:.2f} GB/s",
                    )
                )
            if suite == GPU_SUITE:
                await engines.check_bytes(AUTO, prompts)


async def at_once(engines: RunningPairs, pair: str, name: str, count: int) -> float:
    """Hand over ``count`` states to places of their own at D; return the seconds until all end."""
    rng = np.random.default_rng(count)
    began_s = time.perf_counter()
    ends = await asyncio.gather(
        *(engines.attempt_in_place(pair, f"{name}/{place}", place, rng) for place in range(count))
    )
    for end in ends:
        must_be_done(end)
    return time.perf_counter() - began_s
