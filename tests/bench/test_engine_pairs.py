"""Pairs of engines for benchmarks: the blocks that handoffs use."""

from __future__ import annotations

import numpy as np

from bench.engine_pairs import RunningPairs, page_counts
from bench.model_sizes import tiny_hybrid

TOKENS, PROMPTS = 100, 8
LAYOUT = tiny_hybrid(2)
PAIRS = RunningPairs("pairs", TOKENS, PROMPTS, True, {}, {}, {"pair": (LAYOUT, LAYOUT)})


def test_handoffs_under_way_at_once_have_no_block_in_common() -> None:
    # A broker refuses a request for blocks that another open handoff will write.
    places = [PAIRS.blocks_of_place(LAYOUT, place) for place in range(PROMPTS)]
    for group, count in page_counts(LAYOUT, TOKENS, PROMPTS).items():
        used = [block for blocks in places for block in blocks[group]]
        assert sorted(used) == list(range(count))


def test_a_prompts_blocks_are_drawn_from_the_room_of_two() -> None:
    drawn = PAIRS.blocks(LAYOUT, np.random.default_rng(0))
    for group, count in page_counts(LAYOUT, TOKENS).items():
        assert len(drawn[group]) == len(set(drawn[group])) == count // 2
        assert all(0 <= block < count for block in drawn[group])
