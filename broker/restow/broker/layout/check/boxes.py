"""Of one field: do the boxes of all ranks cover it, overlapping only where they are replicas?

And do those that hold a box hold every token of it, each once but for replicas?
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from restow.broker.errors import LayoutFormError, LayoutHoleError, LayoutOverlapError
from restow.broker.layout.limits import MAX_BOXES_OF_A_FIELD
from restow.broker.layout.span import Box, Span, box_text, overlap, volume
from restow.broker.layout.token_class import TokenClass
from restow.broker.layout.values import Field


def check_boxes(
    field: Field, holders: Sequence[tuple[int, Box, TokenClass]], ranks: Sequence[int]
) -> None:
    """Check who holds which box of ``field``, and for which tokens.

    Raises `LayoutOverlapError` and `LayoutHoleError`, and `LayoutFormError` for more boxes than
    can be compared.
    """
    boxes: dict[Box, set[int]] = defaultdict(set)
    tokens: dict[Box, dict[TokenClass, int]] = defaultdict(dict)
    for rank, box, held in holders:
        if rank in boxes[box]:
            raise LayoutOverlapError(
                f"rank {rank} holds {field.name} {box_text(box)} twice",
                field=field.name,
                axis=field.axes[0] if field.axes else "",
                ranks=rank,
                range=box_text(box),
            )
        boxes[box].add(rank)
        tokens[box].setdefault(held, rank)
    if len(boxes) > MAX_BOXES_OF_A_FIELD:
        raise LayoutFormError(
            f"field {field.name} falls into {len(boxes)} boxes; at most {MAX_BOXES_OF_A_FIELD} "
            f"are allowed",
            field=field.name,
        )
    _check_overlaps(field, boxes)
    # Disjoint boxes inside the field cover it exactly when their volumes add up.
    if sum(map(volume, boxes)) != math.prod(field.shape):
        _raise_hole(field, list(boxes), ranks, {rank for rank, _, _ in holders})
    for box, classes in tokens.items():
        _check_tokens(field, box, classes)


def _check_tokens(field: Field, box: Box, classes: dict[TokenClass, int]) -> None:
    """Check that the classes, each with a rank that holds it, are all of one way to cut tokens."""
    first, rank = next(iter(classes.items()))
    for one, other in classes.items():
        if (one.parts, one.interleave_tokens) != (first.parts, first.interleave_tokens):
            raise LayoutOverlapError(
                f"field {field.name}: ranks {rank} and {other} hold {box_text(box)} and cut its "
                f"tokens into {_cut_text(first)} and {_cut_text(one)}, so some are held by both",
                field=field.name,
                axis="token",
                ranks=f"{rank},{other}",
                range=box_text(box),
            )
    if len(classes) != first.parts:
        missing = next(iter(set(range(first.parts)) - {one.part for one in classes}))
        raise LayoutHoleError(
            f"field {field.name}, axis token: no rank holds part {missing} of the tokens of "
            f"{box_text(box)}, which are cut into {_cut_text(first)}",
            field=field.name,
            axis="token",
            ranks=_ranks_text(classes.values()),
            range=f"[{missing}, {missing + 1})",
        )


def _cut_text(one: TokenClass) -> str:
    return f"{one.parts} parts by {one.interleave_tokens}"


def _check_overlaps(field: Field, boxes: dict[Box, set[int]]) -> None:
    listed = list(boxes)
    edges = np.array([[(s.start, s.stop) for s in box] for box in listed], np.int64)
    edges = edges.reshape(len(listed), len(field.axes), 2)
    starts, stops = edges[:, :, 0], edges[:, :, 1]
    for index in range(len(listed) - 1):
        later = slice(index + 1, None)
        meet = (starts[later] < stops[index]) & (starts[index] < stops[later])
        hits = np.flatnonzero(meet.all(axis=1))
        if hits.size:
            _raise_overlap(field, boxes, listed[index], listed[index + 1 + int(hits[0])])


def _raise_overlap(field: Field, boxes: dict[Box, set[int]], one: Box, two: Box) -> None:
    axis = next(a for a, s, t in zip(field.axes, one, two, strict=True) if s != t)
    ranks = _ranks_text(boxes[one] | boxes[two])
    common = box_text(overlap(one, two) or ())
    raise LayoutOverlapError(
        f"field {field.name}, axis {axis}: ranks {ranks} both hold {common}, but "
        f"{box_text(one)} and {box_text(two)} are not replicas of each other",
        field=field.name,
        axis=axis,
        ranks=ranks,
        range=common,
    )


def _raise_hole(field: Field, boxes: list[Box], ranks: Sequence[int], holding: set[int]) -> None:
    hole = find_hole(field.shape, boxes)
    axis, span = _open_axis(field, hole)
    others = f"ranks {_ranks_text(holding)} hold other parts" if holding else "nor any other part"
    raise LayoutHoleError(
        f"field {field.name}, axis {axis}: no rank holds {span} (box {box_text(hole)}; {others})",
        field=field.name,
        axis=axis,
        ranks=_ranks_text(holding or ranks),
        range=span,
    )


def find_hole(shape: Sequence[int], boxes: Iterable[Box]) -> Box:
    """A box that none of the disjoint ``boxes`` touches; there has to be one.

    One axis at a time: cut it at all edges, and go into the first slab whose boxes' cross-sections
    do not add up to the whole one.

    >>> [str(s) for s in find_hole((4, 2), [(Span(0, 2), Span(0, 2)), (Span(2, 4), Span(0, 1))])]
    ['[2, 4)', '[1, 2)']
    """
    inside = list(boxes)
    hole: list[Span] = []
    for axis, size in enumerate(shape):
        change = {0: 0, size: 0}
        for box in inside:
            section = volume(box[axis + 1 :])
            change[box[axis].start] = change.get(box[axis].start, 0) + section
            change[box[axis].stop] = change.get(box[axis].stop, 0) - section
        edges = sorted(change)
        sections = itertools.accumulate(change[edge] for edge in edges)
        needed = math.prod(shape[axis + 1 :])
        slab = next(
            Span(start, stop)
            for (start, stop), held in zip(itertools.pairwise(edges), sections, strict=False)
            if held < needed
        )
        inside = [box for box in inside if box[axis].overlap(slab)]
        hole.append(slab)
    return tuple(hole)


def _open_axis(field: Field, hole: Box) -> tuple[str, Span | str]:
    """The first axis along which the hole is a part, and the missing range."""
    for axis, span, size in zip(field.axes, hole, field.shape, strict=True):
        if span.size < size:
            return axis, span
    return (field.axes[0], hole[0]) if field.axes else ("", "all")


def _ranks_text(ranks: Iterable[int]) -> str:
    return ",".join(str(rank) for rank in sorted(ranks))
