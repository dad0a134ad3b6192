"""What a store's pages look like, beside those of engines that are packed as vLLM packs them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from laws.checks import engines_of
from laws.executor import Arena
from laws.strategies import Case
from laws.transfers import transfer
from restow.agents.binding.pages import TokenRange
from restow.broker.errors import LayoutFormError
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    GdnSpec,
    KvOrder,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType
from restow.broker.layout.store_layout import least_block_tokens, store_layout
from restow.broker.planner import Strategy, make_plan

BF16 = DType.BFLOAT16
MODEL = ModelSpec(
    "hybrid",
    (
        Mamba2Spec(0, 8, 4, 16, 4, 4, BF16, DType.FLOAT32),
        AttentionSpec(1, 4, 8, BF16),
        GdnSpec(2, 4, 8, 4, 4, 4, BF16, DType.FLOAT32),
        AttentionSpec(3, 4, 8, BF16, window_tokens=32),
    ),
)


@pytest.mark.parametrize("kv_order", [KvOrder.HND, KvOrder.NHD])
@pytest.mark.parametrize("conv_layout", ConvLayout)
@pytest.mark.parametrize("cross_layer_blocks", [False, True])
def test_pages_of_one_rank_are_read_in_one_piece(
    kv_order: KvOrder, conv_layout: ConvLayout, cross_layer_blocks: bool
) -> None:
    settings = EngineSettings(
        kv_order=kv_order, conv_layout=conv_layout, cross_layer_blocks=cross_layer_blocks
    )
    engine = build_layout(MODEL, settings)
    case = Case((engine, store_layout(engine), engine), TokenRange(0, 48), False, 64, 1)
    p, store, d = engines_of(case, Arena())
    # At most one a snapshot and block: of three blocks of attention, and of two in the window.
    assert transfer(p, store, case.tokens, Strategy.SLICES).reads <= 2 + 3 + 2
    assert transfer(store, d, case.tokens, Strategy.SLICES).reads <= 2 + 3 + 2


def test_ranks_become_one_whole_rank_whatever_their_number() -> None:
    made = {
        store_layout(build_layout(MODEL, EngineSettings(tp=tp, pp=pp)), 16)
        for tp in (1, 2, 4)
        for pp in (1, 2)
    }
    assert len(made) == 1


def test_groups_are_tokens_windows_and_snapshots() -> None:
    (rank,) = store_layout(build_layout(MODEL, EngineSettings(tp=2)), 16).ranks
    assert {one.group: one.page_tokens for one in rank.regions} == {
        "snapshots": None,
        "tokens": 16,
        "tokens.32": 16,
    }


def test_what_is_no_state_is_not_kept() -> None:
    engine = build_layout(MODEL, EngineSettings(conv_rows_extra=3, page_align_bytes=4096))
    assert store_layout(engine) == store_layout(build_layout(MODEL, EngineSettings()))


def test_blocks_divide_those_of_windows() -> None:
    engine = build_layout(MODEL, EngineSettings(page_tokens=12, pages_per_block=2))
    assert least_block_tokens(engine) == 24
    make_plan(engine, store_layout(engine))
    one = replace(MODEL, layers=MODEL.layers[:1])
    assert least_block_tokens(build_layout(one, EngineSettings())) == 1


def test_a_block_has_a_token_at_least() -> None:
    with pytest.raises(LayoutFormError, match="it must be at least 1"):
        store_layout(build_layout(MODEL, EngineSettings()), 0)
