"""Draw a picture as one SVG file, without scripts, fonts or images; equal plans give equal bytes.

A panel has the ranks of P on the left and the ranks of D on the right. Each page is a card: a band
of cells, one below the other, with a label for every shard. Ribbons join the bands.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from xml.sax.saxutils import escape

from restow.broker.draw.bytes_and_seconds import size_text
from restow.broker.draw.layer_pages import Cell, Content, Page, RankPages, strands
from restow.broker.draw.picture import TIMES, Panel, Picture
from restow.broker.layout import Layout
from restow.broker.layout.difference import field_class

WIDTH, MARGIN, BAND, LABELS = 1040, 24, 38, 300
COLUMN = BAND + LABELS
HEAD, LINE, GAP, LEAST_CELL = 20.0, 15.0, 16.0, 5.5
"""Heights of the text above a page, of a label, between ranks, and of the smallest cell."""
LEAST_FIELD, MOST_FIELD, LARGEST_FIELD = 30.0, 150.0, 520.0
"""Least and most height of a field on the rank that has least of it, and most on any rank."""
FIXED_HEIGHTS = {Content.PADDING: 12.0, Content.OTHER: 9.0, Content.INPUTS: 18.0}
"""Heights of cells that hold no state, whatever their size."""
CHARACTER = 0.57
"""Width of a character in font sizes: wide enough for the fonts that browsers take."""
INK, QUIET = "#1f2430", "#5c6470"
PALETTE = (
    *("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#44aa99"),
    *("#882255", "#999933", "#332288", "#ddcc77", "#cc6677", "#117733", "#88ccee"),
)
"""Paul Tol's schemes `bright` and `muted`, which the colour-blind can tell apart."""
FILLS = {
    Content.SCRATCH: "#c3c7cd",
    Content.INPUTS: "#d9cfb4",
    Content.PADDING: "#eceef1",
    Content.OTHER: "#ffffff",
}
STYLE = (
    "text{font:11px system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif;"
    f"fill:{INK}}}"
    ".h{font-size:19px;font-weight:600}.t{font-size:14px;font-weight:600}"
    f".b{{font-weight:600}}.q{{fill:{QUIET}}}.s{{font-size:12px}}.e{{text-anchor:end}}"
    ".l{fill:none;stroke:#9aa0a9;stroke-width:.7}"
    ".r{fill-opacity:.5}.o{fill-opacity:.32}.r:hover,.o:hover{fill-opacity:.85}"
)


def plan_svg(picture: Picture) -> str:
    """Return the picture as SVG."""
    classes = dict.fromkeys(name for panel in picture.panels for name in panel.ways)
    colours = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(classes)}
    plan, model, at = picture.plan, picture.plan.source.model.name, MARGIN + 16.0
    sides = f"P: {_ranks(plan.source)} → D: {_ranks(plan.destination)}"
    body = [text(MARGIN, at, fitted(model, 600, 19), "h"), text(WIDTH - MARGIN, at, sides, "h e")]
    for line in (
        f"{size_text(plan.bytes_at(picture.tokens))} move from the prefill engine P to the decode "
        f"engine D for a prompt of {picture.tokens:,} token{'s' * (picture.tokens > 1)}.",
        "A card shows the bytes of a page in their order; of a page of tokens, the first token. "
        "Each kind of field has a scale of its own.",
    ):
        at += 18
        body.append(text(MARGIN, at, line, "s q"))
    for panel in picture.panels:
        drawn, at = _panel(panel, colours, at + 18)
        body += drawn
    described = " ".join(f"{panel.title}. {' '.join(panel.remarks)}" for panel in picture.panels)
    size = f'width="{WIDTH:.0f}" height="{at + MARGIN:.0f}"'
    view = f'viewBox="0 0 {WIDTH:.0f} {at + MARGIN:.0f}" role="img" aria-labelledby="title desc"'
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view}>',
            f'<title id="title">{escape(f"{model}: {sides}")}</title>',
            f'<desc id="desc">{escape(described)}</desc>',
            f"<style>{STYLE}</style>",
            f'<rect {size} rx="8" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        )
    )


def text(x: float, y: float, content: str, look: str) -> str:
    """Return a line of text in the classes ``look``."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{look}">{escape(content)}</text>'


def rect(x: float, y: float, width: float, height: float, look: str) -> str:
    """Return a rectangle with the attributes ``look``."""
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} {look}/>'


def fitted(content: str, width: float, font: float = 11) -> str:
    """Return the part of a text that a width has room for."""
    most = max(int(width / (font * CHARACTER)), 1)
    return content if len(content) <= most else content[: most - 1] + "…"


def _ranks(layout: Layout) -> str:
    count = len(layout.ranks)
    return f"{count} rank{'s' * (count > 1)}"


def _panel(panel: Panel, colours: Mapping[str, str], top: float) -> tuple[list[str], float]:
    """Draw a panel below ``top``, and return where it ends."""
    room, at = WIDTH - 2 * MARGIN, top + 24
    drawn = [
        rect(MARGIN, top, room, 1, 'fill="#d5d8dd"'),
        text(MARGIN, at, fitted(panel.title, room, 14), "t"),
    ]
    for remark in panel.remarks:
        for line in textwrap.wrap(remark, int(room / (11.2 * CHARACTER))):
            at += 17
            drawn.append(text(MARGIN, at, line, "s"))
    scales, at = _scales(panel), at + 12
    sides = panel.shown.source, panel.shown.destination
    heights = [_cards(ranks, scales, 0)[-1].bottom for ranks in sides]
    left, right = (
        _cards(ranks, scales, at + (max(heights) - height) / 2)
        for ranks, height in zip(sides, heights, strict=True)
    )
    drawn += _ribbons(panel, left, right, colours)
    for side, card in (*(("P", card) for card in left), *(("D", card) for card in right)):
        drawn += _card(side, card, panel, colours)
    return drawn, at + max(heights)


def _kind(cell: Cell) -> str:
    """Return what the names of cells of one scale share: ``conv`` of ``conv.x``."""
    return cell.name.rpartition(".")[0] or cell.label


def _scales(panel: Panel) -> dict[str, float]:
    """Return the pixels of a byte of each kind, on all ranks alike.

    The smallest cells can be seen, and the largest rank fits on a screen.
    """
    sizes: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, rank in enumerate((*panel.shown.source, *panel.shown.destination)):
        for cell in (cell for page in rank.pages for cell in page.cells):
            sizes[_kind(cell)][index].append(cell.bytes)
    scales = {}
    for kind, ranks in sizes.items():
        least, largest = min(ranks.values(), key=sum), max(ranks.values(), key=sum)
        wanted = max(LEAST_CELL * sum(least) / min(least), LEAST_FIELD)
        scales[kind] = min(min(wanted, MOST_FIELD) / sum(least), LARGEST_FIELD / sum(largest))
    return scales


@dataclass(frozen=True, slots=True)
class Card:
    """A page with its place: cell ``i`` lies between the heights ``edges[i]`` and ``[i + 1]``.

    ``head`` is the name of the rank on the first card of a rank.
    """

    rank: int
    head: str
    page: Page
    top: float
    bottom: float
    edges: tuple[float, ...]

    @property
    def cells(self) -> Iterable[tuple[Cell, float, float]]:
        """The cells with their upper and lower edges."""
        return ((c, *ends) for c, ends in zip(self.page.cells, pairwise(self.edges), strict=True))

    def y(self, at: int) -> float:
        """Return the height at which a byte of the page lies."""
        cell, top, bottom = next(placed for placed in self.cells if at <= placed[0].stop)
        return top + (bottom - top) * (at - cell.start) / cell.bytes


def _cards(ranks: Sequence[RankPages], scales: Mapping[str, float], top: float) -> list[Card]:
    """Place the pages of one side below each other."""
    cards: list[Card] = []
    for rank in ranks:
        for index, page in enumerate(rank.pages):
            top += HEAD
            heights = [
                FIXED_HEIGHTS.get(cell.content, max(cell.bytes * scales[_kind(cell)], 0.5))
                for cell in page.cells
            ]
            height = max(sum(heights), LINE * len(_labels(page)) + 4)
            edges = tuple(accumulate(heights, initial=top + (height - sum(heights)) / 2))
            head = "" if index else f"rank {rank.rank}"
            cards.append(Card(rank.rank, head, page, top, top + height, edges))
            top += height
        top += GAP
    return cards


def _labels(page: Page) -> list[list[int]]:
    """Return the cells that share a label, by their number in the page."""
    groups: dict[object, list[int]] = defaultdict(list)
    for index, cell in enumerate(page.cells):
        if cell.content is not Content.OTHER:
            groups[cell.label, cell.box, cell.mixed].append(index)
    return list(groups.values())


def _card(side: str, card: Card, panel: Panel, colours: Mapping[str, str]) -> Iterator[str]:
    """Draw a page: its head, its band of cells, and its labels."""
    page, on_left = card.page, side == "P"
    x = MARGIN if on_left else WIDTH - MARGIN - COLUMN
    band, inner, step = (x + LABELS, x + LABELS, -1) if on_left else (x, x + BAND, 1)
    tokens = f", {page.tokens:,} token{'s' * (page.tokens > 1)}" if page.tokens else ""
    if card.head:
        yield text(x, card.top - 6, f"{side} {card.head}", "b s")
    yield text(x + COLUMN, card.top - 6, f"page of {size_text(page.bytes)}{tokens}", "q e")
    yield rect(x, card.top, COLUMN, card.bottom - card.top, 'rx="3" fill="none" stroke="#b8bcc2"')
    for cell, top, bottom in card.cells:
        fill = FILLS.get(cell.content) or colours[cell.name]
        look = f'fill="{fill}" fill-opacity="{0.6 if cell.mixed else 1}" stroke="#ffffff"'
        yield rect(band, top, BAND, bottom - top, f'{look} stroke-width="0.6"')
    groups = _labels(page)
    middles = [(card.edges[first] + card.edges[first + 1]) / 2 for first, *_ in groups]
    start = x + 8 if on_left else inner + 15
    end = start + LABELS - 23
    places = _spread(middles, card.top + 9, card.bottom - 9)
    for group, middle, y in zip(groups, middles, places, strict=True):
        yield f'<path class="l" d="M{inner} {middle:.1f}h{5 * step}L{inner + 11 * step} {y:.1f}"/>'
        cells = [page.cells[index] for index in group]
        size, label = _sizes(cells), cells[0].label
        caption = fitted(f"{label} {_where(panel, cells[0])}", end - start - (len(size) + 1) * 6.2)
        name, where = escape(caption[: len(label)]), escape(caption[len(label) :])
        bold = f'<tspan class="b">{name}</tspan>{where}'
        yield f'<text x="{start}" y="{y + 4:.1f}">{bold}</text>'
        yield text(end, y + 4, size, "q e")


def _where(panel: Panel, cell: Cell) -> str:
    """Return which part of its field a cell belongs to, by the axes that are cut."""
    where = ""
    if cell.name:
        field = panel.shown.fields[cell.name]
        axes = zip(cell.box, field.axes, field.shape, strict=True)
        cut = [f"{axis} [{span.start},{span.stop})" for span, axis, n in axes if span.size < n]
        where = " ".join(cut) or "all of it"
    return where + "".join(f" + {name}" for name in cell.mixed)


def _sizes(cells: Sequence[Cell]) -> str:
    """Return the size of all cells of a shard, such as ``3 x 4 KiB``."""
    if len(cells) > 1 and len({cell.bytes for cell in cells}) == 1:
        return f"{len(cells)} {TIMES} {size_text(cells[0].bytes)}"
    return size_text(sum(cell.bytes for cell in cells))


def _spread(wanted: Sequence[float], least: float, most: float) -> list[float]:
    """Return heights near ``wanted``, in the same order, each at least a line below the last."""
    places: list[float] = []
    for y in wanted:
        places.append(max(y, places[-1] + LINE if places else least))
    for index in reversed(range(len(places))):
        places[index] = min(places[index], most)
        most = places[index] - LINE
    return places


def _ribbons(
    panel: Panel, left: Sequence[Card], right: Sequence[Card], colours: Mapping[str, str]
) -> Iterator[str]:
    """Draw the moves; ribbons to neighbouring ranks of D differ in opacity."""
    sources, targets = ({(c.rank, c.page.region): c for c in cards} for cards in (left, right))
    order = [rank.rank for rank in panel.shown.destination]
    start, stop, bend = MARGIN + COLUMN, WIDTH - MARGIN - COLUMN, WIDTH / 2
    for move in panel.shown.moves:
        name = field_class(move.field)
        src, dst = sources[move.src_rank, move.src.region], targets[move.dst_rank, move.dst.region]
        title = (
            f"{name}: P rank {move.src_rank} to D rank {move.dst_rank}, "
            f"{' '.join(map(str, move.box))}, {size_text(move.bytes)}"
        )
        path = ""
        for src_span, dst_span in strands(move):
            a, b, c, d = (
                src.y(src_span.start),
                src.y(src_span.stop),
                dst.y(dst_span.start),
                dst.y(dst_span.stop),
            )
            path += f"M{start} {a:.1f}C{bend} {a:.1f} {bend} {c:.1f} {stop} {c:.1f}V{d:.1f}"
            path += f"C{bend} {d:.1f} {bend} {b:.1f} {start} {b:.1f}Z"
        look = f'class="{"ro"[order.index(move.dst_rank) % 2]}" fill="{colours[name]}"'
        yield f'<path {look} d="{path}"><title>{escape(title)}</title></path>'
