"""Prove that a layout is whole: ranks hold every element of every field, and nothing collides.

The proof runs once at registration, so that the planner needs no defensive checks. Its work is
bounded for any input, because sizes are limited before anything is enumerated.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from restow.broker.errors import (
    LayoutFormError,
    LayoutHoleError,
    LayoutOverlapError,
    RanksDisagreeError,
)
from restow.broker.layout.check_pages import PageChecker, check_inputs
from restow.broker.layout.schema import RANK
from restow.broker.layout.span import Box, Span, box_text, overlap, volume
from restow.broker.layout.token_class import TokenClass
from restow.broker.layout.values import (
    IDENTITY_PARTS,
    MAX_AXES,
    MAX_AXIS_SIZE,
    MAX_BOXES_OF_A_FIELD,
    MAX_GROUPS,
    MAX_RANK_NUMBER,
    MAX_RANKS,
    MAX_SHARDS,
    MAX_TOKENS,
    MAX_WORD_LENGTH,
    Field,
    Kind,
    Layout,
)


def check_boxes(
    field: Field, holders: Sequence[tuple[int, Box, TokenClass]], ranks: Sequence[int]
) -> None:
    """Check that the boxes of ``field`` cover it without overlaps, for all tokens.

    ``holders`` has a rank, its box and its tokens for each shard. Raises `LayoutOverlapError`,
    `LayoutHoleError`, and `LayoutFormError` for more boxes than the limit.
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
    # Disjoint boxes inside the field cover it exactly if their volumes add up.
    if sum(map(volume, boxes)) != math.prod(field.shape):
        _raise_hole(field, list(boxes), ranks, {rank for rank, _, _ in holders})
    for box, classes in tokens.items():
        _check_tokens(field, box, classes)


def _check_tokens(field: Field, box: Box, classes: dict[TokenClass, int]) -> None:
    """Check that the token classes of a box belong to the same division and are complete."""
    first, rank = next(iter(classes.items()))
    for held, other_rank in classes.items():
        if (held.parts, held.interleave_tokens) != (first.parts, first.interleave_tokens):
            raise LayoutOverlapError(
                f"field {field.name}: ranks {rank} and {other_rank} hold {box_text(box)} and cut "
                f"its tokens into {_cut_text(first)} and {_cut_text(held)}, so some are held by "
                f"both",
                field=field.name,
                axis="token",
                ranks=f"{rank},{other_rank}",
                range=box_text(box),
            )
    if len(classes) != first.parts:
        missing = next(iter(set(range(first.parts)) - {held.part for held in classes}))
        raise LayoutHoleError(
            f"field {field.name}, axis token: no rank holds part {missing} of the tokens of "
            f"{box_text(box)}, which are cut into {_cut_text(first)}",
            field=field.name,
            axis="token",
            ranks=_ranks_text(classes.values()),
            range=f"[{missing}, {missing + 1})",
        )


def _cut_text(tokens: TokenClass) -> str:
    return f"{tokens.parts} parts by {tokens.interleave_tokens}"


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


def _raise_overlap(field: Field, boxes: dict[Box, set[int]], first: Box, second: Box) -> None:
    axis = next(a for a, s, t in zip(field.axes, first, second, strict=True) if s != t)
    ranks = _ranks_text(boxes[first] | boxes[second])
    common = box_text(overlap(first, second) or ())
    raise LayoutOverlapError(
        f"field {field.name}, axis {axis}: ranks {ranks} both hold {common}, but "
        f"{box_text(first)} and {box_text(second)} are not replicas of each other",
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
    """Return a box that none of the disjoint ``boxes`` touches; the caller knows that it exists.

    For each axis in turn, the box is cut at all edges, and the search continues in the first slab
    whose boxes' cross-sections do not add up to the whole cross-section.

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
    """Return the first axis along which the hole is partial, and the missing range."""
    for axis, span, size in zip(field.axes, hole, field.shape, strict=True):
        if span.size < size:
            return axis, span
    return (field.axes[0], hole[0]) if field.axes else ("", "all")


def _ranks_text(ranks: Iterable[int]) -> str:
    return ",".join(str(rank) for rank in sorted(ranks))


def check_layout(layout: Layout) -> None:
    """Raise a `LayoutError` with field, axis, ranks and range if ``layout`` is invalid.

    Checks that names are printable and shapes valid; that strides are positive, stay inside the
    page and separate elements; that shards share no bytes; that ranks agree on dtypes and pages;
    that some rank holds every element of every token; that only equal boxes of different ranks
    overlap; that inputs are whole; and that projections fit their shards.
    """
    _check_size(layout)
    _check_names(layout)
    for field in (*layout.model.fields, *layout.model.inputs):
        _check_field(field)
    check_inputs(layout)
    pages = PageChecker(layout.model)
    for rank in layout.ranks:
        pages.check(rank)
    _check_agreement(layout)
    _check_windows(layout)
    held: dict[str, list[tuple[int, Box, TokenClass]]] = defaultdict(list)
    for rank in layout.ranks:
        for region, shard in rank.held():
            held[shard.field].append((rank.rank, shard.box, region.tokens))
    proven: set[object] = set()  # layers of the same kind are held alike, so check each form once
    for field in layout.model.fields:
        form = (field.axes, field.shape, tuple(held[field.name]))
        if form not in proven:
            check_boxes(field, held[field.name], [rank.rank for rank in layout.ranks])
            proven.add(form)


def check_counts(layout: Any) -> None:
    """Raise `LayoutFormError` if a layout has more parts than can be checked one by one.

    ``layout`` may also be the message of a layout, from which no values have been created yet.
    """
    ranks, model = layout.ranks, layout.model
    if not 0 < len(ranks) <= MAX_RANKS:
        raise LayoutFormError(f"{len(ranks)} ranks; 1 to {MAX_RANKS} are allowed")
    fields = len(model.fields) + len(model.inputs)
    regions = sum(len(rank.regions) for rank in ranks)
    parts = sum(len(getattr(rank, part.name)) for rank in ranks for part in RANK.nested)
    shards = parts - regions
    if max(fields, regions, shards) > MAX_SHARDS:
        raise LayoutFormError(
            f"{fields} fields, {regions} regions and {shards} shards; at most {MAX_SHARDS} of each "
            f"are allowed"
        )


def _check_names(layout: Layout) -> None:
    """Check that all names are printable, because they are shown to people."""
    model = layout.model
    named = [(f"the model's {part}", getattr(model, part)) for part in ("name", *IDENTITY_PARTS)]
    for field in (*model.fields, *model.inputs):
        named += [("a field's name", field.name), ("a field's scales", field.scales)]
        named.append(("a field's draft", field.draft))
        named += [("an axis", axis) for axis in field.axes]
    for region in (region for rank in layout.ranks for region in rank.regions):
        named += [("a region's name", region.name), ("a region's group", region.group)]
    for role, name in named:
        if not name.isprintable():
            raise LayoutFormError(f"{role} {name[:MAX_WORD_LENGTH]!r} is not printable")


def _check_size(layout: Layout) -> None:
    for part in IDENTITY_PARTS:
        length = len(getattr(layout.model, part))
        if length > MAX_WORD_LENGTH:
            raise LayoutFormError(
                f"the model's {part} has {length} characters; at most {MAX_WORD_LENGTH} are allowed"
            )
    if not layout.model.fields:
        raise LayoutFormError("the model has no fields, and so no state to hand over")
    fields = (*layout.model.fields, *layout.model.inputs)
    check_counts(layout)
    if double := _double(field.name for field in fields):
        raise LayoutFormError(f"field {double[0]} is listed more than once", field=double[0])
    if double := _double(rank.rank for rank in layout.ranks):
        raise LayoutFormError(f"rank {double[0]} is listed more than once", ranks=double[0])
    for rank in layout.ranks:
        if not 0 <= rank.rank <= MAX_RANK_NUMBER:
            raise LayoutFormError(
                f"rank {rank.rank} is no number from 0 to {MAX_RANK_NUMBER}", ranks=rank.rank
            )
        if double := _double(region.name for region in rank.regions):
            raise LayoutFormError(
                f"rank {rank.rank}: region {double[0]} is listed more than once",
                ranks=rank.rank,
                region=double[0],
            )


def _double(names: Iterable[object]) -> list[object]:
    """Return the names that occur more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


def _check_field(field: Field) -> None:
    if len(field.axes) != len(field.shape) or len(field.axes) > MAX_AXES:
        raise LayoutFormError(
            f"field {field.name}: {len(field.axes)} axes and {len(field.shape)} sizes; as many of "
            f"each are needed, at most {MAX_AXES}",
            field=field.name,
        )
    snapshot = field.kind is Kind.SNAPSHOT
    if not 0 <= field.window_tokens <= MAX_TOKENS or (field.window_tokens and snapshot):
        raise LayoutFormError(
            f"field {field.name}: window_tokens is {field.window_tokens}; it must be 0 to "
            f"{MAX_TOKENS}, and a snapshot has none",
            field=field.name,
        )
    if double := _double(field.axes):
        raise LayoutFormError(
            f"field {field.name}: axis {double[0]} is listed more than once",
            field=field.name,
            axis=double[0],
        )
    for axis, size in zip(field.axes, field.shape, strict=True):
        if not 0 < size <= MAX_AXIS_SIZE:
            raise LayoutFormError(
                f"field {field.name}, axis {axis}: size {size} is not 1 to {MAX_AXIS_SIZE}",
                field=field.name,
                axis=axis,
            )


_OF_A_LIST = (
    "page_tokens",
    "pages_per_block",
    "null_block",
    "context_parts",
    "interleave_tokens",
    "whole_blocks",
)
"""Properties that regions of a group share, because the same list of block ids addresses them."""


def _check_agreement(layout: Layout) -> None:
    dtypes: dict[str, tuple[int, str]] = {}
    groups: dict[str, tuple[int, tuple[int | None, ...]]] = {}
    for rank in layout.ranks:
        for region in rank.regions:
            pages = tuple(getattr(region, name) for name in _OF_A_LIST)
            first = groups.setdefault(region.group, (rank.rank, pages))
            if len(groups) > MAX_GROUPS:
                raise LayoutFormError(f"more than {MAX_GROUPS} groups of regions")
            if first[1] != pages:
                raise RanksDisagreeError(
                    f"group {region.group}: rank {first[0]} has ({', '.join(_OF_A_LIST)}) "
                    f"{first[1]}, rank {rank.rank}, region {region.name} has {pages}",
                    group=region.group,
                    region=region.name,
                    ranks=f"{first[0]},{rank.rank}",
                )
        for shard in (*rank.shards, *rank.inputs):
            known = dtypes.setdefault(shard.field, (rank.rank, shard.dtype.label))
            if known[1] != shard.dtype.label:
                raise RanksDisagreeError(
                    f"field {shard.field}: rank {known[0]} has {known[1]}, rank {rank.rank} has "
                    f"{shard.dtype.label}",
                    field=shard.field,
                    ranks=f"{known[0]},{rank.rank}",
                )


def _check_windows(layout: Layout) -> None:
    """Refuse whole blocks in groups with several windows, which begin in different blocks."""
    windows = {field.name: field.window_tokens for field in layout.model.fields}
    windows_of: dict[str, tuple[str, int]] = {}
    for rank in layout.ranks:
        for region, shard in rank.held():
            if not region.whole_blocks:
                continue
            group, window = region.group, windows[shard.field]
            first = windows_of.setdefault(group, (shard.field, window))
            if first[1] != window:
                raise LayoutFormError(
                    f"group {group} keeps whole blocks, but its fields have different windows: "
                    f"{first[0]} has {first[1]} tokens, {shard.field} has {window} (0: all)",
                    group=group,
                    field=shard.field,
                )
