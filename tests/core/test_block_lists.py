"""Lists of block ids: every page once, and the null block only where nothing is moved."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.world import (
    BLOCK_TOKENS,
    KV,
    PAGES,
    STATE,
    World,
    alone,
    ends,
    layout,
    p_and_d,
    packed,
    pair_plan,
)
from restow.broker.core.common import actions as act
from restow.broker.core.common.keys import EngineKey
from restow.broker.core.common.limits import Limits
from restow.broker.core.common.pair import PairPlan
from restow.broker.core.engines.account import Tenants
from restow.broker.core.engines.blocks import BlockLists
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.errors import (
    NullBlockError,
    PageCountError,
    PageRangeError,
    PageRepeatedError,
    PagesError,
)
from restow.broker.families import AttentionSpec, EngineSettings, ModelSpec, build_layout
from restow.broker.layout import DType
from restow.broker.planner import GroupPair, PageForm, compile_programs, make_plan
from restow.broker.planner.program import NO_LIST

POSITION = 40


@pytest.mark.parametrize(
    ("blocks", "error", "words"),
    [
        ({"kv": [1, 2, 1], "state": [4]}, PageRepeatedError, "kv: block 1 occurs more than once"),
        ({"kv": [7, 7, 7], "state": [4]}, PageRepeatedError, "kv: block 7"),
        ({"kv": [1, 2, 3], "state": [0]}, NullBlockError, "block 0 is the null block.* a snapshot"),
        ({"kv": [1, 2, 3], "state": [4, 5]}, PageCountError, "one block is required, got 2"),
        ({"kv": [1, 2, PAGES], "state": [4]}, PageRangeError, rf"block {PAGES} .* \[0, {PAGES}\)"),
        ({"kv": [1, -2, 3], "state": [4]}, PageRangeError, "block -2"),
        ({"kv": [1, 2, 3], "steak": [4]}, PagesError, r"'steak'; it has \['kv', 'state'\]"),
    ],
)
def test_both_sides_hear_at_once_what_no_list_may_have(
    blocks: dict[str, list[int]], error: type[PagesError], words: str
) -> None:
    world, p, d = p_and_d()
    with pytest.raises(error, match=words):
        world.publish(p, blocks=blocks)
    with pytest.raises(error, match=words):
        world.publish(p, blocks=blocks, final=False)
    with pytest.raises(error, match=words):
        world.request(d, blocks=blocks)
    assert not world.directory.ledger.live
    assert not p.record.handoffs


def test_a_page_that_two_chunks_name_is_refused_with_the_last_one() -> None:
    world, p = alone("p")
    world.publish(p, blocks={"kv": [1, 2]}, final=False)
    world.publish(p, blocks={"kv": [1]}, first=2, final=False)
    with pytest.raises(PageRepeatedError, match="block 1"):
        world.publish(p, blocks={"state": [4]})
    assert not world.find().publication.final


def test_null_blocks_stand_where_nothing_is_moved() -> None:
    world = World()
    world.outcome = replace(
        pair_plan(1, 1, False, False),
        group_pairs=frozenset({GroupPair(KV, KV, window_tokens=9), GroupPair(STATE, STATE)}),
    )
    p, d = world.engine("p"), world.engine("d")
    # 40 tokens: the window of 9 begins in block 1; D has listed a block too many.
    world.ready(p, blocks={"kv": [0, 2, 3], "state": [4]})
    world.request(d, blocks={"kv": [0, 12, 13, 0], "state": [14]})
    assert world.orders(act.SendExecute)


def test_of_what_begins_cold_p_needs_no_list() -> None:
    # Only D's list of the drafts' layers is looked at.
    (none, drafts) = (PageForm(name, BLOCK_TOKENS, 1) for name in (NO_LIST, "kv"))
    plan = pair_plan(1, 1, False, False)
    world = World()
    world.outcome = replace(plan, group_pairs=frozenset({GroupPair(none, drafts)}))
    p, d = world.engine("p"), world.engine("d")
    for handoff_id, ids in (("a", [11, 12, 13]), ("b", [0, 22, 23])):
        world.publish(p, name=handoff_id, blocks={"kv": [0, 2, 3], "state": [4]})
        world.fence(p, name=handoff_id)
        world.request(d, name=handoff_id, blocks={"kv": ids, "state": ids[2:]})
    assert len(world.orders(act.SendExecute)) == 1
    assert ends(d) == [("FAILED", "NULL_BLOCK")]


def test_a_program_of_cold_fields_names_no_group_of_p() -> None:
    layer = AttentionSpec(0, 2, 4, DType.FLOAT32)
    model = ModelSpec("m", (layer,))
    window = replace(layer, layer=1, window_tokens=9)  # D has lists of its own for it
    drafting = replace(model, draft_layers=(window,), draft="mtp")
    plan = make_plan(
        build_layout(model, EngineSettings()), build_layout(drafting, EngineSettings(tp=2))
    )
    pair = PairPlan.of(compile_programs(plan))
    assert pair.src_groups == {"attention"}
    assert pair.dst_groups == {"attention", "window.9"}


def test_a_null_block_where_d_keeps_a_whole_block_fails_the_handoff() -> None:
    # This happens where P's engine frees more than its blocks of tokens say.
    world = World()
    kept = replace(KV, pages_per_block=2, whole_blocks=True)
    world.outcome = replace(
        pair_plan(1, 1, False, False),
        group_pairs=frozenset({GroupPair(KV, kept, window_tokens=9), GroupPair(STATE, STATE)}),
    )
    p, d = world.engine("p"), world.engine("d")
    world.ready(p, blocks={"kv": [0, 2, 3], "state": [4]})
    world.request(d, blocks={"kv": [11, 12, 13], "state": [14]})
    assert ends(d) == [("FAILED", "NULL_BLOCK")]
    assert "token 0 of [0, 40)" in d.told[0].detail


@pytest.mark.parametrize(
    ("src", "dst", "held", "who"),
    [
        ([0, 2, 3], [11, 12, 13], 0, "engine p, group kv: block 0 .* token 0 of"),
        ([1, 2, 3], [0, 0, 13], 16, r"engine d, group kv: block 0 .* token 16 of \[16, 40\)"),
        ([1, 2, 0], [11, 12, 13], 39, "engine p, group kv: block 0 .* token 39 of"),
    ],
)
def test_a_null_block_where_tokens_move_fails_the_handoff(
    src: list[int], dst: list[int], held: int, who: str
) -> None:
    world, p, d = p_and_d()
    world.ready(p, blocks={"kv": src, "state": [4]})
    world.request(d, blocks={"kv": dst, "state": [14]}, held=held)
    assert ends(d) == [("FAILED", "NULL_BLOCK")]
    assert ends(p) == []
    assert not world.orders(act.SendExecute)
    (told,) = d.told
    assert re.search(who, told.detail)


@pytest.mark.parametrize("lacks_nulls", ["p", "d"])
def test_a_null_block_of_one_side_is_found_where_the_other_has_none(lacks_nulls: str) -> None:
    plain = layout(1)
    regions = tuple(replace(region, null_block=None) for region in plain.ranks[0].regions)
    without = replace(plain, ranks=(replace(plain.ranks[0], regions=regions),))
    world = World()
    p, d = (world.engine(n, shape=without if n == lacks_nulls else plain) for n in "pd")
    world.ready(p, blocks={"kv": [0, 2, 3], "state": [4]})
    world.request(d, blocks={"kv": [0, 12, 13], "state": [14]})
    assert ends(d) == [("FAILED", "NULL_BLOCK")]
    assert f"engine {'d' if lacks_nulls == 'p' else 'p'}" in d.told[0].detail


def test_below_what_d_holds_neither_side_needs_blocks() -> None:
    world, p, d = p_and_d()
    world.ready(p, blocks={"kv": [0, 0, 3], "state": [4]})
    world.request(d, blocks={"kv": [0, 0, 13], "state": [14]}, held=33)
    assert world.orders(act.SendExecute)


def lists(null: int | None, tokens: int = BLOCK_TOKENS) -> BlockLists:
    """Return the rules of an engine's block lists, for one group."""
    nulls = {} if null is None else {"kv": null}
    return BlockLists(EngineKey("t", "e"), {"kv": tokens}, nulls, {"kv": PAGES})


def test_without_a_null_block_block_0_is_like_any_other() -> None:
    lists(None).check_ids("kv", packed([0, 1, 2]))
    lists(None).check_no_null("kv", {"kv": packed([0, 1, 2])}, 0, POSITION)
    lists(None, tokens=0).check_ids("kv", packed([0]))
    with pytest.raises(PageRepeatedError):
        lists(None).check_ids("kv", packed([0, 0]))


@given(
    ids=st.lists(st.integers(0, 7), max_size=8),
    null=st.none() | st.integers(0, 7),
    tokens=st.integers(1, 5),
    data=st.data(),
)
def test_the_rules_are_those_of_a_loop(
    ids: list[int], null: int | None, tokens: int, data: st.DataObject
) -> None:
    rules = lists(null, tokens)
    repeated = {one for one in ids if ids.count(one) > 1} - {null}
    if repeated:
        with pytest.raises(PageRepeatedError):
            rules.check_ids("kv", packed(ids))
    else:
        rules.check_ids("kv", packed(ids))
    stop = data.draw(st.integers(0, len(ids) * tokens))
    first = data.draw(st.integers(0, stop))
    moved = {ids[token // tokens] for token in range(first, stop)}
    if null in moved:
        with pytest.raises(NullBlockError):
            rules.check_no_null("kv", {"kv": packed(ids)}, first, stop)
    else:
        rules.check_no_null("kv", {"kv": packed(ids)}, first, stop)


def test_a_long_list_is_looked_at_by_numpy_alone() -> None:
    """Check that ten thousand ids take a handful of calls: no loop of Python's goes over them."""
    ids = np.random.default_rng(1).permutation(10_000)
    rules = replace(lists(0), block_limits={"kv": 10_000})
    data = packed(ids.tolist())
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        rules.check_ids("kv", data)
    finally:
        sys.setprofile(None)
    assert calls < 50


def test_the_lists_of_a_plan_have_their_windows() -> None:
    layers = (AttentionSpec(0, 2, 4, DType.BFLOAT16), AttentionSpec(1, 2, 4, DType.BFLOAT16, 8))
    p, d = (
        build_layout(ModelSpec("m", layers), EngineSettings(page_tokens=tokens, null_block=0))
        for tokens in (4, 16)
    )
    made = PairPlan.of(compile_programs(make_plan(p, d)))
    assert {(one.src.group, one.dst.group, one.window_tokens) for one in made.group_pairs} == {
        ("attention", "attention", 0),
        ("window.8", "window.8", 8),
    }
    account = Tenants(Limits()).account("t")
    record = EngineRecord.of(EngineKey("t", "p"), "life", p, "digest", 0.0, account)
    assert record.null_blocks == {"attention": 0, "window.8": 0}
