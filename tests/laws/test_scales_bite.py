"""The laws catch scales that do not go with their elements: each mutation turns one of them red."""

from __future__ import annotations

from dataclasses import replace

import pytest

from laws import transfers
from laws.strategies import family_cases
from laws.test_laws_bite import bites, changed_plan, cover
from restow.broker.layout import Layout, Shard, Span
from restow.broker.planner import Move, Strategy, make_plan


def scale(name: str) -> bool:
    return name.endswith(("k_scale", "v_scale"))


@pytest.mark.parametrize("strategy", [Strategy.SLICES, Strategy.WHOLE, Strategy.PACK])
def test_scales_that_are_left_behind(monkeypatch: pytest.MonkeyPatch, strategy: Strategy) -> None:
    drop = changed_plan(lambda move: None if scale(move.field) else move)
    monkeypatch.setattr(transfers, "make_plan", drop)
    bites(cover(strategy), family_cases())


def test_the_scales_of_another_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try a planner that believes that P's ranks hold their heads' scales in reverse order."""

    def wrong(source: Layout, destination: Layout) -> object:
        return make_plan(_scales_of_other_ranks(source), destination)

    monkeypatch.setattr(transfers, "make_plan", wrong)
    bites(cover(Strategy.SLICES), family_cases(pipelines=False))


def _scales_of_other_ranks(layout: Layout) -> Layout:
    counts = {field.name: field.shape[0] for field in layout.model.fields}

    def turned(shard: Shard) -> Shard:
        if not scale(shard.field):
            return shard
        count, span = counts[shard.field], shard.box[0]
        return replace(shard, box=(Span(count - span.stop, count - span.start), *shard.box[1:]))

    ranks = (replace(one, shards=tuple(map(turned, one.shards))) for one in layout.ranks)
    return replace(layout, ranks=tuple(ranks))


def test_an_indexers_scales_behind_the_elements_of_their_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Try a planner that believes that P's pages have rows of elements and scales."""

    def wrong(source: Layout, destination: Layout) -> object:
        return make_plan(_indexers_in_rows(source), destination)

    monkeypatch.setattr(transfers, "make_plan", wrong)
    bites(cover(Strategy.SLICES), family_cases(pipelines=False))


def _indexers_in_rows(layout: Layout) -> Layout:
    """Return a layout of the same sizes in other places, which no check of a layout can tell."""

    def in_rows(shard: Shard, page_tokens: dict[str, int | None]) -> Shard:
        if "index_k" not in shard.field:
            return shard
        sizes = {
            one.field: one.box[0].size * one.dtype.itemsize_bytes
            for one in layout.ranks[0].shards
            if one.region == shard.region
        }
        tokens = page_tokens[shard.region] or 1
        return replace(
            shard,
            offset_bytes=shard.offset_bytes // tokens,
            token_stride_bytes=sum(sizes.values()),
        )

    ranks = []
    for rank in layout.ranks:
        tokens = {region.name: region.page_tokens for region in rank.regions}
        ranks.append(replace(rank, shards=tuple(in_rows(one, tokens) for one in rank.shards)))
    return replace(layout, ranks=tuple(ranks))


@pytest.mark.parametrize("side", ["src", "dst"])
def test_scales_an_element_further(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    def shift(move: Move) -> Move:
        if not scale(move.field):
            return move
        place = move.src if side == "src" else move.dst
        moved = replace(place, offset_bytes=place.offset_bytes + place.dtype.itemsize_bytes)
        return replace(move, src=moved) if side == "src" else replace(move, dst=moved)

    monkeypatch.setattr(transfers, "make_plan", changed_plan(shift))
    bites(cover(Strategy.SLICES), family_cases())
