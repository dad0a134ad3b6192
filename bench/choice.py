"""Does `auto` choose well? Each way of travelling is forced in turn and measured beside it.

First pieces of one size, over shared memory and over TCP; then real models' sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch
import uvloop
from control import BROKER, listening
from geometry import geometries
from rows import Row, Yield, compared
from scene import Engines, contiguous, scene

from restow.agents.link.settings import AgentSettings
from restow.broker.errors import StrategyRefusedError, TooManyPiecesError
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType
from restow.broker.planner import Plan, Strategy, compile_programs, make_plan

READ_THREADS = AgentSettings().read_threads
WARM_UPS = 3
SENDING = tuple(one for one in Strategy if one is not Strategy.RECOMPUTE)
"""None of these layouts offers what windows could be rebuilt from."""
LEAST = 1 / 1.10
"""Of the best forced way's speed."""
CLOSE = 1.03
PIECES_BYTES = 24 << 20
PIECE_GOALS = {256: 6.0, 1024: 2.5}
"""By which `pack` is faster than `slices`, over shared memory."""
PIECES = {
    256: (16, 4),
    1024: (16, 16),
    4096: (64, 16),
    16_384: (64, 64),
    65_536: (128, 128),
    262_144: (128, 512),
    1_048_576: (256, 1024),
}
"""Bytes of a piece, which is a page: the width of a head, tokens of a page."""
BY_NIXL = "by NIXL"
"""Where agents do not read other processes themselves."""
MEMORY = "shared memory"
CONTIGUOUS = "contiguous"
TRANSPORTS = {MEMORY: {}, f"{MEMORY} {BY_NIXL}": {}, "TCP": {"UCX_TLS": "tcp,self"}}
PAIRS = ((1, 1), (2, 4), (4, 2))
PAGES = (16, 64)
MOST_BYTES = 160 << 20


@dataclass(frozen=True)
class Case:
    """A pair of layouts, and what is wanted of it."""

    name: str
    plan: Plan
    tokens: int
    environment: dict[str, str] = field(default_factory=dict)
    read_goal: float | None = None
    """Of a contiguous READ's speed."""
    pack_goal: float | None = None
    """Of the speed of `slices`."""
    read_threads: int = READ_THREADS
    host_reads: bool | None = None
    by_nixl: bool = False
    """Whether it is measured beside agents that read all by NIXL."""
    on_gpu: bool = False


def pieces() -> Iterator[Case]:
    """Pages of one size, scattered at random, from one rank to another."""
    for transport, environment in TRANSPORTS.items():
        for piece_bytes, (head_dim, page_tokens) in PIECES.items():
            tokens = max(2048, 2 * page_tokens)
            layers = max(1, PIECES_BYTES // (piece_bytes * tokens // page_tokens))
            dtype = DType.BFLOAT16
            specs = tuple(AttentionSpec(i, 1, head_dim, dtype) for i in range(layers))
            layout = build_layout(
                ModelSpec("pieces", specs), EngineSettings(page_tokens=page_tokens)
            )
            goal = PIECE_GOALS.get(piece_bytes) if not environment else None
            name = f"pieces of {piece_bytes} bytes, {transport}"
            plan = make_plan(layout, layout)
            # One thread: whether a second one helps is learned anew by every agent.
            host_reads = False if transport.endswith(BY_NIXL) else None
            yield Case(name, plan, tokens, environment, None, goal, 1, host_reads)


def models() -> Iterator[Case]:
    """Every geometry, equal and unequal TP, SD to DS, pages of 16 and 64 tokens."""
    for name, spec in geometries().items():
        for p_tp, d_tp in PAIRS:
            for page_tokens in PAGES:
                convs = (ConvLayout.SD, ConvLayout.SD if p_tp == d_tp else ConvLayout.DS)
                layouts = [
                    build_layout(
                        spec, EngineSettings(tp=tp, page_tokens=page_tokens, conv_layout=conv)
                    )
                    for tp, conv in zip((p_tp, d_tp), convs, strict=True)
                ]
                plan, tokens = make_plan(*layouts), 8192
                while plan.bytes_at(tokens) > MOST_BYTES and tokens > 1024:
                    tokens //= 2
                goal = {16: 0.50, 64: 0.90 if p_tp == d_tp else 0.75}[page_tokens]
                words = f"{name}, P{p_tp} to D{d_tp}, pages of {page_tokens}, {tokens} tokens"
                yield Case(words, plan, tokens, read_goal=goal, by_nixl=True)


def gpu() -> Iterator[Case]:
    """Pieces, and real models, between two processes' memory on one GPU: no goals yet."""
    for case in (*pieces(), *models()):
        if not case.environment and case.host_reads is None:
            yield replace(case, read_goal=None, pack_goal=None, by_nixl=False, on_gpu=True)


def named(cases: Iterator[Case], words: Sequence[str]) -> Iterator[Case]:
    """Those whose name has any of ``words`` in it; all if there are none."""
    return (case for case in cases if not words or any(one in case.name for one in words))


def run_pieces(put: Yield, repeats: int, words: Sequence[str] = (), sets: int = 1) -> None:
    """Pieces of one size."""
    _run("pieces", named(pieces(), words), put, repeats, sets)


def run_models(put: Yield, repeats: int, words: Sequence[str] = (), sets: int = 1) -> None:
    """Real models' sizes."""
    _run("models", named(models(), words), put, repeats, sets)


def run_gpu(put: Yield, repeats: int, words: Sequence[str] = (), sets: int = 1) -> None:
    """Pieces and real models' sizes in a GPU's memory. Raises `RuntimeError` without one."""
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU here, so there is no memory of one to measure")
    print(f"GPU: {torch.cuda.get_device_name()}, torch {torch.__version__}")
    _run("gpu", named(gpu(), words), put, repeats, sets)


def _run(suite: str, cases: Iterator[Case], put: Yield, repeats: int, sets: int) -> None:
    # Costs are kept for each pair of hosts: how they are read must not change under a broker.
    for _, alike in groupby(cases, lambda case: (case.environment, case.host_reads)):
        taken: dict[str, dict[str, list[float]]] = {}
        undecided = list(alike)
        with _brokers() as brokers:
            # All cases, then those that are close again: two sets of one case are minutes apart,
            # so that what else the machine does for a while does not meet both.
            for number in range(sets):
                now, undecided = undecided, []
                for index, case in enumerate(now):
                    measured = _measure(case, f"{index}.{number}", brokers, repeats)
                    found, went = uvloop.run(measured)
                    so_far = taken.setdefault(case.name, defaultdict(list))
                    for kind, seconds in found.items():
                        so_far[kind] += seconds
                    rows = list(_rows(suite, case, so_far, " and ".join(went)))
                    for row in rows:
                        put(row)
                    if any(_close(row) for row in rows):
                        undecided.append(case)


@contextmanager
def _brokers() -> Iterator[dict[str, str]]:
    """A broker for each strategy, and one whose agents read by NIXL."""
    with ExitStack() as stack:
        strategies = {one.value: one.value for one in SENDING} | {BY_NIXL: Strategy.AUTO.value}
        yield {
            name: stack.enter_context(listening([*BROKER, "--strategy", strategy]))
            for name, strategy in strategies.items()
        }


def _close(row: Row) -> bool:
    """Whether a goal is missed, or reached so barely that other processes might miss it."""
    return row.goal is not None and row.ratio < CLOSE * row.goal


def _serves(plan: Plan, strategy: Strategy) -> bool:
    try:
        compile_programs(plan, strategy)
    except (StrategyRefusedError, TooManyPiecesError):
        return False
    return True


async def _measure(
    case: Case, name: str, brokers: dict[str, str], repeats: int
) -> tuple[dict[str, list[float]], list[str]]:
    """Seconds of every kind, and in which ways `auto` went."""
    plan, layouts = case.plan, (case.plan.source, case.plan.destination)
    kinds = {
        strategy.value: Engines(
            layouts, brokers[strategy.value], case.read_threads, case.host_reads
        )
        for strategy in SENDING
        if _serves(plan, strategy)
    }
    if case.by_nixl:
        kinds[BY_NIXL] = Engines(layouts, brokers[BY_NIXL], case.read_threads, host_reads=False)
    runs = contiguous(plan, case.tokens)
    kinds[CONTIGUOUS] = Engines(runs, brokers[Strategy.SLICES.value], 1)
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    rng = np.random.default_rng(0)
    async with scene(
        name, kinds, case.tokens, environment=case.environment, on_gpu=case.on_gpu
    ) as made:
        for warm_up in range(WARM_UPS):
            for kind in kinds:
                await made.hand_over(kind, f"warm-{warm_up}", rng)
        for repeat in range(repeats):
            # What the last one left in the caches must not favour the same one every time.
            for kind in rng.permutation(list(kinds)).tolist():
                taken[kind].append(await made.hand_over(kind, f"{repeat}", rng))
        went = await made.strategies(Strategy.AUTO.value, f"{repeats - 1}")
    return taken, went


def _rows(suite: str, case: Case, taken: Mapping[str, list[float]], went: str) -> Iterator[Row]:
    size_bytes = case.plan.bytes_at(case.tokens)
    auto = taken[Strategy.AUTO.value]
    for kind, seconds in taken.items():
        if kind == Strategy.AUTO.value:
            continue
        contiguous_read = kind == CONTIGUOUS
        yield compared(
            suite,
            case.name,
            auto,
            "contiguous READ" if contiguous_read else kind,
            seconds,
            goal=case.read_goal if contiguous_read else LEAST,
            size_bytes=size_bytes,
            note=went,
        )
    if case.pack_goal is not None:
        yield compared(
            suite,
            f"{case.name}: pack",
            taken[Strategy.PACK.value],
            Strategy.SLICES.value,
            taken[Strategy.SLICES.value],
            goal=case.pack_goal,
            size_bytes=size_bytes,
        )
