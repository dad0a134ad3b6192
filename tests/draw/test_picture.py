"""The picture of a plan: bytes of pages, moves, pieces and sentences, against the layouts."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings

from laws.strategies import Case, any_cases, family_cases
from restow.broker.draw.explain import explain
from restow.broker.draw.layer_pages import Cell, Content, LayerPages, Page, plan_layers, strands
from restow.broker.draw.picture import MAX_RANKS, Panel, Picture, count_pieces, make_picture
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
from restow.broker.layout.difference import field_class
from restow.broker.planner import Move, Place, Strategy, make_plan
from restow.broker.planner.table import Cutter

BF16, F32 = DType.BFLOAT16, DType.FLOAT32
MAMBA = Mamba2Spec(0, 64, 64, 128, 8, 4, BF16, F32)
KV = AttentionSpec(0, 4, 64, BF16)
DS = ConvLayout.DS
PLAIN = ModelSpec("m", (KV, replace(KV, layer=1)))
MTP = replace(PLAIN, draft_layers=(replace(KV, layer=2),), draft="mtp")


def picture_of(model: ModelSpec, source: EngineSettings, destination: EngineSettings) -> Picture:
    plan = make_plan(build_layout(model, source), build_layout(model, destination))
    return make_picture(plan, explain(plan), 100)


def panel_of(
    layer: Mamba2Spec | AttentionSpec | MlaSpec, source: EngineSettings, destination: EngineSettings
) -> Panel:
    (panel,) = picture_of(ModelSpec("m", (layer,)), source, destination).panels
    return panel


def places(held: Shard | Scratch | Place, sizes: Sequence[int]) -> Iterator[int]:
    """Yield the place of every byte of a box that begins at the offset of ``held``."""
    for index in itertools.product(*map(range, sizes)):
        steps = zip(index, held.strides_bytes, strict=True)
        first = held.offset_bytes + sum(i * step for i, step in steps)
        yield from range(first, first + held.dtype.itemsize_bytes)


def sizes(box: Sequence[Span]) -> list[int]:
    return [span.size for span in box]


def check_page(page: Page, rank: RankLayout, layer: LayerPages) -> None:
    """Check that every byte lies in one cell, and that the cell says what the byte is."""
    region = rank.region(page.region)
    names = {field.name: name for name, field in layer.fields.items()}
    shards = [shard for shard in rank.shards if shard.region == region.name]
    own = [shard for shard in shards if shard.field in names]
    expected: dict[int, Cell] = {}
    for shard in own:
        cell = Cell(0, 0, Content.STATE, names[shard.field], shard.box)
        expected |= dict.fromkeys(places(shard, sizes(shard.box)), cell)
    shown = range(min(expected), max(expected) + 1)
    layers = {shard.field.removesuffix(field_class(shard.field)) or shard.field for shard in shards}
    if len(layers) == 1 and not region.page_tokens:
        shown = range(region.page_stride_bytes)
        for held in (one for one in rank.scratch if one.region == region.name):
            expected |= dict.fromkeys(places(held, held.sizes), Cell(0, 0, Content.SCRATCH))
    assert [byte for cell in page.cells for byte in range(cell.start, cell.stop)] == [*shown]
    for cell in page.cells:
        for byte in range(cell.start, cell.stop):
            found = expected.get(byte)
            if cell.mixed:
                assert found is None or found.label in (cell.label, *cell.mixed)
            elif found is None:
                assert cell.content in (Content.PADDING, Content.OTHER)
            else:
                assert (cell.content, cell.name, cell.box) == (found.content, found.name, found.box)


@settings(max_examples=80, derandomize=True)
@given(any_cases())
def test_every_byte_of_a_page_is_drawn_once_and_as_what_it_is(case: Case) -> None:
    for layer in plan_layers(make_plan(*case.layouts)):
        sides = zip((layer.source, layer.destination), case.layouts, strict=False)
        for ranks, layout in sides:
            by_number = {rank.rank: rank for rank in layout.ranks}
            for rank in ranks:
                for page in rank.pages:
                    check_page(page, by_number[rank.rank], layer)


@settings(max_examples=80, derandomize=True)
@given(family_cases())
def test_pages_of_families_are_told_apart_to_the_last_byte(case: Case) -> None:
    for layer in plan_layers(make_plan(*case.layouts)):
        for rank in (*layer.source, *layer.destination):
            assert not [cell for page in rank.pages for cell in page.cells if cell.mixed]


@settings(max_examples=80, derandomize=True)
@given(any_cases())
def test_every_move_is_drawn_from_its_bytes_to_its_bytes(case: Case) -> None:
    plan = make_plan(*case.layouts)
    layers = {layer.name: layer for layer in plan_layers(plan)}
    assert Counter(m for layer in layers.values() for m in layer.moves) == Counter(plan.moves)
    panels = make_picture(plan, explain(plan), 5).panels
    assert sorted(name for panel in panels for name in panel.layers) == sorted(layers)
    for panel in panels:
        assert panel.shown == layers[panel.layers[0]]
        for name in panel.layers:
            forms = (
                [(field_class(move.field), move.box) for move in layer.moves]
                for layer in (panel.shown, layers[name])
            )
            assert next(forms) == next(forms)
        for move in panel.shown.moves:
            for spans, place in zip(
                zip(*strands(move), strict=True), (move.src, move.dst), strict=True
            ):
                expected = {*places(place, sizes(move.box))}
                covered = {at for one in spans for at in range(one.start, one.stop)}
                assert expected <= covered
                assert (min(expected), max(expected)) == (min(covered), max(covered))


def test_a_move_has_a_strand_for_every_row_of_a_window() -> None:
    # Three taps lie apart under SD, and end in one stretch under DS, in turns.
    row, half = 6144 * 2, 2048 * 2
    apart = [Span(tap * row + half, tap * row + 2 * half) for tap in range(3)]
    turns = [Span(2 * tap, 3 * half - 4 + 2 * tap) for tap in range(3)]
    for tps, layouts, expected in (
        ((1, 2), (ConvLayout.SD, ConvLayout.SD), (apart, None)),
        ((1, 2), (ConvLayout.SD, DS), (apart, turns)),
        ((2, 1), (DS, ConvLayout.SD), (None, apart)),
    ):
        sides = (EngineSettings(tp=n, conv_layout=one) for n, one in zip(tps, layouts, strict=True))
        moves = panel_of(MAMBA, *sides).shown.moves
        (move,) = (m for m in moves if m.field.endswith("conv.x") and 1 in (m.src_rank, m.dst_rank))
        for found, wanted in zip(zip(*strands(move), strict=True), expected, strict=True):
            assert wanted is None or [*found] == wanted


def test_layers_that_are_alike_are_drawn_once_on_whatever_ranks() -> None:
    layers = tuple(replace(KV if i % 4 == 3 else MAMBA, layer=i) for i in range(12))
    model = ModelSpec("m", layers)
    mamba, kv = picture_of(model, EngineSettings(tp=2, pp=2), EngineSettings(tp=2)).panels
    assert mamba.layers == ("0", "1", "2", "4", "5", "6", "8", "9", "10")
    assert mamba.title == "9 layers (0, 1, 2 .. 10): conv.x, conv.B, conv.C, ssm"
    assert kv.remarks[1:3] == (
        "Layer 3: from ranks 0, 1 of P to ranks 0, 1 of D.",
        "Layers 7, 11: from ranks 2, 3 of P to ranks 0, 1 of D.",
    )
    assert {move.src_rank for move in kv.shown.moves} == {0, 1}
    windowed = tuple(replace(KV, layer=i, window_tokens=8 * (i % 2)) for i in range(4))
    panels = picture_of(ModelSpec("m", windowed), EngineSettings(), EngineSettings()).panels
    assert [panel.layers for panel in panels] == [("0", "2"), ("1", "3")]
    assert "of the last 8 tokens" in panels[1].remarks[0]


@pytest.mark.parametrize(
    ("layer", "source", "destination", "words"),
    [
        (
            MAMBA,
            EngineSettings(tp=2, conv_layout=DS),
            EngineSettings(tp=4, conv_layout=DS),
            "a layer falls into 4 pieces: conv.x 6.0 KiB, conv.B 1.5 KiB, conv.C 1.5 KiB, "
            "ssm 512.0 KiB.",
        ),
        (
            MAMBA,
            EngineSettings(tp=2),
            EngineSettings(tp=2),
            "a layer falls into 1 piece: conv.x, conv.B, conv.C and ssm together 1.0 MiB.",
        ),
        (
            MAMBA,
            EngineSettings(tp=2),
            EngineSettings(tp=4),
            "a layer falls into 10 pieces: conv.x 3 \u00d7 2.0 KiB, conv.B 3 \u00d7 512 B, "
            "conv.C 3 \u00d7 512 B (apart for each tap); ssm 512.0 KiB.",
        ),
        (
            KV,
            EngineSettings(tp=1),
            EngineSettings(tp=2),
            "a page falls into 1 piece: k and v together 8.0 KiB.",
        ),
        (
            KV,
            EngineSettings(tp=1),
            EngineSettings(tp=2, page_tokens=8),
            "a page falls into 2 pieces: k and v together 2 \u00d7 2.0 KiB (apart for each head).",
        ),
        (
            KV,
            EngineSettings(tp=2),
            EngineSettings(tp=1),
            "a page falls into 2 pieces: k and v together 2 \u00d7 8.0 KiB (from 2 ranks of P).",
        ),
        (
            KV,
            EngineSettings(kv_order=KvOrder.NHD, page_tokens=1),
            EngineSettings(page_tokens=8),
            "a token falls into 4 pieces: k and v together 4 \u00d7 256 B (apart for each head).",
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
    assert panel.remarks[1] == f"For each rank of D {words}"
    moves: dict[int, list[Move]] = defaultdict(list)
    for move in plan.moves:
        moves[move.dst_rank].append(move)
    cutter = Cutter(plan)
    counts = [sum(one.count for one in count_pieces(cutter, its)) for its in moves.values()]
    assert counts == [rank.cost.reads for rank in ranks]


def test_words_about_a_transpose_a_cast_and_scratch_rows() -> None:
    half = replace(MAMBA, ssm_dtype=BF16)
    plan = make_plan(
        build_layout(ModelSpec("m", (half,)), EngineSettings(tp=2)),
        build_layout(ModelSpec("m", (MAMBA,)), EngineSettings(tp=2, conv_layout=DS)),
    )
    (panel,) = make_picture(plan, explain(plan), 1).panels
    _, pieces, cast = panel.remarks
    assert "2 B (single elements, because channel is innermost on P and tap on D)" in pieces
    assert "2 B (single elements, because state is innermost on P and tap on D)" in pieces
    assert cast == "Cast on the way from bfloat16 to float32: ssm."
    for layout in (ConvLayout.SD, DS):
        settings = EngineSettings(conv_rows_extra=2, conv_layout=layout)
        spare = panel_of(MAMBA, EngineSettings(), settings)
        assert spare.remarks[-1] == "The scratch rows of D are zeroed."


def test_shards_and_scratch_rows_in_fine_turns_are_mixed_cells() -> None:
    # Each of the 4,096 channels has three taps and two scratch rows, one behind the other.
    settings = EngineSettings(conv_rows_extra=2, conv_layout=DS)
    ((page,),) = (rank.pages for rank in panel_of(MAMBA, settings, settings).shown.source)
    assert [(cell.label, cell.bytes, cell.mixed) for cell in page.cells] == [
        ("conv.x", 4096 * 5 * 2, ("scratch",)),
        ("conv.B", 1024 * 5 * 2, ("scratch",)),
        ("conv.C", 1024 * 5 * 2, ("scratch",)),
        ("ssm", 64 * 64 * 128 * 4, ()),
    ]


def test_tokens_that_ranks_share_out() -> None:
    layer = MlaSpec(0, 8, BF16)
    shared, whole = EngineSettings(tp=4, dcp=4, interleave_tokens=2), EngineSettings(tp=2)
    said = "divide the tokens into 4 parts, 2 in turn"
    for sides, words in (
        ((shared, whole), f"The ranks of P {said}: each token is read from a rank that holds it."),
        ((whole, shared), f"The ranks of D {said}: each token is read from a rank that holds it."),
        (
            (shared, shared),
            f"The ranks of P {said}, and the ranks of D {said}: pages move as pages.",
        ),
    ):
        assert words in panel_of(layer, *sides).remarks
    assert not any("divide" in one for one in panel_of(layer, whole, whole).remarks)


def test_fields_that_ranks_hold_alike() -> None:
    one = replace(MAMBA, groups=1)
    for tps, holding in (
        ((1, 2), "2 ranks of D"),
        ((2, 1), "2 ranks of P"),
        ((4, 2), "4 ranks of P and 2 ranks of D"),
    ):
        said = f"{holding} hold the same conv.B and conv.C: each rank of D reads one copy."
        assert panel_of(one, *(EngineSettings(tp=tp) for tp in tps)).remarks[-1] == said


@pytest.mark.parametrize(
    ("destination", "said", "moves"),
    [
        (16, "Only 8 of the 32 ranks of P, 4 of the 16 ranks of D, 24 of the 96 moves", 24),
        (1, "Only 8 of the 32 ranks of P, 18 of the 66 moves", 18),
    ],
)
def test_what_is_left_out_is_said(destination: int, said: str, moves: int) -> None:
    # Ranks of D are shown with all ranks that serve them, if they can be.
    layer = replace(MAMBA, heads=128, groups=1)
    panel = panel_of(layer, EngineSettings(tp=32), EngineSettings(tp=destination))
    assert panel.remarks[-1] == f"{said} are drawn."
    assert [rank.rank for rank in panel.shown.source] == list(range(MAX_RANKS))
    assert len(panel.shown.moves) == moves


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


def in_one_page(layout: Layout) -> Layout:
    """Return the same layout, with all regions of a rank one after the other in one page."""
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


def test_of_a_page_of_many_layers_one_layer_is_drawn() -> None:
    model = ModelSpec("m", tuple(replace(MAMBA, layer=i) for i in range(20)))
    layouts = (in_one_page(build_layout(model, EngineSettings(tp=tp))) for tp in (1, 2))
    plan = make_plan(*layouts)
    (panel,) = make_picture(plan, explain(plan), 1).panels
    assert panel.title.startswith("20 layers (0, 1, 2 .. 19)")
    (page,) = panel.shown.source[0].pages
    assert {cell.label for cell in page.cells} == {"conv.x", "conv.B", "conv.C", "ssm"}
    assert page.bytes == 20 * sum(cell.bytes for cell in page.cells)


@pytest.mark.parametrize("cross_layer", [False, True])
@pytest.mark.parametrize(
    ("source", "destination", "title"),
    [
        (PLAIN, MTP, "2 layers (0, 1): k, v"),
        (MTP, PLAIN, "2 layers (0, 1): k, v"),
        (MTP, MTP, "3 layers (0, 1, 2): k, v"),
        (MTP, replace(MTP, draft="other"), "2 layers (0, 1): k, v"),
    ],
    ids=["d", "p", "both", "another"],
)
def test_fields_of_drafts_are_drawn_if_they_move(
    source: ModelSpec, destination: ModelSpec, title: str, cross_layer: bool
) -> None:
    settings = EngineSettings(cross_layer_blocks=cross_layer)
    plan = make_plan(
        build_layout(source, settings), build_layout(destination, replace(settings, tp=2))
    )
    assert [panel.title for panel in make_picture(plan, explain(plan), 100).panels] == [title]
