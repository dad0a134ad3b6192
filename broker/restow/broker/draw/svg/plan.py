"""A plan as one SVG file: no script, no font, no image; the same bytes for the same plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from restow.broker.draw.explain import by_way
from restow.broker.draw.page_map import Content
from restow.broker.draw.picture import Panel, Picture
from restow.broker.draw.ribbons import Strand
from restow.broker.draw.svg.cards import Card, Magnification, Slot
from restow.broker.draw.svg.elements import TIMES, fitted, number, tag, text, words, wrapped
from restow.broker.draw.svg.page import (
    BAND,
    BAR,
    INK,
    LABELS,
    LENS,
    QUIET,
    SideDrawing,
    short_size,
)
from restow.broker.layout import Layout

WIDTH, MARGIN = 1040.0, 24.0
COLUMN = BAR + LENS + LABELS + BAND
PALETTE = (
    *("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#44aa99"),
    *("#882255", "#999933", "#332288", "#ddcc77", "#cc6677", "#117733", "#88ccee"),
)
"""Paul Tol's schemes `bright` and `muted`: told apart by the colour-blind too."""
STYLE = (
    "text{font:11px system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif;"
    f"fill:{INK}}}"
    ".h{font-size:19px;font-weight:600}.t{font-size:14px;font-weight:600}"
    f".b{{font-weight:600}}.q{{fill:{QUIET}}}.s{{font-size:12px}}.n{{font-size:9.5px;fill:{QUIET}}}"
    ".e{text-anchor:end}.m{text-anchor:middle}"
    ".r{fill-opacity:.5}.o{fill-opacity:.32}.r:hover,.o:hover{fill-opacity:.85}"
)


def plan_svg(picture: Picture) -> str:
    """The whole picture."""
    classes = dict.fromkeys(name for panel in picture.panels for name in panel.ways)
    colours = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(classes)}
    body: list[str] = []
    at = MARGIN + 16
    for part, height in (_head(picture, at), _legend(picture, colours, at + 46)):
        body += part
        at = max(at, height)
    for panel in picture.panels:
        part, at = _panel(panel, colours, at + 18)
        body += part
    height = at + MARGIN
    plan = picture.plan
    title = f"{plan.source.model.name}: P, {_ranks(plan.source)}, to D, {_ranks(plan.destination)}"
    return (
        tag(
            "svg",
            tag("title", words(title), id="title"),
            tag("desc", words(_description(picture)), id="desc"),
            tag("style", words(STYLE)),
            tag("defs", _pattern()),
            tag("rect", width=WIDTH, height=height, rx=8, fill="#ffffff"),
            "\n" + "\n".join(body) + "\n",
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {number(WIDTH)} {number(height)}",
            width=WIDTH,
            height=height,
            role="img",
            aria_labelledby="title desc",
        )
        + "\n"
    )


def _pattern() -> str:
    line = tag("path", d="M0 6L6 0", stroke="#b8bcc2", stroke_width="1")
    ground = tag("rect", width=6, height=6, fill="#f1f2f4")
    return tag(
        "pattern", ground, line, id="hatch", width=6, height=6, patternUnits="userSpaceOnUse"
    )


def _description(picture: Picture) -> str:
    """The picture for those who can't see it."""
    parts = [f"{panel.title}. {'. '.join(panel.remarks)}." for panel in picture.panels]
    return " ".join(parts)


def _head(picture: Picture, at: float) -> tuple[list[str], float]:
    plan = picture.plan
    title = fitted(plan.source.model.name, 460, 19)
    sides = f"P: {_ranks(plan.source)} → D: {_ranks(plan.destination)}"
    total = (
        f"{short_size(plan.bytes_at(picture.tokens))} move from the prefill engine P to the decode "
        f"engine D for a prompt of {picture.tokens:,} token{'s' * (picture.tokens > 1)}"
    )
    return [
        text(MARGIN, at, title, class_="h"),
        text(WIDTH - MARGIN, at, sides, class_="h e"),
        text(MARGIN, at + 20, total, class_="s q"),
    ], at + 20


def _legend(picture: Picture, colours: dict[str, str], at: float) -> tuple[list[str], float]:
    """What colours and lines mean; only what occurs."""
    contents = {
        cell.content
        for panel in picture.panels
        for rank in (*panel.source, *panel.destination)
        for page in rank.pages
        for stripe in (*page.stripes, *page.token_stripes)
        for cell in stripe.cells
    }
    entries = [(name, {"fill": colour}) for name, colour in colours.items()]
    if any(panel.idle for panel in picture.panels):
        look = {"fill": "#ffffff", "stroke": QUIET, "stroke_dasharray": "3 2"}
        entries.append(("a copy that serves nobody", look))
    if Content.SCRATCH in contents:
        entries.append(("scratch rows, zeroed at D", {"fill": "#c3c7cd"}))
    if Content.INPUTS in contents:
        entries.append(("mixer inputs, for windows that D rebuilds", {"fill": "#d9cfb4"}))
    if Content.PADDING in contents:
        entries.append(("padding, never moved", {"fill": "url(#hatch)", "stroke": "#b8bcc2"}))
    drawn, x = list[str](), MARGIN
    for name, look in entries:
        shown = fitted(name, 220, 11)
        width = 18 + len(shown) * 6.4 + 14
        if x + width > WIDTH - MARGIN:
            x, at = MARGIN, at + 18
        drawn.append(tag("rect", x=x, y=at - 9, width=12, height=11, rx=2, **look))
        drawn.append(text(x + 18, at, shown))
        x += width
    how = (
        "Narrow bars are pages, all of a panel to one scale. The cards beside them show the same "
        f"bytes, small fields enlarged ({TIMES})."
    )
    if any(panel.per_token for panel in picture.panels):
        how += " Of pages of tokens they show the first token, black in the bar."
    for line in wrapped(how, WIDTH - 2 * MARGIN, 10.5):
        at += 18
        drawn.append(text(MARGIN, at, line, class_="q"))
    return drawn, at


def _panel(panel: Panel, colours: dict[str, str], top: float) -> tuple[list[str], float]:
    """One panel below ``top``, and where it ends."""
    scales = Magnification.of(panel)
    colours = {name: colours[kind] for name, kind in panel.classes.items()}
    drawn = [
        tag("path", d=f"M{number(MARGIN)} {number(top)}H{number(WIDTH - MARGIN)}", stroke="#d5d8dd")
    ]
    at = top + 24
    drawn.append(text(MARGIN, at, fitted(panel.title, WIDTH - 2 * MARGIN, 14), class_="t"))
    for line in _lines(panel):
        for part in wrapped(line, WIDTH - 2 * MARGIN, 11.2):
            at += 17
            drawn.append(text(MARGIN, at, part, class_="s"))
    if panel.left_out:
        at += 17
        remark = f"Drawn are {', '.join(panel.left_out)}; the rest is left out."
        drawn.append(text(MARGIN, at, remark, class_="s b", style="fill:#a33"))
    at += 12
    (_, left_end), (_, right_end) = (
        scales.slots(ranks, at) for ranks in (panel.source, panel.destination)
    )
    end = max(left_end, right_end)
    left, _ = scales.slots(panel.source, at + (end - left_end) / 2)
    right, _ = scales.slots(panel.destination, at + (end - right_end) / 2)
    drawn += _ribbons(panel, left, right, colours)
    on_left = SideDrawing(panel, scales, colours, "P", MARGIN)
    on_right = SideDrawing(panel, scales, colours, "D", WIDTH - MARGIN)
    for side, slots in ((on_left, left), (on_right, right)):
        for index, slot in enumerate(slots):
            drawn += side.draw_rank(slot, index)
    return drawn, end


def _lines(panel: Panel) -> Iterator[str]:
    """What is said above a panel."""
    ways = "; ".join(f"{', '.join(names)} by {way}" for way, names in by_way(panel.ways).items())
    each = panel.bytes / len(panel.layers)
    unit = "a token and layer" if panel.per_token else "a layer"
    window = f", the last {panel.window_tokens:,} tokens" if panel.window_tokens else ""
    yield f"{short_size(each)} {unit}{window}. Travels: {ways}."
    for remark in panel.remarks:
        yield remark[:1].upper() + remark[1:] + "."
    if len(panel.stages) > 1:
        for stage in panel.stages:
            some = ", ".join(stage.layers[:3]) + (" .." if len(stage.layers) > 3 else "")
            yield (
                f"{len(stage.layers)} of them ({some}): P {_numbers(stage.src_ranks)} to "
                f"D {_numbers(stage.dst_ranks)}."
            )


def _numbers(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _ranks(layout: Layout) -> str:
    count = len(layout.ranks)
    return f"{count} rank" + ("" if count == 1 else "s")


def _ribbons(
    panel: Panel, left: Sequence[Slot], right: Sequence[Slot], colours: dict[str, str]
) -> Iterator[str]:
    sources = {(s.pages.rank, card.page.region): card for s in left for card in s.cards}
    targets = {(s.pages.rank, card.page.region): card for s in right for card in s.cards}
    order = {slot.pages.rank: index for index, slot in enumerate(right)}
    for ribbon in panel.ribbons:
        move = ribbon.move
        src = sources[move.src_rank, move.src.region]
        dst = targets[move.dst_rank, move.dst.region]
        title = (
            f"{ribbon.name}: P rank {move.src_rank} to D rank {move.dst_rank}, "
            f"{' '.join(map(str, move.box))}, {short_size(move.bytes)}"
        )
        yield tag(
            "path",
            tag("title", words(title)),
            d="".join(_strand(strand, src, dst) for strand in ribbon.strands),
            fill=colours[ribbon.name],
            class_="ro"[order[move.dst_rank] % 2],
        )


def _strand(strand: Strand, src: Card, dst: Card) -> str:
    x0, x1 = MARGIN + COLUMN, WIDTH - MARGIN - COLUMN
    bend = number((x0 + x1) / 2)
    a, b = number(src.y(strand.src.start)), number(src.y(strand.src.stop))
    c, d = number(dst.y(strand.dst.start)), number(dst.y(strand.dst.stop))
    x0_, x1_ = number(x0), number(x1)
    return f"M{x0_} {a}C{bend} {a} {bend} {c} {x1_} {c}V{d}C{bend} {d} {bend} {b} {x0_} {b}Z"
