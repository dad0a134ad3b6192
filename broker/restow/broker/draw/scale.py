"""Where the bytes of pages come to lie in a picture: every page has a bar, and a card beside it.

A bar is to scale with all other bars. A card shows the same bytes magnified, each kind of field by
one factor that is the same on all ranks, so that as many bytes are as high everywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from restow.broker.draw.page_map import Block, Content
from restow.broker.draw.picture import Page, Panel, RankPages

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
class Part:
    """A block of a card, from ``top`` to ``bottom``; ``kind`` says how it is magnified."""

    block: Block
    kind: str
    top: float
    bottom: float


@dataclass(frozen=True, slots=True)
class Card:
    """A page: its bar from ``bar_top`` to ``bar_bottom``, and its parts magnified."""

    page: Page
    top: float
    bottom: float
    bar_top: float
    bar_bottom: float
    parts: tuple[Part, ...]

    def y(self, at: int) -> float:
        """The height at which a byte of the page lies in the card."""
        for part in self.parts:
            if at <= part.block.stop:
                size = part.block.stop - part.block.start
                return part.top + (part.bottom - part.top) * (at - part.block.start) / size
        return self.parts[-1].bottom

    def bar_y(self, at: int) -> float:
        """The height at which a byte of the page lies in the bar."""
        return self.bar_top + (self.bar_bottom - self.bar_top) * at / self.page.bytes


@dataclass(frozen=True, slots=True)
class Slot:
    """A rank with its cards."""

    pages: RankPages
    top: float
    bottom: float
    cards: tuple[Card, ...]


@dataclass(frozen=True, slots=True)
class Scales:
    """Pixels of a byte: by kind of field, and of the bars."""

    by_kind: Mapping[str, float]
    kind_of: Mapping[str, str]
    bar: float

    @classmethod
    def of(cls, panel: Panel) -> Scales:
        """Such that the least rank's cells can be seen, and the largest rank fits on a screen."""
        pages = [page for rank in (*panel.source, *panel.destination) for page in rank.pages]
        kind_of = _kinds(block for page in pages for block in page.detail)
        by_kind: dict[str, float] = {}
        for kind in dict.fromkeys(kind_of.values()):
            blocks = [[b for b in page.detail if _kind(b, kind_of) == kind] for page in pages]
            by_kind[kind] = _scale([found for found in blocks if found])
        scales = cls(by_kind, kind_of, 1.0)
        bar = min(scales.height(page) / page.bytes for page in pages)
        return cls(by_kind, kind_of, bar)

    def slots(self, ranks: Sequence[RankPages], top: float) -> tuple[tuple[Slot, ...], float]:
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

    def height(self, page: Page) -> float:
        """Of a page's card."""
        parts = sum(self._height(block, kind) for block, kind in _with_kinds(page, self.kind_of))
        return max(parts, LABEL_HEIGHT * (len(labels(page)) + 0.3))

    def _card(self, page: Page, top: float) -> Card:
        height = self.height(page)
        heights = [(b, k, self._height(b, k)) for b, k in _with_kinds(page, self.kind_of)]
        parts, at = list[Part](), top + (height - sum(h for _, _, h in heights)) / 2
        for block, kind, size in heights:
            parts.append(Part(block, kind, at, at + size))
            at += size
        bar = self.bar * page.bytes
        bar_top = top + (height - bar) / 2
        return Card(page, top, top + height, bar_top, bar_top + bar, tuple(parts))

    def _height(self, block: Block, kind: str) -> float:
        if not kind:
            return FIXED_HEIGHTS.get(block.cells[0].content, LEAST_HEIGHT)
        return max((block.stop - block.start) * self.by_kind[kind], 0.5)


def labels(page: Page) -> tuple[tuple[str, object], ...]:
    """What a card names: every shard once, scratch memory once."""
    cells = (cell for block in page.detail for cell in block.cells)
    return tuple(
        dict.fromkeys(
            (cell.name or cell.content.value, cell.box)
            for cell in cells
            if cell.content is not Content.OTHER_TOKENS
        )
    )


def _scale(pages: list[list[Block]]) -> float:
    sizes = [sum(block.stop - block.start for block in blocks) for blocks in pages]
    least, most = min(sizes), max(sizes)
    blocks = pages[sizes.index(least)]
    names = {(cell.name, cell.box) for block in blocks for cell in block.cells}
    cells = [cell.stop - cell.start for b in blocks if b.rows == 1 for cell in b.cells]
    wanted = max(
        LABEL_HEIGHT * len(names),
        LEAST_CELL * least / min(cells) if cells else 0.0,
        LEAST_HEIGHT,
    )
    return min(min(wanted, MOST_HEIGHT) / least, LARGEST_HEIGHT / most)


def _kinds(blocks: Iterable[Block]) -> dict[str, str]:
    """For every name its kind: ``conv`` of ``conv.x``. Names that share a block are of one kind."""
    kinds: dict[str, str] = {}
    together: dict[str, set[str]] = defaultdict(set)
    for block in blocks:
        names = [cell.name for cell in block.cells if cell.name]
        for name in names:
            kinds.setdefault(name, name.rpartition(".")[0] or name)
        for name in names:
            together[kinds[name]].update(kinds[other] for other in names)
    first: dict[str, str] = {}
    for kind in kinds.values():
        if kind not in first:
            queue = [kind]
            while queue:
                one = queue.pop()
                if one not in first:
                    first[one] = kind
                    queue += sorted(together[one])
    return {name: first[kind] for name, kind in kinds.items()}


def _kind(block: Block, kind_of: Mapping[str, str]) -> str:
    return next((kind_of[cell.name] for cell in block.cells if cell.name), "")


def _with_kinds(page: Page, kind_of: Mapping[str, str]) -> list[tuple[Block, str]]:
    """Blocks with their kinds; scratch memory is magnified as the state before it is."""
    found: list[tuple[Block, str]] = []
    for block in page.detail:
        kind = _kind(block, kind_of)
        if not kind and block.cells[0].content is Content.SCRATCH and found:
            kind = found[-1][1]
        found.append((block, kind))
    return found
