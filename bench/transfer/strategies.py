"""Whether `auto` chooses the fastest strategy: all are forced in turn and measured beside it.

Three suites: ``pieces`` has pages of one size over shared memory and TCP, ``models`` real models'
sizes, ``gpu-strategies`` both of these between two processes' memory on one GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import uvloop

from bench.engine_pairs import EnginePair, contiguous, running_pairs
from bench.gpu.device import on_gpu
from bench.model_sizes import real_models, tiny_hybrid
from bench.processes import running_broker
from bench.report import Put, Row, compared
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
SENDING = tuple(strategy for strategy in Strategy if strategy is not Strategy.RECOMPUTE)
"""All but `recompute`, which needs inputs that none of these layouts offers."""
LEAST = 1 / 1.10
"""Goal of `auto`: its speed beside that of the best forced strategy."""
CLOSE = 1.03
"""A ratio below this times its goal is measured again in a further set of processes."""
PIECES_BYTES = 24 << 20
PIECE_GOALS = {256: 6.0, 1024: 2.5}
"""How much faster `pack` is to be than `slices` over shared memory, by the size of a piece."""
PIECES = {
    256: (16, 4),
    1024: (16, 16),
    4096: (64, 16),
    16_384: (64, 64),
    65_536: (128, 128),
    262_144: (128, 512),
    1_048_576: (256, 1024),
}
"""By the bytes of a page: the width of a head, and the tokens of a page."""
BY_NIXL = "by NIXL"
"""Agents leave every read to NIXL."""
MEMORY = "shared memory"
CONTIGUOUS = "contiguous"
TRANSPORTS = {MEMORY: {}, f"{MEMORY} {BY_NIXL}": {}, "TCP": {"UCX_TLS": "tcp,self"}}
PAIRS = ((1, 1), (2, 4), (4, 2))
PAGES = (16, 64)
MOST_BYTES = 160 << 20


@dataclass(frozen=True)
class Case:
    """A pair of layouts, how they are measured, and what is wanted.

    ``read_goal`` is a share of a contiguous READ's speed, ``pack_goal`` of the speed of `slices`.
    With ``by_nixl`` agents that leave every read to NIXL are measured too, with ``mapped`` on a GPU
    those that map each other's memory. If it is ``checked``, every strategy hands over known bytes
    at the end.
    """

    name: str
    plan: Plan
    tokens: int
    environment: dict[str, str] = field(default_factory=dict)
    read_goal: float | None = None
    pack_goal: float | None = None
    read_threads: int = READ_THREADS
    host_reads: bool | None = None
    by_nixl: bool = False
    mapped: bool = False
    on_gpu: bool = False
    checked: bool = False


def pieces() -> Iterator[Case]:
    """Yield cases of pages of one size, scattered at random, from one rank to another."""
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
            # One thread reads, because every agent learns anew whether a second thread helps.
            host_reads = False if transport.endswith(BY_NIXL) else None
            yield Case(name, plan, tokens, environment, None, goal, 1, host_reads)


def models() -> Iterator[Case]:
    """Yield cases of every model: equal and unequal TP, SD to DS, pages of 16 and 64 tokens."""
    for name, spec in real_models().items():
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
                short = page_tokens == min(PAGES)
                yield Case(words, plan, tokens, read_goal=goal, by_nixl=True, mapped=short)


def gpu() -> Iterator[Case]:
    """Yield pieces and models in the memory of one GPU; they have no goals yet.

    Models with short pages come again with agents that map each other's memory.
    """
    cases = [
        replace(case, read_goal=None, pack_goal=None, by_nixl=False, on_gpu=True, checked=True)
        for case in (*pieces(), *models())
        if not case.environment and case.host_reads is None
    ]
    yield from cases
    for case in cases:
        if case.mapped:
            environment = {"RESTOW_DEVICE_READS": "1"}
            yield replace(case, name=f"{case.name}, mapped", environment=environment)


def selected(cases: Iterator[Case], words: Sequence[str]) -> Iterator[Case]:
    """Select the cases whose name contains any of ``words``; without words, all of them."""
    return (case for case in cases if not words or any(word in case.name for word in words))


def run_pieces(put: Put, repeats: int, words: Sequence[str] = (), sets: int = 1) -> None:
    """Measure pieces of one size."""
    _run("pieces", selected(pieces(), words), put, repeats, sets)


def run_models(put: Put, repeats: int, words: Sequence[str] = (), sets: int = 1) -> None:
    """Measure real models' sizes."""
    _run("models", selected(models(), words), put, repeats, sets)


def run_gpu(put: Put, repeats: int, words: Sequence[str] = (), sets: int = 1) -> None:
    """Measure pieces and models in a GPU's memory, or rehearse with other layouts.

    Raises `RuntimeError` as `on_gpu` does.
    """
    if on_gpu():
        _run("gpu-strategies", selected(gpu(), words), put, repeats, sets)
    else:
        tiny = Case("tiny, P1 to D2", make_plan(tiny_hybrid(1), tiny_hybrid(2)), 64, checked=True)
        _run("gpu-strategies", iter([tiny]), put, repeats, sets)


def _run(suite: str, cases: Iterator[Case], put: Put, repeats: int, sets: int) -> None:
    # A broker keeps costs by pair of hosts, so cases that read in another way get other brokers.
    for _, alike in groupby(cases, lambda case: (case.environment, case.host_reads)):
        taken: dict[str, dict[str, list[float]]] = {}
        undecided = list(alike)
        with _brokers() as brokers:
            # All cases are measured before those near a goal are measured again: two sets of a case
            # are minutes apart, so that other work of the machine does not disturb both.
            for number in range(sets):
                now, undecided = undecided, []
                for index, case in enumerate(now):
                    measured = _measure(case, f"{index}.{number}", brokers, repeats)
                    seconds_of_pairs, chosen = uvloop.run(measured)
                    so_far = taken.setdefault(case.name, defaultdict(list))
                    for pair, seconds in seconds_of_pairs.items():
                        so_far[pair] += seconds
                    rows = list(_rows(suite, case, so_far, " and ".join(chosen)))
                    for row in rows:
                        put(row)
                    if any(_close(row) for row in rows):
                        undecided.append(case)


@contextmanager
def _brokers() -> Iterator[dict[str, str]]:
    """Run a broker for each strategy, and another for agents that read by NIXL; yield addresses."""
    with ExitStack() as stack:
        strategies = {strategy.value: strategy.value for strategy in SENDING} | {
            BY_NIXL: Strategy.AUTO.value
        }
        yield {
            name: stack.enter_context(running_broker("--strategy", strategy)).address
            for name, strategy in strategies.items()
        }


def _close(row: Row) -> bool:
    """Return whether a goal is missed, or reached so narrowly that other processes may miss it."""
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
    """Return the seconds of every pair, and the strategies that `auto` chose."""
    plan, layouts = case.plan, (case.plan.source, case.plan.destination)
    pairs = {
        strategy.value: EnginePair(
            layouts, brokers[strategy.value], case.read_threads, case.host_reads
        )
        for strategy in SENDING
        if _serves(plan, strategy)
    }
    if case.by_nixl:
        pairs[BY_NIXL] = EnginePair(layouts, brokers[BY_NIXL], case.read_threads, host_reads=False)
    runs = contiguous(plan, case.tokens)
    pairs[CONTIGUOUS] = EnginePair(runs, brokers[Strategy.SLICES.value], 1)
    taken: dict[str, list[float]] = {pair: [] for pair in pairs}
    rng = np.random.default_rng(0)
    async with running_pairs(
        name, pairs, case.tokens, environment=case.environment, on_gpu=case.on_gpu
    ) as engines:
        for warm_up in range(WARM_UPS):
            for pair in pairs:
                await engines.hand_over(pair, f"warm-{warm_up}", rng)
        for repeat in range(repeats):
            # In another order each time: in a fixed order the caches would favour some pairs.
            for pair in rng.permutation(list(pairs)).tolist():
                taken[pair].append(await engines.hand_over(pair, repeat, rng))
        chosen = await engines.strategies(Strategy.AUTO.value, repeats - 1)
        for pair in pairs if case.checked else ():
            await engines.check_bytes(pair)
    return taken, chosen


def _rows(suite: str, case: Case, taken: Mapping[str, list[float]], chosen: str) -> Iterator[Row]:
    size_bytes = case.plan.bytes_at(case.tokens)
    auto = taken[Strategy.AUTO.value]
    for pair, seconds in taken.items():
        if pair == Strategy.AUTO.value:
            continue
        contiguous_read = pair == CONTIGUOUS
        yield compared(
            suite,
            case.name,
            auto,
            "contiguous READ" if contiguous_read else pair,
            seconds,
            goal=case.read_goal if contiguous_read else LEAST,
            size_bytes=size_bytes,
            note=chosen,
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
