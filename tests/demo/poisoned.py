"""What an engine's memory must hold, byte for byte, when a state has arrived in poisoned pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from restow.demo.transformers.engine import Engine
from restow.demo.transformers.state_io import RankTensors, lay_out

POISON = 0xFF
"""NaN in every float type, so that what is read by mistake spoils the logits."""


def poison(engine: Engine) -> None:
    """Overwrite all memory of all ranks."""
    for rank in engine.pages:
        for memory in rank.regions.values():
            memory.fill_(POISON)


def with_state(
    engine: Engine, state: Mapping[str, Tensor], blocks: Mapping[str, Sequence[int]]
) -> list[RankTensors]:
    """Return poisoned memory, of the sizes that ``engine`` has, with a state in blocks of it."""
    ranks = [
        RankTensors(
            rank.layout,
            {name: torch.full_like(memory, POISON) for name, memory in rank.regions.items()},
        )
        for rank in engine.pages
    ]
    for rank in ranks:
        for shard in rank.layout.shards:
            if shard.field.endswith(".ssm"):
                # Windows lie before the SSM state, with nothing between them but scratch rows.
                region = rank.layout.region(shard.region)
                start = blocks[region.group][0] * region.page_stride_bytes
                rank.regions[region.name][start : start + shard.offset_bytes] = 0
    lay_out(state, ranks, blocks)
    return ranks


def wrong_regions(engine: Engine, expected: Sequence[RankTensors]) -> list[str]:
    """Return the rank and region of all memory with a wrong byte."""
    return [
        f"rank {rank.layout.rank} {name}"
        for rank, right in zip(engine.pages, expected, strict=True)
        for name, memory in rank.regions.items()
        if not torch.equal(memory, right.regions[name])
    ]
