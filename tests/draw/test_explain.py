"""The model of what `restow plan` shows, against programs and bindings."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from laws.checks import needed_bytes
from laws.executor import Arena
from laws.strategies import STRATEGIES, Case, any_cases
from laws.transfers import served, transfer
from laws.world import Engine
from restow.agents.binding.pages import TokenRange
from restow.broker.draw.explain import explain
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    IndexerSpec,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Span
from restow.broker.layout.difference import joined_name
from restow.broker.planner import Strategy, make_plan
from restow.broker.planner.compile import Cost

BF16, F32 = DType.BFLOAT16, DType.FLOAT32
MAMBA = Mamba2Spec(0, 64, 64, 128, 1, 4, BF16, F32)
LAYERS = tuple(
    AttentionSpec(i, 4, 64, BF16) if i % 4 == 3 else replace(MAMBA, layer=i) for i in range(12)
)
MODEL = ModelSpec("m", LAYERS)


@settings(max_examples=60, derandomize=True)
@given(any_cases(), STRATEGIES)
def test_costs_are_those_of_the_transfer(case: Case, strategy: Strategy) -> None:
    """Check bytes and launches exactly, and reads up to those that neighbouring pages save.

    Spans are read with all that lies in them; everything else not a byte more than is needed.
    """
    source, destination = case.layouts
    plan = make_plan(source, destination)
    strategy, count = served(plan, strategy), case.tokens.stop
    ranks = explain(plan, strategy, count)
    assert {r.dst_rank: r.bytes_at_tokens for r in ranks} == needed_bytes(
        destination, TokenRange(0, count)
    )
    assert sum(rank.bytes for rank in ranks) == plan.bytes
    for rank in ranks:
        assert rank.cost == rank.cost_by_strategy[strategy]
        if strategy in (Strategy.SLICES, Strategy.PACK):
            assert rank.cost.bytes == rank.bytes_at_tokens
        assert sum(rank.bytes_from.values()) == rank.bytes == sum(f.bytes for f in rank.fields)
    arena = Arena()
    engines = [Engine(arena, layout, count, case.rng, 64) for layout in case.layouts]
    traffic = transfer(engines[0], engines[1], TokenRange(0, count), strategy)
    if strategy in (Strategy.SLICES, Strategy.WHOLE):  # a packed run has gaps besides
        assert traffic.wire_bytes == sum(rank.cost.bytes for rank in ranks)
    assert traffic.launches == sum(rank.cost.launches for rank in ranks)
    assert traffic.reads <= sum(rank.cost.reads for rank in ranks)


def test_keys_and_scales_of_one_page_are_read_apart() -> None:
    # Rows of unequal length follow each other in a page, and agents do not join them.
    layout = build_layout(ModelSpec("m", (IndexerSpec(0, 8, 8),)), EngineSettings(page_tokens=4))
    (rank,) = explain(make_plan(layout, layout), Strategy.SLICES, 8)
    arena = Arena()
    engines = [Engine(arena, layout, 8, random.Random(1), 64) for _ in range(2)]  # noqa: S311
    traffic = transfer(engines[0], engines[1], TokenRange(0, 8), Strategy.SLICES)
    assert traffic.reads == rank.cost.reads == 4


def test_equal_layers_share_a_line() -> None:
    source = build_layout(MODEL, EngineSettings(tp=4))
    destination = build_layout(MODEL, EngineSettings(tp=2, conv_layout=ConvLayout.DS))
    first, second = explain(make_plan(source, destination))
    assert [(line.name, len(line.fields)) for line in second.fields] == [
        ("layers.{0,1,2..}.conv.x", 9),
        ("layers.{0,1,2..}.conv.B", 9),
        ("layers.{0,1,2..}.conv.C", 9),
        ("layers.{0,1,2..}.ssm", 9),
        ("layers.{3,7,11}.k", 3),
        ("layers.{3,7,11}.v", 3),
    ]
    conv_x, conv_b, _, ssm, k, _ = second.fields
    assert [part.src_rank for part in conv_x.parts] == [2, 3]
    assert conv_x.parts[0].box == (Span(2048, 3072), Span(0, 3))
    assert (conv_x.parts[0].pieces, conv_x.parts[0].piece_bytes) == (3072, 2)
    (part,) = conv_b.parts
    assert (part.src_rank, part.replicas) == (2, (0, 1, 2, 3))
    assert [(p.pieces, p.piece_bytes) for p in ssm.parts] == [(1, 16 * 64 * 128 * 4)] * 2
    assert k.per_token
    assert [(p.pieces, p.piece_bytes) for p in k.parts] == [(1, 128)] * 2
    assert second.bytes_from.keys() == {2, 3}
    assert second.classes_from[3] == ("conv.x", "ssm", "k", "v")
    assert first.strategy == second.strategy
    assert second.strategy["ssm"] == "slices"
    assert second.strategy["conv.x"] == "whole"


def test_what_a_strategy_would_cost_or_why_it_can_not_serve() -> None:
    source = build_layout(MODEL, EngineSettings(tp=2))
    other = tuple(
        replace(layer, ssm_dtype=BF16) if isinstance(layer, Mamba2Spec) else layer
        for layer in LAYERS
    )
    destination = build_layout(ModelSpec("m", other), EngineSettings(tp=1))
    (rank,) = explain(make_plan(source, destination), Strategy.PACK, tokens=100)
    refused = rank.cost_by_strategy[Strategy.SLICES]
    assert isinstance(refused, str)
    assert "float32 to bfloat16" in refused
    ssm_bytes = 9 * 64 * 64 * 128 * 4
    assert replace(rank.cost, seconds=0.0) == Cost(
        rank.bytes_at_tokens - ssm_bytes // 2, 2, 4, seconds=0.0
    )
    assert rank.fields[3].parts[0].cast == "float32 to bfloat16"


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (["layers.7.k"], "layers.7.k"),
        (["layers.7.k", "layers.8.k"], "layers.{7,8}.k"),
        (["model.layers.1.k", "model.layers.2.k"], "model.layers.{1,2}.k"),
        (["one", "two"], "one, two"),
    ],
)
def test_joined_names(names: list[str], word: str) -> None:
    assert joined_name(names) == word


def test_ranks_without_moves() -> None:
    layout = build_layout(MODEL, EngineSettings())
    idle = replace(layout.ranks[0], rank=3, regions=(), shards=())
    _, rank = explain(make_plan(layout, replace(layout, ranks=(*layout.ranks, idle))))
    assert (rank.bytes, rank.fields, rank.cost) == (0, (), Cost(0, 0, 0, 0.0))
    assert np.array([rank.bytes_at_tokens]).sum() == 0
