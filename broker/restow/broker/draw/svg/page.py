"""The pages of one rank, drawn: a bar to scale, a lens, and a card with names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Literal

from restow.broker.draw.bytes_and_seconds import size_text
from restow.broker.draw.page_map import Cell, Content, Stripe
from restow.broker.draw.picture import Panel
from restow.broker.draw.piece_counts import Per
from restow.broker.draw.svg.cards import LABEL_HEIGHT, Card, CardPart, Magnification, Slot
from restow.broker.draw.svg.elements import TIMES, fitted, points, tag, text, words
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


class SideDrawing:
    """Draws the ranks of one side: columns from the left margin on for P, the other way for D."""

    def __init__(
        self,
        panel: Panel,
        scales: Magnification,
        colours: dict[str, str],
        name: Literal["P", "D"],
        edge: float,
    ) -> None:
        """``colours`` are those of all names, ``edge`` is where the margin ends."""
        self._panel, self._scales, self._colours, self._name = panel, scales, colours, name
        if name == "P":
            self._bar, lens, card = edge, edge + BAR, edge + BAR + LENS
            self._labels, self._band = card, card + LABELS
        else:
            self._bar = lens = edge - BAR
            card = lens - LENS
            self._labels, self._band = card - LABELS, card - LABELS - BAND
        self._lens = lens, card

    def draw_rank(self, slot: Slot, index: int) -> Iterator[str]:
        """A rank: its number, what it reads, and its cards."""
        left = min(self._bar, self._band)
        others = {
            ranks[index]
            for stage in self._panel.stages[1:]
            if index < len(ranks := stage.src_ranks if self._name == "P" else stage.dst_ranks)
        } - {slot.pages.rank}
        also = f" (and {', '.join(map(str, sorted(others)))})" if others else ""
        pages = slot.cards
        size = "" if len(pages) != 1 else f"page of {short_size(pages[0].page.bytes)}"
        if pages and pages[0].page.tokens:
            size += f"{', ' if size else 'pages of '}{pages[0].page.tokens} tokens"
        head = f"{self._name} rank {slot.pages.rank}{also}"
        yield text(left, slot.top + 13, head, class_="b s")
        yield text(left + BAR + LENS + LABELS + BAND, slot.top + 13, size, class_="q e")
        reads = _reads(self._panel, slot)
        if reads:
            shown = fitted(reads, BAR + LENS + LABELS + BAND, 11 * 0.93)
            yield text(left, slot.top + 28, shown, class_="q")
        for card in slot.cards:
            if len(slot.cards) > 1:
                yield text(
                    self._labels, card.top - 4, fitted(card.page.region, LABELS, 11), class_="q"
                )
            yield from self._draw_card(slot, card)

    def _draw_card(self, slot: Slot, card: Card) -> Iterator[str]:
        rank = slot.pages.rank if self._name == "P" else None
        idle = {(name, box) for held_by, name, box in self._panel.idle if held_by == rank}
        yield from self._draw_lenses(card)
        yield from self._draw_bar(card)
        x = min(self._labels, self._band)
        width = LABELS + BAND
        yield tag(
            "rect", x=x, y=card.top, width=width, height=card.bottom - card.top, rx=3,
            fill="#ffffff", fill_opacity="0.7", stroke="#b8bcc2",
        )  # fmt: skip
        for part in card.parts:
            for cell in part.stripe.cells:
                yield from self._draw_cell(part, cell, (cell.name, cell.box) in idle)
        yield from self._draw_labels(card, idle)

    def _draw_lenses(self, card: Card) -> Iterator[str]:
        """From each stretch of the bar to where the card shows it."""
        factors = {
            kind: _factor(scale / self._scales.bar) for kind, scale in self._scales.by_kind.items()
        }
        x0, x1 = self._lens
        said: dict[str, str] = {}
        stretches = groupby(card.parts, key=lambda part: factors.get(part.kind))
        for index, (factor, (first, *others)) in enumerate(stretches):
            if factor is None:
                continue
            last = others[-1] if others else first
            top, bottom = card.bar_y(first.stripe.start), card.bar_y(last.stripe.stop)
            corners = [(x0, top), (x1, first.top), (x1, last.bottom), (x0, bottom)]
            shade = "#e9ebee" if index % 2 else "#dfe3e8"
            yield tag("polygon", points=points(corners), fill=shade)
            magnified = self._scales.by_kind[first.kind] > 1.15 * self._scales.bar
            if factor not in said and magnified and last.bottom - first.top > 9:
                middle = (first.top + last.bottom) / 2
                x, anchor = (x1 - 3, "n e") if x1 > x0 else (x1 + 3, "n")
                said[factor] = text(x, middle + 3, f"{TIMES}{factor}", class_=anchor)
        yield from said.values()

    def _draw_bar(self, card: Card) -> Iterator[str]:
        """The page to scale."""
        for stripe in card.page.stripes:
            top, bottom = card.bar_y(stripe.start), card.bar_y(stripe.stop)
            for cell in stripe.cells:
                place = _place(stripe, cell, self._bar, BAR, top, bottom)
                place["height"] = max(place["height"], 0.2)
                yield tag("rect", **place, fill=self._fill(cell))
        for stripe in card.page.token_stripes:
            if stripe.cells[0].content is Content.STATE:
                top, bottom = card.bar_y(stripe.start), card.bar_y(stripe.stop)
                yield tag(
                    "rect", x=self._bar, y=top, width=BAR, height=max(bottom - top, 0.6), fill=INK
                )
        yield tag(
            "rect", x=self._bar, y=card.bar_top, width=BAR, height=card.bar_bottom - card.bar_top,
            fill="none", stroke=QUIET, stroke_width="0.8",
        )  # fmt: skip

    def _fill(self, cell: Cell) -> str:
        return self._colours[cell.name] if cell.content is Content.STATE else _FILLS[cell.content]

    def _draw_cell(self, part: CardPart, cell: Cell, idle: bool) -> Iterator[str]:
        place = _place(part.stripe, cell, self._band, BAND, part.top, part.bottom)
        look = {"fill": self._fill(cell), "stroke": "#ffffff", "stroke_width": "0.6"}
        if idle:
            look = {"fill": "#ffffff", "stroke": self._colours[cell.name]}
            look |= {"stroke_width": "1.2", "stroke_dasharray": "3 2"}
        yield tag("rect", **place, **look)

    def _draw_labels(self, card: Card, idle: set[tuple[str, Box]]) -> Iterator[str]:
        """A name for every shard, beside the first of its bytes, none on top of another."""
        middle: dict[tuple[str, Box, Content], float] = {}
        sizes: dict[object, list[int]] = defaultdict(list)
        for part in card.parts:
            for cell in part.stripe.cells:
                if cell.content is Content.OTHER_TOKENS:
                    continue
                key: tuple[str, Box, Content] = cell.name, cell.box, cell.content
                place = _place(part.stripe, cell, 0, 0, part.top, part.bottom)
                middle.setdefault(key, place["y"] + place["height"] / 2)
                sizes[key].append(part.stripe.rows * (cell.stop - cell.start))
        places = _spread(middle.values(), card.top + 9, card.bottom - 9)
        inner = self._band if self._name == "P" else self._band + BAND
        step = -1 if self._name == "P" else 1
        for ((name, box, content), y), at in zip(middle.items(), places, strict=True):
            line = [(inner, y), (inner + 5 * step, y), (inner + 11 * step, at)]
            yield tag(
                "polyline", points=points(line), fill="none", stroke="#9aa0a9", stroke_width="0.7"
            )
            size = _size(sizes[name, box, content])
            room = LABELS - 22
            label = name if content in (Content.STATE, Content.WOVEN) else content.value
            where = self._panel.where(name, box) if content is Content.STATE else ""
            where = f"not read, {where}" if (name, box) in idle else where
            start = self._labels + (7 if self._name == "P" else 15)
            shown = fitted(label, room - len(size) * 6.2, 11)
            where = fitted(where, room - (len(shown) + len(size) + 1) * 6.2, 10.4) if where else ""
            bold = tag("tspan", words(shown), class_="b")
            yield tag("text", bold, words(f" {where}"), x=start, y=at + 4)
            yield text(start + room, at + 4, size, class_="q e")


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


def _factor(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{float(f'{value:.2g}'):,.0f}"


def _size(parts: list[int]) -> str:
    """Of all parts of a shard, such as ``3 x 4 KiB``."""
    count, size = len(parts), short_size(sum(parts))
    if count == 1:
        return size
    same = len(set(parts)) == 1
    return f"{count} {TIMES} {short_size(parts[0])}" if same else f"{size} in {count}"


def _place(
    stripe: Stripe, cell: Cell, left: float, width: float, top: float, bottom: float
) -> dict[str, float]:
    """Where a cell of a stripe is drawn: those of many rows side by side, of one below another."""
    height, start, size = bottom - top, cell.start, cell.stop - cell.start
    if stripe.rows > 1:
        left, width = left + width * start / stripe.row_bytes, width * size / stripe.row_bytes
    else:
        top, height = top + height * start / stripe.row_bytes, height * size / stripe.row_bytes
    return {"x": left, "y": top, "width": width, "height": height}


def _spread(wanted: Iterable[float], least: float, most: float) -> list[float]:
    """Heights near the wanted ones, in their order, no two closer than a line."""
    places: list[float] = []
    for y in wanted:
        places.append(max(y, places[-1] + LABEL_HEIGHT if places else least))
    for index in reversed(range(len(places))):
        places[index] = min(places[index], most)
        most = places[index] - LABEL_HEIGHT
    return places
