"""Real models' sizes over real NIXL: every pair of TP sizes that the model allows, byte by byte.

Layers of one kind are alike, so each geometry has two recurrent layers and two of attention, of
their real size; prompts are short. Each pair is tried with every entry of `SIDES`, where page
sizes, orders and stages differ between the two; strategies take turns. With all its layers each
geometry is tried once; with RESTOW_WHOLE_MODELS=1 in all of those ways.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from agent_harness.world import GUARD_BYTES, POISON, RankMemory, blocks
from bench.model_sizes import real_models
from laws.strategies import SENDING
from restow.agents.binding.pages import TokenRange
from restow.agents.copying.copier import Copier
from restow.agents.execute.executor import Executor
from restow.agents.execute.fences import WriteMarks
from restow.agents.execute.orders import (
    ExecuteOrder,
    Peer,
    Source,
    StagedRun,
    StageOrder,
    StagePart,
)
from restow.agents.memory.regions import HOST, region_table
from restow.agents.memory.staging import Staging
from restow.agents.reading.lane import Known, Read
from restow.agents.reading.nixl_transport import NixlTransport
from restow.agents.reading.reader import Reader
from restow.broker.errors import TpSizeError
from restow.broker.families import (
    AttentionSpec,
    BlockScaledMlaSpec,
    ConvLayout,
    EngineSettings,
    KvOrder,
    LayerSpec,
    MatrixOrder,
    MlaSpec,
    ModelSpec,
    ScaleKind,
    Scales,
    build_layout,
)
from restow.broker.layout import DType, Kind, Layout, check_layout
from restow.broker.planner import Program, Strategy, compile_programs, make_plan
from restow.broker.rpc.wire_program import program_from_proto, program_to_proto

pytestmark = pytest.mark.sampled

TP_SIZES = (1, 2, 3, 4, 8)
TOKENS = 37
WINDOW_TOKENS = 18
GRANT_S = 60.0
SIDES = (
    # P's settings, and D's
    (EngineSettings(page_tokens=16), EngineSettings(page_tokens=16)),
    (
        EngineSettings(page_tokens=16, conv_layout=ConvLayout.SD),
        EngineSettings(page_tokens=12, conv_layout=ConvLayout.DS, page_align_bytes=512),
    ),
    (
        EngineSettings(page_tokens=8, conv_layout=ConvLayout.DS, kv_order=KvOrder.NHD, pp=2),
        EngineSettings(page_tokens=32, conv_layout=ConvLayout.SD, conv_rows_extra=2),
    ),
    (
        EngineSettings(page_tokens=16, kv_packed=False, conv_rows_extra=1),
        EngineSettings(page_tokens=20, pp=2, layers_per_stage=(1, 3)),
    ),
    (
        EngineSettings(page_tokens=16, conv_rows_extra=1, cross_layer_blocks=True),
        EngineSettings(page_tokens=16, kv_packed=False, matrix_order=MatrixOrder.KV),
    ),
)
OWN_SCALES = Scales(ScaleKind.PER_TOKEN_HEAD)


def shortened(model: ModelSpec) -> ModelSpec:
    """Return two layers of each kind; windows are shorter than the prompt."""
    kinds: dict[object, list[LayerSpec]] = {}
    for layer in model.layers:
        window = getattr(layer, "window_tokens", 0)
        layer = with_short_window(layer)
        kinds.setdefault((type(layer), window), []).append(layer)
    layers = (layer for alike in kinds.values() for layer in alike[:2])
    return ModelSpec(model.name, tuple(replace(one, layer=i) for i, one in enumerate(layers)))


def with_short_window(layer: LayerSpec) -> LayerSpec:
    """Return the same layer; a window is made shorter than the prompt."""
    if isinstance(layer, AttentionSpec) and layer.window_tokens:
        return replace(layer, window_tokens=WINDOW_TOKENS)
    return layer


def tp_sizes(model: ModelSpec) -> list[int]:
    """Return the TP sizes that the model allows."""
    sizes = []
    for tp in TP_SIZES:
        try:
            check_layout(build_layout(model, EngineSettings(tp)))
        except TpSizeError:
            continue
        sizes.append(tp)
    return sizes


class Part(Staging):
    """Part of a wire's staging, which is registered as a whole."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address, self.size_bytes = address, size_bytes


class Engine:
    """All ranks of an engine in one piece of memory, under one NIXL agent."""

    def __init__(self, name: str, layout: Layout, wire: Wire, side: int) -> None:
        self.layout = layout
        rng = np.random.default_rng(len(name))
        pages = {r.group: r.page_tokens for rank in layout.ranks for r in rank.regions}
        ids = {group: _block_ids(group, tokens, rng) for group, tokens in pages.items()}
        self.blocks = blocks(ids)
        self.memory: dict[int, RankMemory] = {}
        self.executors: dict[int, Executor] = {}
        used, staging = 0, wire.staging[side]
        # P's ranks gather at the same time; one rank of D reads at a time.
        parts = 1 if side else len(layout.ranks)
        part_bytes = staging.nbytes // parts
        for index, rank in enumerate(layout.ranks):
            memory = RankMemory(rank, ids, wire.arenas[side][used:])
            used += memory.size_bytes
            used += -used % GUARD_BYTES
            self.memory[rank.rank] = memory
            part = Part(staging.ctypes.data + index % parts * part_bytes, part_bytes)
            self.executors[rank.rank] = Executor(
                rank.rank, memory.regions, part, part, cast(Reader, wire), wire.copier, WriteMarks()
            )


def _block_ids(group: str, page_tokens: int | None, rng: np.random.Generator) -> tuple[int, ...]:
    """Return scattered ids from 1 on; where a window has left a block behind, the null block 0."""
    if page_tokens is None:
        return (int(rng.integers(2)) + 1,)
    ids = [int(i) + 1 for i in rng.permutation(-(-TOKENS // page_tokens))]
    if group.startswith("window"):
        left = (TOKENS - WINDOW_TOKENS) // page_tokens
        ids[:left] = [0] * left
    return tuple(ids)


class Wire:
    """Two NIXL agents, each over its half of a large piece of memory; and places to stage.

    It reads for all executors: every rank of P is read under the one name.
    """

    def __init__(self, size_bytes: int) -> None:
        self.source, self.destination = NixlTransport("P"), NixlTransport("D")
        self.arenas = [np.empty(size_bytes, np.uint8) for _ in range(2)]
        self.staging = [np.empty(2 * size_bytes, np.uint8) for _ in range(2)]
        self.copier = Copier(HOST.device)
        sides = zip((self.source, self.destination), self.arenas, self.staging, strict=True)
        for transport, *pieces in sides:
            for piece in pieces:
                transport.register(piece.ctypes.data, piece.nbytes, HOST)
        self.destination.prepare(self.source.name, Known(self.source.metadata()))

    def add_peer(self, *_: object) -> None:
        """Do nothing: all ranks of P are known."""

    async def read(self, reads: Sequence[Read], deadline_s: float) -> None:
        for read in reads:
            flight = self.destination.post(replace(read, peer=self.source.name), lambda: None)
            while not self.destination.poll(flight):
                self.source.progress()
            self.destination.release(flight)

    def close(self) -> None:
        self.copier.close()
        self.destination.close()
        self.source.close()


async def hand_over(program: Program, source: Engine, destination: Engine) -> None:
    """Have a rank of D execute its program, when P's ranks have gathered for it."""
    tokens, sources = TokenRange(0, TOKENS), []
    here = destination.executors[program.dst_rank]
    for src_rank in program.src_ranks:
        there, run = source.executors[src_rank], StagedRun(program.dst_rank, 0, 0)
        if src_rank in program.staging_ranks:
            part = program_from_proto(program_to_proto(program, src_rank))
            there.load(part)
            parts = (StagePart(part.program_id, program.dst_rank),)
            (run,) = await there.stage(StageOrder(1, parts, source.blocks, tokens))
        regions = region_table(source.memory[src_rank].regions)
        here.add_peer(Peer(f"P.{src_rank}", src_rank, b"", regions, HOST))
        sources.append(Source(src_rank, f"P.{src_rank}", run.address, run.length_bytes))
    here.load(program_from_proto(program_to_proto(program)))
    both = source.blocks, destination.blocks
    await here.execute(ExecuteOrder(1, program.program_id, *both, tokens, tuple(sources), GRANT_S))
    for src_rank in program.src_ranks:
        source.executors[src_rank].gathering.unstage(1)


def cases(
    model: ModelSpec, layers_per_stage: tuple[int, ...] = (1, 3)
) -> Iterator[tuple[Layout, Layout, Strategy]]:
    sizes = tp_sizes(model)
    snapshots = any(field.kind is Kind.SNAPSHOT for field in model.model().fields)
    strategies = [one for one in SENDING if snapshots or one is not Strategy.INTERLEAVE]
    every = itertools.product(sizes, sizes, SIDES)
    for index, (p_tp, d_tp, sides) in enumerate(every):
        strategy = strategies[(index + index // len(SIDES)) % len(strategies)]
        source, destination = (
            build_layout(
                model,
                replace(side, tp=tp, layers_per_stage=side.layers_per_stage and layers_per_stage),
            )
            for side, tp in zip(sides, (p_tp, d_tp), strict=True)
        )
        yield source, destination, strategy


def size_of(layout: Layout) -> int:
    """Return enough bytes for all ranks, with five pages of each region."""
    return sum(
        (8 if region.page_tokens else 4) * region.page_stride_bytes + 8 * GUARD_BYTES
        for rank in layout.ranks
        for region in rank.regions
    )


@pytest.mark.parametrize("name", real_models())
async def test_every_pair_of_tp_sizes(name: str) -> None:
    model = shortened(real_models()[name])
    every = list(cases(model))
    assert len(every) >= 36
    await check_all(name, model, every)


@pytest.mark.parametrize("name", real_models())
async def test_all_layers_of_a_model(name: str) -> None:
    model = real_models()[name]
    model = replace(model, layers=tuple(map(with_short_window, model.layers)))
    every = list(cases(model, layers_per_stage=(1, model.depth - 1)))
    if "RESTOW_WHOLE_MODELS" not in os.environ:
        every = every[len(every) // 2 + 1 :][:1]
    await check_all(name, model, every)


def quantised(layer: LayerSpec) -> LayerSpec:
    """Return the same layer with its KV in float8, the scales in the cache."""
    match layer:
        case AttentionSpec():
            return replace(layer, dtype=DType.FLOAT8_E4M3FN, scales=OWN_SCALES)
        case MlaSpec():
            return BlockScaledMlaSpec(layer.layer)
    return layer


@pytest.mark.parametrize("name", ["nemotron3-nano-30b", "kimi-linear-48b-like", "gemma-swa-like"])
async def test_float8_with_its_scales(name: str) -> None:
    model = shortened(real_models()[name])
    model = replace(model, layers=tuple(map(quantised, model.layers)))
    every = list(cases(model))[::7]  # every pair of sides and every strategy occurs
    assert any(field.name.endswith("_scale") for field in model.model().fields)
    await check_all(name, model, every)


SHARED_OUT = (
    # P's TP, into how many parts tokens are cut there and by how many; then D's
    ((8, 4, 1), (8, 4, 1)),
    ((8, 4, 4), (2, 1, 1)),
    ((4, 1, 1), (8, 4, 1)),
    ((8, 2, 1), (8, 4, 2)),
    ((8, 4, 2), (4, 2, 4)),
)


@pytest.mark.parametrize("name", ["nemotron3-nano-30b", "kimi-linear-48b-like"])
async def test_tokens_that_ranks_share_out(name: str) -> None:
    """Check each way of cutting the tokens with every two sides; strategies take turns."""
    model = shortened(real_models()[name])
    every: list[tuple[Layout, Layout, Strategy]] = []
    for index, (cuts, sides) in enumerate(itertools.product(SHARED_OUT, SIDES)):
        source, destination = (
            build_layout(model, replace(side, tp=tp, dcp=dcp, interleave_tokens=run))
            for side, (tp, dcp, run) in zip(sides, cuts, strict=True)
        )
        for layout in (source, destination):
            check_layout(layout)
        strategy = SENDING[(index + index // len(SIDES)) % len(SENDING)]
        every.append((source, destination, strategy))
    await check_all(name, model, every)


async def check_all(
    name: str, model: ModelSpec, every: list[tuple[Layout, Layout, Strategy]]
) -> None:
    fields = {field.name: field for field in model.model().fields}
    wire = Wire(max(size_of(layout) for case in every for layout in case[:2]))
    try:
        for source_layout, destination_layout, strategy in every:
            source = Engine("P", source_layout, wire, 0)
            destination = Engine("DD", destination_layout, wire, 1)
            for memory in source.memory.values():
                memory.write(fields, TOKENS)
            plan = make_plan(source_layout, destination_layout)
            for program in compile_programs(plan, strategy):
                await hand_over(program, source, destination)
            case = f"{name}: P{len(source_layout.ranks)} to D{len(destination_layout.ranks)}"
            for rank, memory in destination.memory.items():
                wrong = np.flatnonzero(memory.data != memory.expected(fields, TOKENS))
                assert not len(wrong), f"{case}, {strategy}, rank {rank}: {len(wrong)} wrong bytes"
                assert (memory.data == POISON).any()
    finally:
        wire.close()
