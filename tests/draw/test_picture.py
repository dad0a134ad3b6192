"""The model of a plan's picture: bytes of pages, moves, pieces and words, against the layouts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings

from laws.strategies import Case, any_cases, family_cases
from restow.broker.draw.explain import explain
from restow.broker.draw.layer_state import LayerState, layer_states
from restow.broker.draw.page_map import Content, Stripe
from restow.broker.draw.picture import MAX_RANKS, DrawnPage, Panel, Picture, make_picture
from restow.broker.draw.piece_counts import Per
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    KvOrder,
    Mamba2Spec,
    MlaSpec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Layout, RankLayout, Region, Scratch, Shard, Span
from restow.broker.planner import Move, Place, Strategy, make_plan

BF16, F32 = DType.BFLOAT16, DType.FLOAT32
MAMBA = Mamba2Spec(0, 64, 64, 128, 8, 4, BF16, F32)
KV = AttentionSpec(0, 4, 64, BF16)
DS = ConvLayout.DS


def picture_of(model: ModelSpec, source: EngineSettings, destination: EngineSettings) -> Picture:
    plan = make_plan(build_layout(model, source), build_layout(model, destination))
    return make_picture(plan, explain(plan), 100)


def picture_of_layer(
    layer: Mamba2Spec | AttentionSpec | MlaSpec, source: EngineSettings, destination: EngineSettings
) -> Panel:
    (panel,) = picture_of(ModelSpec("m", (layer,)), source, destination).panels
    return panel


Painted = tuple[Content, str, object]


def places(strides: Sequence[int], sizes: Sequence[int], start: int, item: int) -> Iterator[int]:
    """Every byte of a box, one by one."""
    for index in itertools.product(*map(range, sizes)):
        first = start + sum(i * step for i, step in zip(index, strides, strict=True))
        yield from range(first, first + item)


def bytes_of_shard(shard: Shard, tokens: int) -> Iterator[int]:
    sizes = [*(span.size for span in shard.box), tokens]
    strides = [*shard.strides_bytes, shard.token_stride_bytes or 0]
    return places(strides, sizes, shard.offset_bytes, shard.dtype.itemsize_bytes)


def bytes_of_scratch(one: Scratch) -> Iterator[int]:
    return places(one.strides_bytes, one.sizes, one.offset_bytes, one.dtype.itemsize_bytes)


def painted(stripes: Sequence[Stripe]) -> dict[int, Painted]:
    """Every byte of the stripes with what it is; none twice."""
    found: dict[int, Painted] = {}
    for stripe in stripes:
        for row in range(stripe.rows):
            for cell in stripe.cells:
                shift = stripe.start + row * stripe.row_bytes
                for at in range(shift + cell.start, shift + cell.stop):
                    assert at not in found
                    found[at] = cell.content, cell.name, cell.box
    return found


def check_page(
    page: DrawnPage, rank: RankLayout, region: Region, names: dict[str, str], shown: set[str]
) -> None:
    """A page has all its bytes; those of fields without a move that is ``shown`` say so."""
    shards = [shard for shard in rank.shards if shard.region == region.name]
    drawn = [shard for shard in shards if names[shard.field] in shown]
    rest = Content.REST if len(drawn) < len(shards) else Content.PADDING
    for tokens, stripes in ((region.page_tokens or 1, page.stripes), (1, page.token_stripes)):
        if not stripes:
            continue
        whole = stripes is page.stripes
        expected: dict[int, Painted] = {}
        for shard in drawn:
            what: Painted = (Content.STATE, names[shard.field], shard.box)
            expected |= dict.fromkeys(bytes_of_shard(shard, tokens), what)
        for one in (s for s in rank.scratch if s.region == region.name and whole):
            expected |= dict.fromkeys(bytes_of_scratch(one), (Content.SCRATCH, "", ()))
        found = painted(stripes)
        gap = rest if whole else Content.OTHER_TOKENS
        every = range(region.page_stride_bytes)
        if not whole and drawn:
            every = range(min(expected), max(expected) + 1)
        assert found.keys() == set(every)
        for at, seen in found.items():
            if seen[0] is not Content.WOVEN:
                assert seen == expected.get(at, (gap, "", ()))


@settings(max_examples=80, derandomize=True)
@given(any_cases())
def test_every_byte_of_a_page_is_drawn_once_and_as_what_it_is(case: Case) -> None:
    plan = make_plan(*case.layouts)
    states = {state.layers: state for state in layer_states(plan)}
    for panel in make_picture(plan, explain(plan), 5).panels:
        state = state_of(states, panel)
        shown = {ribbon.name for ribbon in panel.ribbons}
        for drawn, ranks in ((panel.source, state.source), (panel.destination, state.destination)):
            by_number = {rank.rank: rank for rank in ranks}
            for pages in drawn:
                rank = by_number[pages.rank]
                for page, region in zip(pages.pages, rank.regions, strict=True):
                    check_page(page, rank, region, state.names(), shown)


@settings(max_examples=80, derandomize=True)
@given(family_cases())
def test_pages_as_families_lay_them_out_are_told_apart_to_the_last_byte(case: Case) -> None:
    plan = make_plan(*case.layouts)
    for panel in make_picture(plan, explain(plan), 5).panels:
        for rank in (*panel.source, *panel.destination):
            for page in rank.pages:
                stripes = (*page.stripes, *page.token_stripes)
                assert Content.WOVEN not in {c.content for b in stripes for c in b.cells}


def state_of(states: dict[tuple[str, ...], LayerState], panel: Panel) -> LayerState:
    """The state that a panel draws: the first of its layers."""
    layers = panel.layers
    return next(states[layers[:n]] for n in range(1, len(layers) + 1) if layers[:n] in states)


def bytes_of_move(move: Move, place: Place) -> set[int]:
    sizes = [span.size for span in move.box]
    return set(places(place.strides_bytes, sizes, place.offset_bytes, place.dtype.itemsize_bytes))


def within(stretches: Sequence[Span]) -> set[int]:
    return {at for one in stretches for at in range(one.start, one.stop)}


@settings(max_examples=80, derandomize=True)
@given(any_cases())
def test_every_move_of_a_panel_is_one_ribbon_that_embraces_its_bytes(case: Case) -> None:
    plan = make_plan(*case.layouts)
    picture = make_picture(plan, explain(plan), 5)
    states = {state.layers: state for state in layer_states(plan)}
    assert sum(panel.bytes for panel in picture.panels) == plan.bytes
    assert sum(len(state.moves) for state in states.values()) == len(plan.moves)
    for panel in picture.panels:
        state = state_of(states, panel)
        assert not panel.left_out
        assert len(panel.ribbons) == len(state.moves)
        for ribbon, move in zip(panel.ribbons, state.moves, strict=True):
            assert ribbon.name == state.names()[move.field]
            assert ribbon.move is move
            for stretches, place in (
                ([strand.src for strand in ribbon.strands], move.src),
                ([strand.dst for strand in ribbon.strands], move.dst),
            ):
                expected = bytes_of_move(move, place)
                covered = within(stretches)
                assert expected <= covered
                assert (min(expected), max(expected)) == (min(covered), max(covered))


def test_a_ribbon_has_a_strand_for_every_row_of_a_window() -> None:
    """Three taps lie apart under SD, and end in one stretch under DS, in turns."""
    straight = picture_of_layer(MAMBA, EngineSettings(), EngineSettings(tp=2))
    row, half = 6144 * 2, 2048 * 2
    ribbon = next(one for one in straight.ribbons if (one.name, one.move.dst_rank) == ("conv.x", 1))
    assert [strand.src for strand in ribbon.strands] == [
        Span(tap * row + half, tap * row + 2 * half) for tap in range(3)
    ]
    assert [strand.dst for strand in ribbon.strands] == [
        Span(tap * row // 2, tap * row // 2 + half) for tap in range(3)
    ]
    turned = picture_of_layer(MAMBA, EngineSettings(), EngineSettings(tp=2, conv_layout=DS))
    ribbon = next(one for one in turned.ribbons if (one.name, one.move.dst_rank) == ("conv.x", 1))
    assert [strand.dst for strand in ribbon.strands] == [
        Span(2 * tap, 3 * half - 4 + 2 * tap) for tap in range(3)
    ]
    back = picture_of_layer(MAMBA, EngineSettings(tp=2, conv_layout=DS), EngineSettings())
    ribbon = next(one for one in back.ribbons if (one.name, one.move.src_rank) == ("conv.x", 1))
    assert [strand.dst for strand in ribbon.strands] == [
        Span(tap * row + half, tap * row + 2 * half) for tap in range(3)
    ]


def test_layers_that_are_alike_are_drawn_once_on_whatever_ranks() -> None:
    layers = tuple(replace(KV if i % 4 == 3 else MAMBA, layer=i) for i in range(12))
    model = ModelSpec("m", layers)
    mamba, kv = picture_of(model, EngineSettings(tp=2, pp=2), EngineSettings(tp=2)).panels
    assert mamba.layers == ("0", "1", "2", "4", "5", "6", "8", "9", "10")
    assert [(stage.layers, stage.src_ranks) for stage in kv.stages] == [
        (("3",), (0, 1)),
        (("7", "11"), (2, 3)),
    ]
    assert {ribbon.move.src_rank for ribbon in kv.ribbons} == {0, 1}
    windowed = tuple(replace(KV, layer=i, window_tokens=8 * (i % 2)) for i in range(4))
    model = ModelSpec("m", windowed)
    assert [p.layers for p in picture_of(model, EngineSettings(), EngineSettings()).panels] == [
        ("0", "2"),
        ("1", "3"),
    ]


@pytest.mark.parametrize(
    ("layer", "source", "destination", "words"),
    [
        (
            MAMBA,
            EngineSettings(tp=2, conv_layout=DS),
            EngineSettings(tp=4, conv_layout=DS),
            "4 reads a layer for each rank of D: conv.x, conv.B, conv.C and ssm follow each other "
            "on D, but their parts lie apart on P",
        ),
        (
            MAMBA,
            EngineSettings(tp=2),
            EngineSettings(tp=2),
            "1 read a layer for each rank of D: conv.x, conv.B, conv.C and ssm follow each other "
            "on both sides",
        ),
        (
            MAMBA,
            EngineSettings(tp=2),
            EngineSettings(tp=4),
            "10 reads a layer for each rank of D: conv.x, conv.B and conv.C lie apart for each "
            "tap; ssm in one piece",
        ),
        (
            KV,
            EngineSettings(tp=1),
            EngineSettings(tp=2),
            "1 read a page for each rank of D: k and v follow each other on both sides",
        ),
        (
            KV,
            EngineSettings(tp=1),
            EngineSettings(tp=2, page_tokens=8),
            "2 reads a page for each rank of D: k and v lie side by side, but apart for each head",
        ),
    ],
)
def test_words_about_pieces(
    layer: Mamba2Spec | AttentionSpec,
    source: EngineSettings,
    destination: EngineSettings,
    words: str,
) -> None:
    plan = make_plan(*(build_layout(ModelSpec("m", (layer,)), s) for s in (source, destination)))
    tokens = min(source.page_tokens, destination.page_tokens)
    ranks = explain(plan, Strategy.SLICES, tokens)
    (panel,) = make_picture(plan, ranks, tokens).panels
    assert panel.remarks[0] == words
    reads = [sum(one.count for one in rank.pieces) for rank in panel.destination]
    assert reads == [rank.cost.reads for rank in ranks]


def test_words_about_a_transpose_and_a_cast() -> None:
    source, destination = EngineSettings(tp=2), EngineSettings(tp=2, conv_layout=DS)
    half = replace(MAMBA, ssm_dtype=BF16)
    plan = make_plan(
        build_layout(ModelSpec("m", (half,)), source),
        build_layout(ModelSpec("m", (MAMBA,)), destination),
    )
    (panel,) = make_picture(plan, explain(plan), 1).panels
    pieces, cast = panel.remarks
    assert "conv.x falls into single elements, as innermost is channel on P and tap on D" in pieces
    assert "conv.B and conv.C fall into single elements, as innermost is state on P" in pieces
    assert cast == "cast on the way: ssm from bfloat16 to float32"


def test_rows_that_are_zeroed() -> None:
    panel = picture_of_layer(MAMBA, EngineSettings(), EngineSettings(tp=2, conv_rows_extra=3))
    assert panel.remarks[-1] == (
        f"{3 * 3072 * 2:,} bytes of scratch rows a layer are zeroed on each rank of D"
    )


def test_tokens_that_ranks_share_out() -> None:
    layer = MlaSpec(0, 8, BF16)
    shared, whole = EngineSettings(tp=4, dcp=4, interleave_tokens=2), EngineSettings(tp=2)
    said = "ranks share the tokens out in 4 parts, 2 in turn"
    for sides, words in (
        ((shared, whole), f"P's {said}: each token is read from a rank that keeps it"),
        ((whole, shared), f"D's {said}: each token is read from a rank that keeps it"),
        ((shared, shared), f"P's {said} and D's {said}: pages move as pages"),
    ):
        assert words in picture_of_layer(layer, *sides).remarks
    assert not any("share" in one for one in picture_of_layer(layer, whole, whole).remarks)


def test_groups_that_ranks_share() -> None:
    one = replace(MAMBA, groups=1)
    out = picture_of_layer(one, EngineSettings(), EngineSettings(tp=2))
    assert out.remarks[-1] == (
        "2 ranks of D hold the same conv.B and conv.C: one rank of P serves them all"
    )
    back = picture_of_layer(one, EngineSettings(tp=4), EngineSettings(tp=2))
    assert back.remarks[-1].startswith("4 ranks of P hold the same conv.B and conv.C, and 2 of D")
    assert {(rank, name) for rank, name, _ in back.idle} == {
        (rank, name) for rank in (1, 3) for name in ("conv.B", "conv.C")
    }
    assert not out.idle


def test_what_is_left_out_is_said() -> None:
    panel = picture_of_layer(
        replace(MAMBA, heads=128, groups=1), EngineSettings(tp=32), EngineSettings(tp=16)
    )
    assert len(panel.source) == MAX_RANKS
    assert panel.left_out == (
        "8 of the 32 ranks of P",
        "4 of the 16 ranks of D",
        "24 of the 96 moves",
    )
    assert len(panel.ribbons) == 24
    assert {ribbon.move.src_rank for ribbon in panel.ribbons} == {
        rank.rank for rank in panel.source
    }


def test_a_rank_that_too_many_serve_is_drawn_with_some_of_them() -> None:
    panel = picture_of_layer(replace(MAMBA, groups=1), EngineSettings(tp=32), EngineSettings())
    assert [rank.rank for rank in panel.source] == list(range(MAX_RANKS))
    assert panel.left_out == ("8 of the 32 ranks of P", "18 of the 66 moves")


def test_layers_in_pages_of_other_sizes_are_drawn_apart() -> None:
    model = ModelSpec("m", tuple(replace(MAMBA, layer=i) for i in range(3)))
    layout = build_layout(model, EngineSettings())
    (rank,) = layout.ranks
    padded = replace(rank.regions[1], page_stride_bytes=1 << 22)
    regions = (rank.regions[0], padded, rank.regions[2])
    other = replace(layout, ranks=(replace(rank, regions=regions),))
    plan = make_plan(layout, other)
    panels = make_picture(plan, explain(plan), 1).panels
    assert [panel.layers for panel in panels] == [("0", "2"), ("1",)]


def test_pieces_of_a_token_do_not_go_on_from_token_to_token() -> None:
    model = ModelSpec("m", (KV,))
    source = build_layout(model, EngineSettings(kv_order=KvOrder.NHD))
    plan = make_plan(source, build_layout(model, EngineSettings(page_tokens=8)))
    ranks = explain(plan, Strategy.SLICES, 24)
    (panel,) = make_picture(plan, ranks, 24).panels
    assert panel.remarks[0].startswith("4 reads a token for each rank of D: k and v lie side by")
    (pieces,) = panel.destination[0].pieces
    assert (pieces.count, pieces.bytes, pieces.per) == (4, 2 * 64 * 2, Per.TOKEN)
    assert ranks[0].cost.reads == 24 * pieces.count


def in_one_page(layout: Layout) -> Layout:
    """The same, all regions of a rank one after the other in one page."""
    ranks = []
    for rank in layout.ranks:
        starts, at = dict[str, int](), 0
        for region in rank.regions:
            starts[region.name], at = at, at + region.page_stride_bytes
        shards = tuple(
            replace(s, region="all", offset_bytes=s.offset_bytes + starts[s.region])
            for s in rank.shards
        )
        ranks.append(RankLayout(rank.rank, (Region("all", "state", at, None),), shards))
    return Layout(layout.model, tuple(ranks))


def test_a_page_of_many_layers_is_one_panel_and_its_rest_is_said() -> None:
    model = ModelSpec("m", tuple(replace(MAMBA, layer=i) for i in range(20)))
    layouts = (in_one_page(build_layout(model, EngineSettings(tp=tp))) for tp in (1, 2))
    plan = make_plan(*layouts)
    (panel,) = make_picture(plan, explain(plan), 1).panels
    assert len(panel.layers) == 20
    assert panel.classes["layers.0.conv.x"] == "conv.x"
    assert panel.title.endswith("(0, 1, 2 .. 19): conv.x, conv.B, conv.C, ssm")
    assert panel.remarks[0].startswith("200 reads a page of 20 layers for each rank of D: conv.x,")
    assert panel.left_out == ("48 of the 80 fields", "96 of the 160 moves")
    contents = Counter(c.content for b in panel.source[0].pages[0].stripes for c in b.cells)
    assert contents[Content.REST] == 1
