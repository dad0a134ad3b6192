"""A page cut into what lies in it, byte for byte, in the few stripes that a person can take in.

Pure: no drawing. Every byte of a page belongs to one cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from restow.broker.layout import Box, Scratch, Shard

EXPANDED_ROWS = 16
"""Up to so many rows are stripes of their own, as the taps of a conv window are."""
MAX_STRIPES = 256
"""More than that of one page are not told apart."""


class Content(StrEnum):
    """What the bytes of a cell are."""

    STATE = "state"
    """A shard, or a part of it."""
    SCRATCH = "scratch"
    """Rows for speculative tokens: zeroed when a state arrives."""
    INPUTS = "mixer inputs"
    """What mixers read: no state, but conv windows may be rebuilt from it."""
    PADDING = "padding"
    OTHER_TOKENS = "other tokens"
    """Between the parts of one token."""
    REST = "fields that are not shown"
    WOVEN = "woven"
    """Several shards in turns that are too fine, or too irregular, to be told apart."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The bytes ``start <= i < stop`` of every row of a stripe; ``box`` is that of the shard."""

    start: int
    stop: int
    content: Content
    name: str = ""
    box: Box = ()


@dataclass(frozen=True, slots=True)
class Stripe:
    """``rows`` of ``row_bytes`` one behind the other, whose cells are the same and fill them."""

    start: int
    rows: int
    row_bytes: int
    cells: tuple[Cell, ...]

    @property
    def stop(self) -> int:
        """One past its last byte."""
        return self.start + self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one shard or scratch memory covers: runs of bytes at the steps of its axes.

    ``axes`` are pairs of count and stride, the outermost first; none where it is one run.
    """

    start: int
    run_bytes: int
    axes: tuple[tuple[int, int], ...]
    content: Content
    name: str
    box: Box
    token_step: int = 0

    @property
    def stop(self) -> int:
        """One past the last byte that it covers."""
        return self.start + sum((n - 1) * step for n, step in self.axes) + self.run_bytes


def footprint(
    held: Shard | Scratch, content: Content, name: str = "", tokens: int = 1
) -> Footprint:
    """What a shard or scratch memory covers of a page, for ``tokens`` tokens (or one snapshot)."""
    box = held.box if isinstance(held, Shard) else ()
    sizes = [span.size for span in box] if isinstance(held, Shard) else held.sizes
    step = held.token_stride_bytes or 0 if isinstance(held, Shard) else 0
    axes = [*zip(sizes, held.strides_bytes, strict=True), (tokens, step)]
    run, outer = _merged(axes, held.dtype.itemsize_bytes)
    shown = box if content is Content.STATE else ()
    return Footprint(held.offset_bytes, run, outer, content, name, shown, step)


def _merged(
    sizes: Sequence[tuple[int, int]], item_bytes: int
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """The length of a run, and the axes that it is repeated along."""
    run, outer = item_bytes, list[tuple[int, int]]()
    for count, step in sorted((axis for axis in sizes if axis[0] > 1), key=lambda axis: axis[1]):
        if not outer and step == run:
            run *= count
        elif outer and step == outer[-1][0] * outer[-1][1]:
            outer[-1] = outer[-1][0] * count, outer[-1][1]
        else:
            outer.append((count, step))
    return run, tuple(reversed(outer))


def pave(
    items: Sequence[Footprint], start: int, stop: int, gap: Content = Content.PADDING
) -> tuple[Stripe, ...]:
    """The stripes of the bytes ``start <= i < stop`` in order; what no item covers is ``gap``.

    Items lie inside and do not overlap (`check_layout` has made sure of it).
    """
    stripes: list[Stripe] = []
    at = start
    for group in _overlapping(items):
        first, last = group[0].start, max(item.stop for item in group)
        if first > at:
            stripes.append(_run(at, first, gap))
        found = list(_group(group, gap))
        if len(stripes) + len(found) > MAX_STRIPES:
            found = [_run(first, last, Content.WOVEN, _names(group))]
        stripes += found
        at = last
    if at < stop:
        stripes.append(_run(at, stop, gap))
    return tuple(stripes)


def _overlapping(items: Sequence[Footprint]) -> Iterator[list[Footprint]]:
    """Items whose first and last bytes embrace each other's, together."""
    group: list[Footprint] = []
    reached = 0
    for item in sorted(items, key=lambda item: item.start):
        if group and item.start >= reached:
            yield group
            group = []
        group.append(item)
        reached = max(reached, item.stop)
    if group:
        yield group


def _run(start: int, stop: int, content: Content, name: str = "", box: Box = ()) -> Stripe:
    size = stop - start
    return Stripe(start, 1, size, (Cell(0, size, content, name, box),))


def _names(items: Sequence[Footprint]) -> str:
    return ", ".join(dict.fromkeys(item.name or item.content.value for item in items))


def _group(items: list[Footprint], gap: Content) -> Iterator[Stripe]:
    """The stripes of items that embrace each other."""
    if not any(item.axes for item in items):
        for item in items:
            yield _run(item.start, item.stop, item.content, item.name, item.box)
        return
    first, last = items[0].start, max(item.stop for item in items)
    step = max(item.axes[0][1] for item in items if item.axes)
    placed = [_Placed.of(item, first, step) for item in items]
    if any(one is None for one in placed):
        yield _run(first, last, Content.WOVEN, _names(items))
        return
    rows = [one for one in placed if one is not None]
    edges = sorted({edge for one in rows for edge in (one.first, one.last)})
    for begin, end in pairwise(edges):
        row = [one.row for one in rows if one.first <= begin < one.last]
        yield from _rows(row, first + begin * step, end - begin, step, last, gap)


@dataclass(frozen=True, slots=True)
class _Placed:
    """An item as rows ``first <= i < last`` of a grid; ``row`` is its part of row 0."""

    first: int
    last: int
    row: Footprint

    @classmethod
    def of(cls, item: Footprint, start: int, step: int) -> _Placed | None:
        """None where the item does not repeat with the grid's step, or leaves its row."""
        repeats = bool(item.axes) and item.axes[0][1] == step
        row = replace(item, axes=item.axes[1:]) if repeats else item
        index, at = divmod(row.start - start, step)
        row = replace(row, start=at)
        if row.stop > step:
            return None
        return cls(index, index + (item.axes[0][0] if repeats else 1), row)


def _rows(
    row: list[Footprint], start: int, count: int, step: int, last: int, gap: Content
) -> Iterator[Stripe]:
    """``count`` equal rows: one below the other if they are few, else, or if tokens, one stripe."""
    inner = pave(row, 0, step, gap)
    flat = all(stripe.rows == 1 for stripe in inner)
    tokens = all(item.token_step == step for item in row)
    if count == 1 or count <= (MAX_STRIPES if not flat else 0 if tokens else EXPANDED_ROWS):
        for index in range(count):
            shift = start + index * step
            for stripe in inner:
                yield from _clipped(replace(stripe, start=stripe.start + shift), last)
    elif flat:
        cells = tuple(
            replace(cell, start=cell.start + stripe.start, stop=cell.stop + stripe.start)
            for stripe in inner
            for cell in stripe.cells
        )
        yield from _clipped(Stripe(start, count, step, cells), last)
    else:
        yield _run(start, min(start + count * step, last), Content.WOVEN, _names(row))


def _clipped(stripe: Stripe, last: int) -> Iterator[Stripe]:
    """A stripe without what lies behind ``last``, where its last row may reach."""
    if stripe.stop <= last:
        yield stripe
        return
    if stripe.rows > 1:
        yield replace(stripe, rows=stripe.rows - 1)
    start = stripe.stop - stripe.row_bytes
    if start < last:
        size = last - start
        cells = (replace(cell, stop=min(cell.stop, size)) for cell in stripe.cells)
        yield Stripe(start, 1, size, tuple(cell for cell in cells if cell.start < cell.stop))
