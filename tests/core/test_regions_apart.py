"""Regions of an engine do not lie on each other, wherever its agents are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from core.world import Side, World
from restow.broker.core.common.keys import AgentKey
from restow.broker.core.engines.agent import AgentRecord, RegionMemory
from restow.broker.errors import PageRepeatedError, RegionsOverlapError
from restow.broker.families import AttentionSpec, EngineSettings, ModelSpec, build_layout
from restow.broker.layout import DType, Layout

PAGES, PAGE = 8, 1024
BASE = 1 << 20


def layered(layers: int, tp: int = 1, stride: int = PAGE, windows: Sequence[int] = ()) -> Layout:
    """Return a layout with pages of a kilobyte a layer, which are ``stride`` apart."""
    specs = tuple(
        AttentionSpec(layer, 2, 16, DType.BFLOAT16, window)
        for layer, window in zip(range(layers), [*windows, *[0] * layers], strict=False)
    )
    made = build_layout(ModelSpec("m", specs), EngineSettings(tp=tp, page_tokens=8 * tp))
    ranks = (
        replace(rank, regions=tuple(replace(one, page_stride_bytes=stride) for one in rank.regions))
        for rank in made.ranks
    )
    return replace(made, ranks=tuple(ranks))


def hello(
    world: World,
    side: Side,
    addresses: Sequence[int],
    *,
    rank: int = 0,
    space: str = "process 1",
    counts: Sequence[int] = (),
    kind: int = 1,
    devices: Sequence[int] = (),
) -> None:
    layout = side.record.rank_layout(rank)
    regions = tuple(
        RegionMemory(one.name, base, count, one.page_stride_bytes, kind, device, space, base)
        for one, base, count, device in zip(
            layout.regions,
            addresses,
            counts or [PAGES] * len(addresses),
            devices or [0] * len(addresses),
            strict=True,
        )
    )
    key = AgentKey(side.record.key, rank)
    agent = AgentRecord(key, f"{space}/{rank}", b"meta", regions, 1 << 20)
    world.hear(world.directory.connections.admit(side.record, agent, world.now_s))


def engine(layout: Layout) -> tuple[World, Side]:
    world = World()
    return world, world.engine("e", len(layout.ranks), shape=layout, agents=False)


@pytest.mark.parametrize(
    ("apart", "words"),
    [
        (0, r"bytes \[0, 8192\) of rank 0, region layers.0.kv overlap bytes \[0, 8192\) of rank 0"),
        (PAGE, r"bytes \[1024, 8192\) of rank 0, region layers.0.kv overlap bytes \[0, 7168\)"),
        (7 * PAGE + 512, r"bytes \[7680, 8192\) of rank 0"),
    ],
)
def test_regions_of_a_rank_that_lie_on_each_other_are_refused(apart: int, words: str) -> None:
    world, side = engine(layered(2))
    with pytest.raises(RegionsOverlapError, match=words):
        hello(world, side, [BASE, BASE + apart])
    assert not side.record.agents
    hello(world, side, [BASE, BASE + PAGES * PAGE])


@pytest.mark.parametrize("away", [False, True], ids=["connected", "away"])
def test_ranks_that_were_given_the_same_memory_are_refused(away: bool) -> None:
    world, side = engine(layered(1, tp=2))
    hello(world, side, [BASE])
    if away:
        side.record.away[0] = side.record.agents.pop(0)
    with pytest.raises(RegionsOverlapError, match=r"rank 0, region layers.0.kv .* rank 1, region"):
        hello(world, side, [BASE], rank=1)
    hello(world, side, [BASE + PAGES * PAGE], rank=1)


def test_numbers_that_mean_other_memory_are_no_overlap() -> None:
    """Check equal addresses of another process, on another device, or at an unknown place."""
    world, side = engine(layered(2, tp=4))
    hello(world, side, [BASE, BASE], rank=0, kind=2, devices=[0, 1])
    hello(world, side, [BASE, BASE], rank=1, kind=2, devices=[2, 3])
    hello(world, side, [BASE, BASE + PAGES * PAGE], rank=2, space="")
    hello(world, side, [BASE, BASE + PAGES * PAGE], rank=3, space="")
    with pytest.raises(RegionsOverlapError):
        hello(world, side, [BASE, BASE], rank=3, space="")


def test_an_agent_that_comes_back_lies_on_nothing_but_itself() -> None:
    world, side = engine(layered(2))
    for _ in range(2):
        hello(world, side, [BASE, BASE + PAGES * PAGE])


def test_layers_that_take_turns_in_each_page_are_apart() -> None:
    # A block has the pages of all layers, one behind the other.
    layers = 100
    layout = layered(layers, stride=layers * PAGE)
    world, side = engine(layout)
    hello(world, side, [BASE + layer * PAGE for layer in range(layers)])
    elsewhere, other = engine(layout)
    shifted = [BASE + layer * PAGE for layer in range(layers)]
    shifted[70] += 512
    with pytest.raises(RegionsOverlapError, match=r"region layers.70.kv .* region layers.71.kv"):
        hello(elsewhere, other, shifted)


def test_pages_of_which_only_the_padding_meets_are_apart() -> None:
    world, side = engine(layered(2, stride=PAGE + 512))
    hello(world, side, [BASE, BASE + PAGES * (PAGE + 512) - 512])


def test_groups_may_lie_on_the_same_memory_and_share_no_block() -> None:
    # vLLM lays full and windowed layers over the same bytes.
    world, side = engine(layered(2, windows=[0, 16]))
    hello(world, side, [BASE, BASE])
    assert side.record.overlaid == (("attention", "window.16"),)
    with pytest.raises(PageRepeatedError, match=r"attention or window.16: block 2"):
        world.request(side, "a", {"attention": [1, 2], "window.16": [2, 3]})
    lists = {"attention": [1, 2], "window.16": [2, 3]}
    refused = world.publish_refused(side, "p", blocks=lists, position=16)
    assert isinstance(refused, PageRepeatedError)
    world.request(side, "a", {"attention": [1, 2], "window.16": [3, 4]})
    with pytest.raises(PageRepeatedError, match=r"block 1 of handoff b .* by handoff a"):
        world.request(side, "b", {"attention": [5, 6], "window.16": [1, 7]})


def test_blocks_said_before_agents_came_are_compared_once_they_have() -> None:
    # Blocks come before agents after a restart of the broker.
    world, side = engine(layered(2, windows=[0, 16]))
    world.request(side, "a", {"attention": [1, 2], "window.16": [3, 4]})
    hello(world, side, [BASE, BASE])
    with pytest.raises(PageRepeatedError, match=r"block 2 of handoff b .* by handoff a"):
        world.request(side, "b", {"attention": [5, 6], "window.16": [2, 7]})


def test_no_page_lies_on_weights() -> None:
    layout = layered(1)
    (rank,) = layout.ranks
    weights = replace(rank.regions[0], name="w", group="", page_tokens=None)
    ranks = (replace(rank, regions=(*rank.regions, weights, replace(weights, name="w2"))),)
    world, side = engine(replace(layout, ranks=ranks))
    behind = BASE + PAGES * PAGE
    hello(world, side, [BASE, behind, behind], counts=[PAGES, 1, 1])
    with pytest.raises(RegionsOverlapError, match=r"layers.0.kv .* region w"):
        hello(world, side, [BASE, behind - 1, behind], counts=[PAGES, 1, 1])
