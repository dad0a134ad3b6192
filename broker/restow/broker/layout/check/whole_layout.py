"""Of a whole layout: names and sizes, then inputs, pages, ranks that agree, and boxes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from restow.broker.errors import LayoutFormError, RanksDisagreeError
from restow.broker.layout.check.boxes import check_boxes
from restow.broker.layout.check.inputs import check_inputs
from restow.broker.layout.check.pages import PageChecker
from restow.broker.layout.limits import (
    MAX_AXES,
    MAX_AXIS_SIZE,
    MAX_GROUPS,
    MAX_RANK_NUMBER,
    MAX_RANKS,
    MAX_SHARDS,
    MAX_TOKENS,
    MAX_WORD_LENGTH,
)
from restow.broker.layout.schema import RANK
from restow.broker.layout.span import Box
from restow.broker.layout.token_class import TokenClass
from restow.broker.layout.values import IDENTITY_PARTS, Field, Kind, Layout


def check_layout(layout: Layout) -> None:
    """Raise a typed `LayoutError` that names field, axis, ranks and range; else return.

    Checked: names (printable) and shapes, strides (positive, inside the page, folding nothing),
    memory of a page claimed once, ranks that agree on dtypes and pages, every element held by some
    rank, of every token, overlaps only between equal boxes of different ranks; inputs kept whole,
    and projections that fit the shards that they speak of.
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
        tokens = {region.name: region.tokens for region in rank.regions}
        for shard in rank.shards:
            held[shard.field].append((rank.rank, shard.box, tokens[shard.region]))
    proven: set[object] = set()  # layers of a kind are held alike
    for field in layout.model.fields:
        form = (field.axes, field.shape, tuple(held[field.name]))
        if form not in proven:
            check_boxes(field, held[field.name], [rank.rank for rank in layout.ranks])
            proven.add(form)


def check_counts(layout: Any) -> None:
    """Raise `LayoutFormError` for more parts than are looked at one by one.

    ``layout`` may be the message of one, of which nothing is made yet.
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
    """Whatever has a name is shown to people by it."""
    model = layout.model
    named = [(f"the model's {part}", getattr(model, part)) for part in ("name", *IDENTITY_PARTS)]
    for field in (*model.fields, *model.inputs):
        named += [("a field's name", field.name), ("a field's scales", field.scales)]
        named.append(("a field's draft", field.draft))
        named += [("an axis", axis) for axis in field.axes]
    for region in (region for rank in layout.ranks for region in rank.regions):
        named += [("a region's name", region.name), ("a region's group", region.group)]
    for what, name in named:
        if not name.isprintable():
            raise LayoutFormError(f"{what} {name[:MAX_WORD_LENGTH]!r} is not printable")


def _check_size(layout: Layout) -> None:
    for part in IDENTITY_PARTS:
        length = len(getattr(layout.model, part))
        if length > MAX_WORD_LENGTH:
            raise LayoutFormError(
                f"the model's {part} has {length} characters; at most {MAX_WORD_LENGTH} are allowed"
            )
    if not layout.model.fields:
        raise LayoutFormError("the model has no fields: there is no state to hand over")
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
    """The names that occur more than once."""
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
"""What regions of one group have in common, for one list of block ids addresses them all."""


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
    """Refuse whole blocks of fields with several windows: a block is whole only in one of them."""
    windows = {field.name: field.window_tokens for field in layout.model.fields}
    found: dict[str, tuple[str, int]] = {}
    for rank in layout.ranks:
        whole = {region.name: region.group for region in rank.regions if region.whole_blocks}
        for shard in rank.shards if whole else ():
            group, window = whole.get(shard.region), windows[shard.field]
            if group is None:
                continue
            first = found.setdefault(group, (shard.field, window))
            if first[1] != window:
                raise LayoutFormError(
                    f"group {group} keeps whole blocks, and its fields have several windows: "
                    f"{first[0]} one of {first[1]} tokens, {shard.field} one of {window} (0: all)",
                    group=group,
                    field=shard.field,
                )
