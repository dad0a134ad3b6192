"""A D that keeps blocks for other prompts: of which P it gets whole ones, and which is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from restow.broker.errors import BlockTokensMismatchError
from restow.broker.families import AttentionSpec, EngineSettings, ModelSpec, build_layout
from restow.broker.layout import DType, Layout
from restow.broker.planner import make_plan

WINDOW = AttentionSpec(0, 2, 4, DType.BFLOAT16, window_tokens=31)


def layout(block_tokens: int, whole_blocks: bool = False, window_tokens: int = 31) -> Layout:
    """Return a layout with blocks of two pages each."""
    spec = replace(WINDOW, window_tokens=window_tokens)
    settings = EngineSettings(
        page_tokens=block_tokens // 2, pages_per_block=2, whole_blocks=whole_blocks
    )
    return build_layout(ModelSpec("m", (spec,)), settings)


@pytest.mark.parametrize(("ours", "theirs"), [(16, 16), (32, 16), (48, 16)])
def test_blocks_that_divide_ps_are_filled_from_their_beginning(ours: int, theirs: int) -> None:
    plan = make_plan(layout(ours), layout(theirs, whole_blocks=True))
    token_bytes = plan.bytes
    for tokens, first in ((57, 16), (63, 32), (64, 32), (20, 0)):
        assert plan.bytes_at(tokens) == (tokens - first) * token_bytes
    in_part = make_plan(layout(ours), layout(theirs))
    assert in_part.bytes_at(57) == 31 * token_bytes


@pytest.mark.parametrize(("ours", "theirs"), [(16, 32), (16, 24), (24, 16)])
def test_blocks_whose_beginning_p_may_lack_are_refused(ours: int, theirs: int) -> None:
    with pytest.raises(BlockTokensMismatchError) as caught:
        make_plan(layout(ours), layout(theirs, whole_blocks=True))
    assert caught.value.status == "FAILED_PRECONDITION"
    assert caught.value.reason == "BLOCK_TOKENS_MISMATCH"
    assert caught.value.subject == {
        "field": "layers.0.k",
        "source": str(ours),
        "destination": str(theirs),
    }
    # One that keeps none takes them, and so does one of a model without windows.
    make_plan(layout(ours), layout(theirs))
    make_plan(layout(ours, window_tokens=0), layout(theirs, True, window_tokens=0))


def test_only_what_d_keeps_counts() -> None:
    make_plan(layout(16, whole_blocks=True), layout(32))
