"""Where the bytes of pages come to lie in a picture: every page has a bar, and a card beside it.

A bar is to scale with all other bars. A card shows the same bytes magnified, each kind of field by
one factor that is the same on all ranks, so that as many bytes are as high everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from restow.broker.draw.page_map import Content, Stripe
from restow.broker.draw.picture import DrawnPage, DrawnRank, Panel

LABEL_HEIGHT = 15.0
LEAST_HEIGHT, MOST_HEIGHT = 26.0, 150.0
"""Of a kind of field on the rank that has least of it."""
LARGEST_HEIGHT = 520.0
"""Of a kind of field on the rank that has most of it."""
LEAST_CELL = 5.5
FIXED_HEIGHTS = {Content.PADDING: 10.0, Content.OTHER_TOKENS: 9.0, Content.REST: 24.0}
"""What is no state is cut short."""
RANK_HEAD, PAGE_HEAD, RANK_GAP = 34.0, 16.0, 16.0


@dataclass(frozen=True, slots=True)
class CardPart:
    """A stripe of a card, from ``top`` to ``bottom``; ``kind`` says how it is magnified."""

    stripe: Stripe
    kind: str
    top: float
    bottom: float


@dataclass(frozen=True, slots=True)
class Card:
    """A page: its bar from ``bar_top`` to ``bar_bottom``, and its parts magnified."""

    page: DrawnPage
    top: float
    bottom: float
    bar_top: float
    bar_bottom: float
    parts: tuple[CardPart, ...]

    def y(self, at: int) -> float:
        """The height at which a byte of the page lies in the card."""
        for part in self.parts:
            if at <= part.stripe.stop:
                size = part.stripe.stop - part.stripe.start
                return part.top + (part.bottom - part.top) * (at - part.stripe.start) / size
        return self.parts[-1].bottom

    def bar_y(self, at: int) -> float:
        """The height at which a byte of the page lies in the bar."""
        return self.bar_top + (self.bar_bottom - self.bar_top) * at / self.page.bytes


@dataclass(frozen=True, slots=True)
class Slot:
    """A rank with its cards."""

    pages: DrawnRank
    top: float
    bottom: float
    cards: tuple[Card, ...]


@dataclass(frozen=True, slots=True)
class Magnification:
    """Pixels of a byte: by kind of field, and of the bars."""

    by_kind: Mapping[str, float]
    kind_of: Mapping[str, str]
    bar: float

    @classmethod
    def of(cls, panel: Panel) -> Magnification:
        """Such that the least rank's cells can be seen, and the largest rank fits on a screen."""
        pages = [page for rank in (*panel.source, *panel.destination) for page in rank.pages]
        kind_of = _kinds([stripe for page in pages for stripe in page.detail])
        by_kind: dict[str, float] = {}
        for kind in dict.fromkeys(kind_of.values()):
            stripes = [[b for b in page.detail if _kind(b, kind_of) == kind] for page in pages]
            by_kind[kind] = _scale([found for found in stripes if found])
        scales = cls(by_kind, kind_of, 1.0)
        bar = min(scales.height(page) / page.bytes for page in pages)
        return cls(by_kind, kind_of, bar)

    def slots(self, ranks: Sequence[DrawnRank], top: float) -> tuple[tuple[Slot, ...], float]:
        """Ranks one below the other, and where the last one ends."""
        found = []
        for rank in ranks:
            at, cards = top + RANK_HEAD, list[Card]()
            for page in rank.pages:
                at += PAGE_HEAD if len(rank.pages) > 1 else 0.0
                cards.append(self._card(page, at))
                at = cards[-1].bottom + 4
            found.append(Slot(rank, top, at, tuple(cards)))
            top = at + RANK_GAP
        return tuple(found), top - RANK_GAP

    def height(self, page: DrawnPage) -> float:
        """Of a page's card."""
        parts = sum(self._height(stripe, kind) for stripe, kind in _with_kinds(page, self.kind_of))
        labels = {
            (cell.name or cell.content, cell.box)
            for stripe in page.detail
            for cell in stripe.cells
            if cell.content is not Content.OTHER_TOKENS
        }
        return max(parts, LABEL_HEIGHT * (len(labels) + 0.3))

    def _card(self, page: DrawnPage, top: float) -> Card:
        height = self.height(page)
        heights = [(b, k, self._height(b, k)) for b, k in _with_kinds(page, self.kind_of)]
        parts, at = list[CardPart](), top + (height - sum(h for _, _, h in heights)) / 2
        for stripe, kind, size in heights:
            parts.append(CardPart(stripe, kind, at, at + size))
            at += size
        bar = self.bar * page.bytes
        bar_top = top + (height - bar) / 2
        return Card(page, top, top + height, bar_top, bar_top + bar, tuple(parts))

    def _height(self, stripe: Stripe, kind: str) -> float:
        if not kind:
            return FIXED_HEIGHTS.get(stripe.cells[0].content, LEAST_HEIGHT)
        return max((stripe.stop - stripe.start) * self.by_kind[kind], 0.5)


def _scale(pages: list[list[Stripe]]) -> float:
    sizes = [sum(stripe.stop - stripe.start for stripe in stripes) for stripes in pages]
    least, most = min(sizes), max(sizes)
    stripes = pages[sizes.index(least)]
    names = {(cell.name, cell.box) for stripe in stripes for cell in stripe.cells}
    cells = [cell.stop - cell.start for b in stripes if b.rows == 1 for cell in b.cells]
    wanted = max(
        LABEL_HEIGHT * len(names),
        LEAST_CELL * least / min(cells) if cells else 0.0,
        LEAST_HEIGHT,
    )
    return min(min(wanted, MOST_HEIGHT) / least, LARGEST_HEIGHT / most)


def _kinds(stripes: Sequence[Stripe]) -> dict[str, str]:
    """For every name its kind: ``conv`` of ``conv.x``. Names in one stripe are of one kind."""
    names = (cell.name for stripe in stripes for cell in stripe.cells if cell.name)
    kinds = {name: name.rpartition(".")[0] or name for name in names}
    for stripe in stripes:
        together = {kinds[cell.name] for cell in stripe.cells if cell.name}
        if len(together) > 1:
            one = min(together)
            kinds = {name: one if kind in together else kind for name, kind in kinds.items()}
    return kinds


def _kind(stripe: Stripe, kind_of: Mapping[str, str]) -> str:
    return next((kind_of[cell.name] for cell in stripe.cells if cell.name), "")


def _with_kinds(page: DrawnPage, kind_of: Mapping[str, str]) -> list[tuple[Stripe, str]]:
    """Stripes with their kinds; scratch memory is magnified as the state before it is."""
    found: list[tuple[Stripe, str]] = []
    for stripe in page.detail:
        kind = _kind(stripe, kind_of)
        if not kind and stripe.cells[0].content is Content.SCRATCH and found:
            kind = found[-1][1]
        found.append((stripe, kind))
    return found
