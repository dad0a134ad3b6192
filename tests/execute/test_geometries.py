"""Real models' sizes over real NIXL: every pair of TP sizes that the model allows, byte by byte.

Layers of one kind are alike, so each geometry has two recurrent layers and two of attention, of
their real size; prompts are short. Each pair is tried with every entry of `SIDES`, where page
sizes, orders and stages differ between the two; strategies take turns. With all its layers each
geometry is tried once; with RESTOW_WHOLE_MODELS=1 in all of those ways.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from agent_harness.world import GUARD_BYTES, POISON, Bytes, RankMemory, blocks
from bench.model_sizes import real_models
from laws.strategies import SENDING
from restow.agents.binding.copies import bind_copies
from restow.agents.binding.operands import DST, SRC, by_place, in_order, in_spans, paged
from restow.agents.binding.pages import Blocks, RegionTable, TokenRange, staged_bytes, staged_spans
from restow.agents.binding.reads import Descriptors, Reads, SpanReads
from restow.agents.copying.copier import run_copies, zero_destinations
from restow.agents.memory.regions import HOST
from restow.agents.reading.lane import Known, Read
from restow.agents.reading.nixl_transport import NixlTransport
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
from restow.broker.planner.program import (
    CLEAR_PAGES,
    GATHER_IN_ORDER,
    GATHER_PLACED,
    READ_PAGES,
    READ_SPANS,
    SCATTER_PLACED,
    SCATTER_SPANS,
    Column,
    chunk_bytes,
)

pytestmark = pytest.mark.sampled

TP_SIZES = (1, 2, 3, 4, 8)
TOKENS = 37
WINDOW_TOKENS = 18
CPU = torch.device("cpu")
ZEROES = torch.zeros(64, dtype=torch.uint8)
"""Few, so that rows are zeroed in parts."""
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


class Engine:
    """All ranks of an engine in one piece of memory, under one NIXL agent."""

    def __init__(self, name: str, layout: Layout, data: Bytes, transport: NixlTransport) -> None:
        self.name, self.layout, self.transport = name, layout, transport
        rng = np.random.default_rng(len(name))
        pages = {r.group: r.page_tokens for rank in layout.ranks for r in rank.regions}
        self.ids = {group: _block_ids(group, tokens, rng) for group, tokens in pages.items()}
        self.memory: dict[int, RankMemory] = {}
        used = 0
        for rank in layout.ranks:
            memory = RankMemory(rank, self.ids, data[used:])
            self.memory[rank.rank] = memory
            used += memory.size_bytes
            used += -used % GUARD_BYTES

    @property
    def blocks(self) -> Blocks:
        return blocks(self.ids)

    def regions(self, rank: int) -> RegionTable:
        regions = self.memory[rank].regions
        columns = zip(
            *((r.base_address, r.page_stride_bytes, r.page_count) for r in regions), strict=True
        )
        return RegionTable(*(np.array(column, np.int64) for column in columns))


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
    """Two NIXL agents, each over its half of a large piece of memory; and a place to stage."""

    def __init__(self, size_bytes: int) -> None:
        self.source, self.destination = NixlTransport("P"), NixlTransport("D")
        self.arenas = [np.empty(size_bytes, np.uint8) for _ in range(2)]
        self.staging = [np.empty(size_bytes // 2, np.uint8) for _ in range(2)]
        sides = zip((self.source, self.destination), self.arenas, self.staging, strict=True)
        for transport, *pieces in sides:
            for piece in pieces:
                transport.register(piece.ctypes.data, piece.nbytes, HOST)
        self.destination.prepare(self.source.name, Known(self.source.metadata()))

    def read(self, descriptors: Descriptors) -> None:
        if not len(descriptors.length_bytes):
            return
        flight = self.destination.post(
            Read(self.source.name, descriptors, HOST, HOST), lambda: None
        )
        while not self.destination.poll(flight):
            self.source.progress()
        self.destination.release(flight)

    def close(self) -> None:
        self.destination.close()
        self.source.close()


def execute(program: Program, wire: Wire, source: Engine, destination: Engine) -> None:
    """Run a program as agents do: READ; GATHER, READ, SCATTER; READ spans, copy out of them."""
    tokens, pairs, spans = TokenRange(0, TOKENS), program.group_pairs, program.rows(READ_SPANS)
    here = destination.regions(program.dst_rank)
    staged, size = staged_spans(spans, pairs, tokens, wire.staging[1].ctypes.data)
    for src_rank in program.src_ranks:
        mine = spans[:, Column.SRC_RANK] == src_rank
        there = source.regions(src_rank)
        laid = SpanReads.of(spans, mine, pairs, there)
        wire.read(laid.bind(staged, source.blocks, tokens))
    own = paged(here, DST, destination.blocks)
    if size:
        taken = program.rows(SCATTER_SPANS)
        run_copies(bind_copies(taken, pairs, in_spans(staged), own, tokens), CPU)
    run = in_order(program.rows(CLEAR_PAGES), pairs, tokens, 0)
    zero_destinations(bind_copies(program.rows(CLEAR_PAGES), pairs, run, own, tokens), ZEROES)
    for src_rank in program.src_ranks:
        there = source.regions(src_rank)
        rows = program.rows(READ_PAGES, src_rank)
        direct = Reads.of(rows, pairs, there, here)
        wire.read(direct.bind(source.blocks, destination.blocks, tokens))
        interleaved, rows, restored = (
            program.rows(form, src_rank)
            for form in (GATHER_PLACED, GATHER_IN_ORDER, SCATTER_PLACED)
        )
        chunk = chunk_bytes(restored)
        size = chunk + staged_bytes(rows, pairs, tokens)
        if size == 0:
            continue
        runs = [piece.ctypes.data for piece in wire.staging]
        behind = [in_order(rows, pairs, tokens, run + chunk) for run in runs]
        pages = paged(there, SRC, source.blocks)
        run_copies(bind_copies(interleaved, pairs, pages, by_place(runs[0], DST), tokens), CPU)
        run_copies(bind_copies(rows, pairs, pages, behind[0], tokens), CPU)
        wire.read(Descriptors(*(np.array([value], np.int64) for value in (*runs, size))))
        run_copies(bind_copies(restored, pairs, by_place(runs[1], SRC), own, tokens), CPU)
        run_copies(bind_copies(rows, pairs, behind[1], own, tokens), CPU)


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
def test_every_pair_of_tp_sizes(name: str) -> None:
    model = shortened(real_models()[name])
    every = list(cases(model))
    assert len(every) >= 36
    check_all(name, model, every)


@pytest.mark.parametrize("name", real_models())
def test_all_layers_of_a_model(name: str) -> None:
    model = real_models()[name]
    model = replace(model, layers=tuple(map(with_short_window, model.layers)))
    every = list(cases(model, layers_per_stage=(1, model.depth - 1)))
    if "RESTOW_WHOLE_MODELS" not in os.environ:
        every = every[len(every) // 2 + 1 :][:1]
    check_all(name, model, every)


def quantised(layer: LayerSpec) -> LayerSpec:
    """Return the same layer with its KV in float8, the scales in the cache."""
    match layer:
        case AttentionSpec():
            return replace(layer, dtype=DType.FLOAT8_E4M3FN, scales=OWN_SCALES)
        case MlaSpec():
            return BlockScaledMlaSpec(layer.layer)
    return layer


@pytest.mark.parametrize("name", ["nemotron3-nano-30b", "kimi-linear-48b-like", "gemma-swa-like"])
def test_float8_with_its_scales(name: str) -> None:
    model = shortened(real_models()[name])
    model = replace(model, layers=tuple(map(quantised, model.layers)))
    every = list(cases(model))[::7]  # every pair of sides and every strategy occurs
    assert any(field.name.endswith("_scale") for field in model.model().fields)
    check_all(name, model, every)


SHARED_OUT = (
    # P's TP, into how many parts tokens are cut there and by how many; then D's
    ((8, 4, 1), (8, 4, 1)),
    ((8, 4, 4), (2, 1, 1)),
    ((4, 1, 1), (8, 4, 1)),
    ((8, 2, 1), (8, 4, 2)),
    ((8, 4, 2), (4, 2, 4)),
)


@pytest.mark.parametrize("name", ["nemotron3-nano-30b", "kimi-linear-48b-like"])
def test_tokens_that_ranks_share_out(name: str) -> None:
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
    check_all(name, model, every)


def check_all(name: str, model: ModelSpec, every: list[tuple[Layout, Layout, Strategy]]) -> None:
    fields = {field.name: field for field in model.model().fields}
    wire = Wire(max(size_of(layout) for case in every for layout in case[:2]))
    try:
        for source_layout, destination_layout, strategy in every:
            source = Engine("P", source_layout, wire.arenas[0], wire.source)
            destination = Engine("DD", destination_layout, wire.arenas[1], wire.destination)
            for memory in source.memory.values():
                memory.write(fields, TOKENS)
            plan = make_plan(source_layout, destination_layout)
            for program in compile_programs(plan, strategy):
                execute(program, wire, source, destination)
            case = f"{name}: P{len(source_layout.ranks)} to D{len(destination_layout.ranks)}"
            for rank, memory in destination.memory.items():
                wrong = np.flatnonzero(memory.data != memory.expected(fields, TOKENS))
                assert not len(wrong), f"{case}, {strategy}, rank {rank}: {len(wrong)} wrong bytes"
                assert (memory.data == POISON).any()
    finally:
        wire.close()
