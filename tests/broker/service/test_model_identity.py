"""Engines hand over to each other only if they serve the same model, weights and all."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agent_harness.waiting import WAIT_S
from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, broker, model_layout
from restow.broker.client import EngineSession
from restow.broker.errors import LayoutFormError, ModelMismatchError
from restow.broker.layout import Layout, ModelIdentity, check_layout, digest
from restow.broker.layout.difference import Difference, differences
from restow.broker.layout.json_form import layout_from_json, layout_to_json
from restow.broker.layout.values import IDENTITY_PARTS
from restow.broker.planner import make_plan
from restow.broker.rpc import wire

HERE = model_layout()
PARTS = ("name", *IDENTITY_PARTS)


def other(part: str, value: str = "other", layout: Layout = HERE) -> Layout:
    changed: Any = {part: value}
    return replace(layout, model=replace(layout.model, **changed))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("value", ["other", ""], ids=["another", "none"])
def test_layouts_that_differ_in_any_part_are_refused(part: str, value: str) -> None:
    here = other(part, "one")
    there = other(part, value)
    for source, destination in ((here, there), (there, here)):
        with pytest.raises(ModelMismatchError) as caught:
            make_plan(source, destination)
        assert caught.value.reason == "MODEL_MISMATCH"
        ours, theirs = source.model.identity, destination.model.identity
        assert caught.value.subject == {"source": str(ours), "destination": str(theirs)}
        assert str(ours) in caught.value.message
        assert str(theirs) in caught.value.message
        assert "Run both from one checkpoint" in caught.value.message
    assert make_plan(here, here)


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_in_the_digest_and_comes_through_each_form(part: str) -> None:
    there = other(part)
    assert digest(there) != digest(HERE)
    assert digest(other(part, "")) != digest(there)
    assert wire.layout_from_proto(wire.layout_to_proto(there)) == there
    assert layout_from_json(layout_to_json(there)) == there
    before = getattr(HERE.model, part) or "none"
    assert differences(HERE, there) == [Difference("model", part, before, "other")]


def test_parts_are_not_taken_for_each_other() -> None:
    digests = {digest(other(part, "same", other("revision", ""))) for part in IDENTITY_PARTS}
    assert len(digests) == len(IDENTITY_PARTS)


def test_json_leaves_out_what_is_empty_and_refuses_what_is_no_text() -> None:
    data = layout_to_json(HERE)
    assert {"revision", "adapter", "quantisation"} & set(data["model"]) == {"revision"}
    data["model"]["adapter"] = 7
    with pytest.raises(LayoutFormError, match=r"model\.adapter"):
        layout_from_json(data)


@pytest.mark.parametrize("part", IDENTITY_PARTS)
def test_a_part_has_a_sensible_length(part: str) -> None:
    check_layout(other(part, "x" * 256))
    with pytest.raises(LayoutFormError, match=f"the model's {part} has 257 characters"):
        check_layout(other(part, "x" * 257))


def test_people_read_what_there_is_and_what_is_not() -> None:
    assert (
        str(ModelIdentity("m", "v1", "", "fp8"))
        == "'m' (revision 'v1', no adapter, quantisation 'fp8')"
    )


async def test_two_checkpoints_of_one_architecture_hand_nothing_over() -> None:
    async with (
        broker() as running,
        EngineSession("p", "p-life", HERE, running.address) as p,
        EngineSession("d", "d-life", other("revision", "v2"), running.address) as d,
    ):
        freed, asked = p.publish("h", P_BLOCKS, POSITION), d.request("h", D_BLOCKS)
        for end in (await asyncio.wait_for(asked, WAIT_S), await asyncio.wait_for(freed, WAIT_S)):
            assert (end.state, end.reason) == ("FAILED", "MODEL_MISMATCH")
            assert "revision 'v1'" in end.detail
            assert "revision 'v2'" in end.detail
