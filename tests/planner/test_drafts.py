"""Layers of a draft (MTP, EAGLE) may be of one side alone: D's begin cold, P's stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from restow.broker.errors import LayoutFormError, ModelMismatchError
from restow.broker.families import (
    AttentionSpec,
    EngineSettings,
    Mamba2Spec,
    MlaSpec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Layout, digest
from restow.broker.layout.difference import differences
from restow.broker.planner import Plan, compile_programs, early_plan, make_plan
from restow.broker.planner.program import CLEAR_PAGES, NO_LIST, Column

KV = AttentionSpec(0, 4, 8, DType.BFLOAT16)
MODEL = ModelSpec("m", (KV, replace(KV, layer=1)))
DRAFT = replace(KV, layer=2)
OTHER_DRAFT = replace(DRAFT, kv_heads=2)


def layout(draft: str = "", layer: AttentionSpec | MlaSpec = DRAFT, tp: int = 1) -> Layout:
    drafts = (layer,) if draft else ()
    model = replace(MODEL, draft_layers=drafts, draft=draft)
    return build_layout(model, EngineSettings(tp=tp))


def moved(plan: Plan) -> set[str]:
    return {move.field for move in plan.moves}


OWN = {"layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v"}
DRAFTED = {"layers.2.k", "layers.2.v"}


@pytest.mark.parametrize(
    ("source", "destination", "moves", "cold"),
    [
        (layout(), layout("mtp", tp=2), OWN, DRAFTED),
        (layout("mtp", tp=2), layout(), OWN, set()),
        (layout("mtp"), layout("mtp", tp=4), OWN | DRAFTED, set()),
        (layout("eagle a"), layout("eagle b"), OWN, DRAFTED),
        (layout("eagle a"), layout("eagle b", OTHER_DRAFT), OWN, DRAFTED),
        (layout("mtp"), layout("mtp", MlaSpec(2, 8, DType.BFLOAT16)), OWN, {"layers.2.latent"}),
    ],
)
def test_what_moves_and_what_begins_cold(
    source: Layout, destination: Layout, moves: set[str], cold: set[str]
) -> None:
    plan = make_plan(source, destination)
    assert moved(plan) == moves
    assert plan.cold == cold
    for program in compile_programs(plan):
        rows = program.rows(CLEAR_PAGES)
        assert bool(len(rows)) == bool(cold)
        pairs = [program.group_pairs[pair] for pair in rows[:, Column.GROUP_PAIR]]
        assert all(pair.src.group == NO_LIST and pair.per_token for pair in pairs)


def test_keys_and_values_of_a_head_are_one_row() -> None:
    (program,) = compile_programs(make_plan(layout(), layout("mtp")))
    rows = program.rows(CLEAR_PAGES)
    assert len(rows) == DRAFT.kv_heads
    assert set(rows[:, Column.COUNT]) == {2 * 8 * 2} == set(rows[:, Column.DST_TOKEN_STRIDE_BYTES])


def test_a_field_that_is_no_draft_on_one_side_is_no_draft() -> None:
    own = build_layout(replace(MODEL, layers=(*MODEL.layers, DRAFT)), EngineSettings())
    for pair in ((own, layout("mtp")), (layout("mtp"), own), (own, layout()), (layout(), own)):
        with pytest.raises(ModelMismatchError, match=r"field layers\.2\.k"):
            make_plan(*pair)


def test_another_model_is_another_one_with_a_draft_too() -> None:
    heads = build_layout(replace(MODEL, layers=(KV,)), EngineSettings())
    with pytest.raises(ModelMismatchError, match=r"field layers\.1\.k"):
        make_plan(heads, layout("mtp"))


def test_a_cold_state_is_zeroed_with_its_scratch() -> None:
    state = Mamba2Spec(2, 8, 16, 16, 2, 4, DType.BFLOAT16, DType.FLOAT32)
    model = replace(MODEL, draft_layers=(state,), draft="d")
    cold = build_layout(model, EngineSettings(conv_rows_extra=1))
    (program,) = compile_programs(make_plan(layout(), cold))
    rows = program.rows(CLEAR_PAGES)
    (page_bytes,) = (one.page_stride_bytes for one in cold.ranks[0].regions if one.group == "state")
    assert int(rows[:, Column.COUNT].sum()) == page_bytes


@pytest.mark.parametrize(("layers", "name"), [((DRAFT,), ""), ((), "mtp")])
def test_layers_and_name_come_together(layers: tuple[AttentionSpec, ...], name: str) -> None:
    with pytest.raises(LayoutFormError, match="layers need a name"):
        build_layout(replace(MODEL, draft_layers=layers, draft=name), EngineSettings())


def test_the_last_stage_has_the_drafts() -> None:
    model = replace(MODEL, draft_layers=(DRAFT,), draft="mtp")
    first, last = build_layout(model, EngineSettings(pp=2)).ranks
    assert {shard.field for shard in first.shards} == {"layers.0.k", "layers.0.v"}
    assert {shard.field for shard in last.shards} == {"layers.1.k", "layers.1.v", *DRAFTED}


def test_digests_of_layouts_without_drafts_are_those_of_before() -> None:
    # The digest was written down before fields had drafts.
    state = Mamba2Spec(1, 8, 16, 16, 2, 4, DType.BFLOAT16, DType.FLOAT32)
    model = ModelSpec("m", (replace(KV, window_tokens=3), state), revision="r")
    old = build_layout(model, EngineSettings(tp=2, conv_rows_extra=1))
    assert digest(old) == "a6f25a2b1a3aba88d67e17a470338b5bd1631df093eb7c8b32148ed584de7f88"
    words = ("", "mtp", "other")
    assert len({digest(layout(word)) for word in words}) == len(words)


def test_differences_name_the_draft() -> None:
    found = {
        (one.subject, one.aspect, one.left, one.right)
        for one in differences(layout("a"), layout("b"))
    }
    assert found == {("layers.2.k", "draft", "a", "b"), ("layers.2.v", "draft", "a", "b")}


def test_a_cold_draft_with_a_window_keeps_the_state_from_being_read_early() -> None:
    # Which of the draft's tokens are zeroed depends on where the prompt ends.
    windowed = replace(DRAFT, window_tokens=8)
    assert early_plan(make_plan(layout(), layout("mtp"))) is not None
    assert early_plan(make_plan(layout(), layout("mtp", windowed))) is None
