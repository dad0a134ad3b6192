"""The pages of one rank, drawn: a bar to scale, a lens, and a card with names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from restow.broker.draw.page_map import Cell, Content
from restow.broker.draw.picture import Panel
from restow.broker.draw.pieces import Per
from restow.broker.draw.quantities import size_text
from restow.broker.draw.scale import LABEL_HEIGHT, Card, Part, Scales, Slot
from restow.broker.draw.svg import TIMES, fitted, points, tag, text, words
from restow.broker.layout import Box

BAR, LENS, LABELS, BAND = 26.0, 34.0, 252.0, 38.0
INK, QUIET = "#1f2430", "#5c6470"
_FILLS = {
    Content.SCRATCH: "#c3c7cd",
    Content.INPUTS: "#d9cfb4",
    Content.PADDING: "url(#hatch)",
    Content.OTHER_TOKENS: "#ffffff",
    Content.REST: "#e3e5e9",
    Content.WOVEN: "#8d949e",
}


@dataclass(frozen=True, slots=True)
class Side:
    """Where the columns of a side begin: P's from the left, D's the other way round."""

    name: str
    bar: float
    lens: tuple[float, float]
    """From the bar's edge to the card's."""
    labels: float
    band: float
    outer: float

    @classmethod
    def left(cls, edge: float) -> Side:
        """P's side, from the left margin on."""
        lens = edge + BAR
        return cls("P", edge, (lens, lens + LENS), lens + LENS, lens + LENS + LABELS, edge)

    @classmethod
    def right(cls, edge: float) -> Side:
        """D's side, up to the right margin."""
        bar = edge - BAR
        labels = bar - LENS - LABELS
        return cls("D", bar, (bar, bar - LENS), labels, labels - BAND, labels - BAND)


def draw_slot(
    panel: Panel, side: Side, slot: Slot, scales: Scales, colours: dict[str, str], index: int
) -> Iterator[str]:
    """A rank: its number, what it reads, and its cards."""
    left = min(side.bar, side.band)
    others = {
        ranks[index]
        for stage in panel.stages[1:]
        if index < len(ranks := stage.src_ranks if side.name == "P" else stage.dst_ranks)
    } - {slot.pages.rank}
    also = f" (and {', '.join(map(str, sorted(others)))})" if others else ""
    pages = slot.cards
    size = "" if len(pages) != 1 else f"page of {short_size(pages[0].page.bytes)}"
    if pages and pages[0].page.tokens:
        size += f"{', ' if size else 'pages of '}{pages[0].page.tokens} tokens"
    head = f"{side.name} rank {slot.pages.rank}{also}"
    yield text(left, slot.top + 13, head, class_="b s")
    yield text(left + BAR + LENS + LABELS + BAND, slot.top + 13, size, class_="q e")
    reads = _reads(panel, slot)
    if reads:
        shown = fitted(reads, BAR + LENS + LABELS + BAND, 11 * 0.93)
        yield text(left, slot.top + 28, shown, class_="q")
    for card in slot.cards:
        if len(slot.cards) > 1:
            yield text(side.labels, card.top - 4, fitted(card.page.region, LABELS, 11), class_="q")
        yield from _card(panel, side, slot, card, scales, colours)


def _reads(panel: Panel, slot: Slot) -> str:
    """The pieces of a layer, such as ``4 pieces a layer: 3 x 2 KiB, 64 KiB``."""
    if not slot.pages.pieces:
        return ""
    counts: dict[int, int] = {}
    for one in slot.pages.pieces:
        counts[one.bytes] = counts.get(one.bytes, 0) + one.count
    found = [(f"{n:,} {TIMES} " if n > 1 else "") + short_size(size) for size, n in counts.items()]
    count = sum(one.count for one in slot.pages.pieces)
    per = dict.fromkeys(
        panel.word if one.per is Per.LAYER else one.per.value for one in slot.pages.pieces
    )
    return f"{count:,} piece{'s' * (count > 1)} a {' and '.join(per)}: {', '.join(found)}"


def short_size(size_bytes: float) -> str:
    """As `size_text`, without a zero behind the point.

    >>> short_size(2048), short_size(2560)
    ('2 KiB', '2.5 KiB')
    """
    return size_text(size_bytes).replace(".0 ", " ")


def _card(
    panel: Panel, side: Side, slot: Slot, card: Card, scales: Scales, colours: dict[str, str]
) -> Iterator[str]:
    idle = {(name, box) for rank, name, box in panel.idle if rank == slot.pages.rank}
    if side.name == "D":
        idle = set()
    yield from _lenses(side, card, scales)
    yield from _bar(side, card, colours)
    x = min(side.labels, side.band)
    width = LABELS + BAND
    yield tag(
        "rect", x=x, y=card.top, width=width, height=card.bottom - card.top, rx=3,
        fill="#ffffff", fill_opacity="0.7", stroke="#b8bcc2",
    )  # fmt: skip
    for part in card.parts:
        for cell in part.block.cells:
            yield from _band_cell(side, part, cell, colours, (cell.name, cell.box) in idle)
    yield from _labels(panel, side, card, idle)


def _lenses(side: Side, card: Card, scales: Scales) -> Iterator[str]:
    """From each stretch of the bar to where the card shows it."""
    stretches: list[list[Part]] = []
    factors = {kind: _factor(scale / scales.bar) for kind, scale in scales.by_kind.items()}
    for part in card.parts:
        if stretches and factors.get(stretches[-1][0].kind) == factors.get(part.kind):
            stretches[-1].append(part)
        else:
            stretches.append([part])
    x0, x1 = side.lens
    said: dict[str, str] = {}
    for index, parts in enumerate(stretches):
        kind = parts[0].kind
        if not kind:
            continue
        top, bottom = card.bar_y(parts[0].block.start), card.bar_y(parts[-1].block.stop)
        corners = [(x0, top), (x1, parts[0].top), (x1, parts[-1].bottom), (x0, bottom)]
        shade = "#e9ebee" if index % 2 else "#dfe3e8"
        yield tag("polygon", points=points(corners), fill=shade)
        factor = factors[kind]
        if (
            factor not in said
            and scales.by_kind[kind] > 1.15 * scales.bar
            and parts[-1].bottom - parts[0].top > 9
        ):
            middle = (corners[1][1] + corners[2][1]) / 2
            x, anchor = (x1 - 3, "n e") if x1 > x0 else (x1 + 3, "n")
            said[factor] = text(x, middle + 3, f"{TIMES}{factor}", class_=anchor)
    yield from said.values()


def _factor(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{float(f'{value:.2g}'):,.0f}"


def _bar(side: Side, card: Card, colours: dict[str, str]) -> Iterator[str]:
    """The page to scale; cells of rows side by side."""
    for block in card.page.blocks:
        top, bottom = card.bar_y(block.start), card.bar_y(block.stop)
        for cell in block.cells:
            x, width, y, height = side.bar, BAR, top, bottom - top
            if block.rows > 1:
                x += BAR * cell.start / block.row_bytes
                width = BAR * (cell.stop - cell.start) / block.row_bytes
            else:
                y += height * cell.start / block.row_bytes
                height *= (cell.stop - cell.start) / block.row_bytes
            yield tag(
                "rect", x=x, y=y, width=width, height=max(height, 0.2), fill=_fill(cell, colours)
            )
    for block in card.page.token_blocks:
        if block.cells[0].content is Content.STATE:
            top, bottom = card.bar_y(block.start), card.bar_y(block.stop)
            yield tag("rect", x=side.bar, y=top, width=BAR, height=max(bottom - top, 0.6), fill=INK)
    yield tag(
        "rect", x=side.bar, y=card.bar_top, width=BAR, height=card.bar_bottom - card.bar_top,
        fill="none", stroke=QUIET, stroke_width="0.8",
    )  # fmt: skip


def _fill(cell: Cell, colours: dict[str, str]) -> str:
    return colours[cell.name] if cell.content is Content.STATE else _FILLS[cell.content]


def _band_cell(
    side: Side, part: Part, cell: Cell, colours: dict[str, str], idle: bool
) -> Iterator[str]:
    x, width, y, height = side.band, BAND, part.top, part.bottom - part.top
    if part.block.rows > 1:
        x += BAND * cell.start / part.block.row_bytes
        width = BAND * (cell.stop - cell.start) / part.block.row_bytes
    else:
        y += height * cell.start / part.block.row_bytes
        height *= (cell.stop - cell.start) / part.block.row_bytes
    look = {"fill": _fill(cell, colours), "stroke": "#ffffff", "stroke_width": "0.6"}
    if idle:
        look |= {"fill": "#ffffff", "stroke": colours[cell.name], "stroke_dasharray": "3 2"}
        look["stroke_width"] = "1.2"
    yield tag("rect", x=x, y=y, width=width, height=height, **look)


def _labels(panel: Panel, side: Side, card: Card, idle: set[tuple[str, Box]]) -> Iterator[str]:
    """A name for every shard, beside the first of its bytes, none on top of another."""
    first: dict[tuple[str, Box, Content], tuple[float, float]] = {}
    sizes: dict[object, list[int]] = {}
    for part in card.parts:
        for cell in part.block.cells:
            if cell.content is Content.OTHER_TOKENS:
                continue
            key: tuple[str, Box, Content] = cell.name, cell.box, cell.content
            top, bottom = _extent(part, cell)
            first.setdefault(key, (top, bottom))
            sizes.setdefault(key, []).append(part.block.rows * (cell.stop - cell.start))
    wanted = [((top + bottom) / 2, key) for key, (top, bottom) in first.items()]
    places = _spread([y for y, _ in wanted], card.top + 9, card.bottom - 9)
    inner = side.band if side.name == "P" else side.band + BAND
    step = -1 if side.name == "P" else 1
    for (y, key), place in zip(wanted, places, strict=True):
        name, box, content = key
        line = [(inner, y), (inner + 5 * step, y), (inner + 11 * step, place)]
        yield tag(
            "polyline", points=points(line), fill="none", stroke="#9aa0a9", stroke_width="0.7"
        )
        size = _size(sizes[key])
        room = LABELS - 22
        label = name if content in (Content.STATE, Content.WOVEN) else content.value
        where = panel.where(name, box) if content is Content.STATE else ""
        where = f"not read, {where}" if (name, box) in idle else where
        start = side.labels + (7 if side.name == "P" else 15)
        shown = fitted(label, room - len(size) * 6.2, 11)
        where = fitted(where, room - (len(shown) + len(size) + 1) * 6.2, 10.4) if where else ""
        bold = tag("tspan", words(shown), class_="b")
        yield tag("text", bold, words(f" {where}"), x=start, y=place + 4)
        yield text(start + room, place + 4, size, class_="q e")


def _size(parts: list[int]) -> str:
    """Of all parts of a shard, such as ``3 x 4 KiB``."""
    count, size = len(parts), short_size(sum(parts))
    if count == 1:
        return size
    same = len(set(parts)) == 1
    return f"{count} {TIMES} {short_size(parts[0])}" if same else f"{size} in {count}"


def _extent(part: Part, cell: Cell) -> tuple[float, float]:
    if part.block.rows > 1:
        return part.top, part.bottom
    height = (part.bottom - part.top) / part.block.row_bytes
    return part.top + height * cell.start, part.top + height * cell.stop


def _spread(wanted: list[float], least: float, most: float) -> list[float]:
    """Heights near the wanted ones, in their order, no two closer than a line."""
    places: list[float] = []
    for y in wanted:
        places.append(max(y, places[-1] + LABEL_HEIGHT if places else least))
    limit = most
    for index in range(len(places) - 1, -1, -1):
        places[index] = min(places[index], limit)
        limit = places[index] - LABEL_HEIGHT
    return places
