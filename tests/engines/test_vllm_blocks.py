"""Which blocks of a request hold its state, and which bytes of D's no handoff writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from restow.agents.engines.common.adapter_errors import BlocksError
from restow.agents.engines.common.blocks import (
    Group,
    UnwrittenTokens,
    handoff_blocks,
    state_block,
    unwritten,
)
from restow.agents.engines.vllm.worker.rank_layout import LayerCache
from restow.agents.engines.vllm.worker.worker_side import zero_tokens
from restow.broker.families import KvOrder
from restow.broker.planner.program import GroupPair, PageForm

STATE, SPECULATIVE = Group("s", 16, 0), Group("s", 16, 2)
TOKENS = Group("t", 16)


@pytest.mark.parametrize(
    ("group", "blocks", "found"),
    [
        (STATE, [7], 7),
        (STATE, [0, 0, 0, 9], 9),
        (STATE, [0, 4, 9], 9),
        (SPECULATIVE, [7, 8, 9], 7),
        (SPECULATIVE, [0, 0, 6, 7, 8], 6),
        (SPECULATIVE, [7], 7),
        (SPECULATIVE, [7, 8], 7),
    ],
)
def test_the_running_state_lies_before_the_scratch(
    group: Group, blocks: list[int], found: int
) -> None:
    assert state_block(group, blocks) == found


@pytest.mark.parametrize("blocks", [[], [0], [3, 0]])
def test_a_null_block_is_never_handed_over(blocks: list[int]) -> None:
    with pytest.raises(BlocksError):
        state_block(STATE, blocks)


def test_token_groups_name_all_their_blocks() -> None:
    assert handoff_blocks((TOKENS, STATE), ([1, 2, 3], [0, 5])) == {"t": [1, 2, 3], "s": [5]}
    with pytest.raises(BlocksError, match="2 block lists for 1 groups"):
        handoff_blocks((TOKENS,), ([1], [2]))


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, int, bool, int, int, list[int]]:
    """Draw a prompt and its blocks.

    Returns the tokens of a block, those of a window (0: none), whether blocks are kept whole, the
    tokens held, those of the prompt, and D's blocks.
    """
    size = draw(st.integers(1, 9))
    position = draw(st.integers(1, 60))
    held = draw(st.integers(0, position // size)) * size
    window = draw(st.one_of(st.just(0), st.integers(1, 70)))
    count = -(-position // size) + draw(st.integers(0, 2))
    first = max(position - window, 0) // size if window else 0
    blocks = [0 if index < first else index + 1 for index in range(count)]
    return size, window, draw(st.booleans()), held, position, blocks


@given(prompts())
def test_every_token_of_a_loaded_block_is_held_moved_or_a_hole(
    prompt: tuple[int, int, bool, int, int, list[int]],
) -> None:
    size, window, whole, held, position, blocks = prompt
    group = Group("t", size, None, window, whole)
    holes = unwritten((group,), {"t": blocks}, held, position)
    owners = np.zeros((len(blocks) + 1, size), int)
    form = PageForm("t", size, 1, whole_blocks=whole)
    moved = GroupPair(form, form, window).first_token(held, position)
    for token in range(len(blocks) * size):
        index, inside = divmod(token, size)
        if blocks[index] and (token < held or moved <= token < position):
            owners[blocks[index], inside] += 1
    for hole in holes:
        assert hole.group == "t"
        assert hole.block
        assert hole.start < hole.stop
        owners[hole.block, hole.start : hole.stop] += 1
    loaded = [b for i, b in enumerate(blocks) if b and (i + 1) * size > held]
    assert (owners[loaded] == 1).all()


def test_states_leave_no_holes_to_the_worker() -> None:
    assert unwritten((STATE,), {"s": [3]}, 0, 10) == []


@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from(KvOrder), st.data())
def test_a_hole_is_zeroed_and_nothing_else(
    page_tokens: int, pages_per_block: int, order: KvOrder, data: st.DataObject
) -> None:
    block_tokens, blocks, heads, content = page_tokens * pages_per_block, 3, 2, 2
    start = data.draw(st.integers(0, block_tokens - 1))
    stop = data.draw(st.integers(start + 1, block_tokens))
    block = data.draw(st.integers(0, blocks - 1))
    pages = blocks * pages_per_block
    tensor = torch.ones(pages, heads, page_tokens, content)
    cache = LayerCache("l", 0, "t", tensor, pages_per_block, order)
    zero_tokens(cache, UnwrittenTokens("t", block, start, stop))
    # Which token owns each element of a head, by the words of the order alone.
    tokens = torch.arange(page_tokens)
    if order is KvOrder.HDN:
        keys = tokens.expand(content // 2, page_tokens).flatten()
        owner = torch.cat([keys, tokens.repeat_interleave(content // 2)])
    else:
        owner = tokens.repeat_interleave(content)
    token = torch.arange(pages)[:, None] * page_tokens + owner
    hole = (token >= block * block_tokens + start) & (token < block * block_tokens + stop)
    expected = (~hole)[:, None].expand(pages, heads, -1).float()
    assert torch.equal(tensor.reshape(pages, heads, -1), expected)
