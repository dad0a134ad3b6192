"""Layouts whose ranks share tokens out: every token is held once, and all forms carry it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from restow.broker.core.common.keys import EngineKey
from restow.broker.core.engines.account import Account, Total
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.errors import (
    LayoutError,
    LayoutFormError,
    LayoutHoleError,
    LayoutOverlapError,
    RanksDisagreeError,
)
from restow.broker.layout import (
    DType,
    Field,
    Kind,
    Layout,
    Model,
    RankLayout,
    Region,
    Shard,
    Span,
    check_layout,
    digest,
)
from restow.broker.layout.difference import differences
from restow.broker.layout.json_form import layout_from_json, layout_to_json
from restow.broker.rpc.wire import layout_from_proto, layout_to_proto

FIELD = Field("layers.0.latent", Kind.PER_TOKEN, ("dim",), (8,))


def shared_out(*parts: int, of: int = 0, run: int = 2) -> Layout:
    """Return a layout of one latent, of which rank ``i`` holds the tokens of part ``parts[i]``."""
    shard = Shard(FIELD.name, (Span(0, 8),), DType.BFLOAT16, "kv", 0, (2,), 16)
    count = of or len(parts)
    ranks = (
        RankLayout(
            number,
            (
                Region(
                    *("kv", "attention", 64, 4),
                    context_parts=count,
                    context_part=part,
                    interleave_tokens=run if count > 1 else 1,
                ),
            ),
            (shard,),
        )
        for number, part in enumerate(parts)
    )
    return Layout(Model("m", (FIELD,)), tuple(ranks))


@pytest.mark.parametrize("parts", [(0,), (0, 1), (1, 0), (2, 0, 1), (0, 1, 0, 1), (0, 1, 1)])
def test_every_part_is_held(parts: tuple[int, ...]) -> None:
    check_layout(shared_out(*parts, of=max(parts) + 1))


def test_a_part_that_no_rank_holds() -> None:
    with pytest.raises(LayoutHoleError, match="no rank holds part 1 of the tokens") as error:
        check_layout(shared_out(0, 2, 2, of=3))
    assert error.value.subject["axis"] == "token"


def changed(layout: Layout, rank: int, **values: Any) -> Layout:
    """Return the layout with other values of a rank's region."""
    ranks = list(layout.ranks)
    region = replace(ranks[rank].regions[0], **values)
    shards = tuple(replace(one, region=region.name) for one in ranks[rank].shards)
    ranks[rank] = replace(ranks[rank], regions=(region,), shards=shards)
    return replace(layout, ranks=tuple(ranks))


def test_ranks_that_cut_tokens_in_different_ways() -> None:
    # In one group the ranks disagree; in two groups some tokens are held twice, some maybe never.
    with pytest.raises(RanksDisagreeError, match="interleave_tokens"):
        check_layout(changed(shared_out(0, 1), 1, interleave_tokens=1))
    with pytest.raises(LayoutOverlapError, match="2 parts by 2 and 2 parts by 1"):
        check_layout(changed(shared_out(0, 1), 1, interleave_tokens=1, group="other"))
    whole = {"context_parts": 1, "context_part": 0, "interleave_tokens": 1}
    with pytest.raises(LayoutOverlapError, match="1 parts by 1"):
        check_layout(changed(shared_out(0, 1), 1, group="other", **whole))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"context_part": 2}, "context_part is 2 of 2"),
        ({"context_part": -1}, "context_part is -1 of 2"),
        ({"context_parts": 0}, "context_part is 1 of 0"),
        ({"context_parts": 1025}, "there are 1 to 1024"),
        ({"interleave_tokens": 3}, "it must divide the 4 tokens"),
        ({"interleave_tokens": 0}, "interleave_tokens is 0"),
        ({"context_parts": 1, "context_part": 0}, "there is only a single part"),
        ({"page_tokens": None}, "only tokens can be divided among ranks"),
    ],
)
def test_numbers_that_make_no_sense(values: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutFormError, match=words):
        check_layout(changed(shared_out(0, 1), 1, **values))


FORMS: dict[str, Callable[[Layout], Layout]] = {
    "JSON": lambda layout: layout_from_json(json.loads(json.dumps(layout_to_json(layout)))),
    "message": lambda layout: layout_from_proto(layout_to_proto(layout)),
}


@pytest.mark.parametrize("form", FORMS)
def test_it_is_carried(form: str) -> None:
    for layout in (shared_out(0, 1), shared_out(1, 0, 2, run=1), shared_out(0, 0, of=1)):
        assert FORMS[form](layout) == layout


def test_every_number_of_it_counts_in_the_digest() -> None:
    layouts = [
        shared_out(0, 0, of=1),
        shared_out(0, 1),
        shared_out(1, 0),
        shared_out(0, 1, run=1),
        shared_out(0, 1, of=3),
    ]
    assert len({digest(layout) for layout in layouts}) == len(layouts)


def test_layouts_that_share_nothing_out_are_told_as_ever() -> None:
    """Check that the digest and the message are those from before there were parts."""
    layout = shared_out(0, 0, of=1)
    assert digest(layout) == ("82a459cde980c10d6091e13e1bb142b7e06fe8f8e196673079fe59f21a33f2ab")
    told = layout_to_proto(layout).ranks[0].regions[0].SerializeToString()
    assert told == b"\n\x02kv\x12\tattention\x18@ \x04(\x01"
    assert "context_parts" not in json.dumps(layout_to_json(layout))


def test_what_differs_is_said() -> None:
    (found,) = differences(shared_out(0, 1), shared_out(0, 1, run=1))
    assert (found.aspect, found.left, found.right) == (
        "tokens",
        "in 2 parts, 2 in turn",
        "in 2 parts, 1 in turn",
    )


def test_lists_of_block_ids_reach_as_far_as_all_parts_together() -> None:
    record = EngineRecord.of(
        EngineKey("", "e"), "i", shared_out(0, 1, 2), "d", 0.0, Account("", None, Total(0))
    )
    assert record.block_tokens == {"attention": 12}
    assert record.state_bytes(0, 10) == 10 * 16


def test_a_rank_holds_a_box_once() -> None:
    layout = shared_out(0, 1)
    rank = layout.ranks[0]
    other = replace(rank.regions[0], name="more", context_part=1)
    both = replace(
        rank,
        regions=(*rank.regions, other),
        shards=(*rank.shards, replace(rank.shards[0], region="more")),
    )
    with pytest.raises(LayoutError, match="twice"):
        check_layout(replace(layout, ranks=(both, layout.ranks[1])))
