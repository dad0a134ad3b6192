"""Describe layouts to people: a summary of each rank, and the differences of two layouts."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from restow.broker.layout.span import volume
from restow.broker.layout.values import (
    IDENTITY_PARTS,
    Field,
    Layout,
    Model,
    RankLayout,
    Region,
    Shard,
)

_LAYER = re.compile(r"(.*\blayers)\.(\d+)\.(.+)")


def field_class(name: str) -> str:
    """Return a field's name without its layer.

    >>> field_class("layers.7.conv.x"), field_class("embedding")
    ('conv.x', 'embedding')
    """
    match = _LAYER.fullmatch(name)
    return match[3] if match else name


def field_layer(name: str) -> str | None:
    """Return the layer in a field's name; None if there is none.

    >>> field_layer("layers.7.conv.x"), field_layer("embedding")
    ('7', None)
    """
    match = _LAYER.fullmatch(name)
    return match[2] if match else None


def joined_name(names: Sequence[str]) -> str:
    """Return a short name for the same field of several layers.

    >>> joined_name(["layers.0.k", "layers.2.k", "layers.4.k", "layers.6.k"])
    'layers.{0,2,4..}.k'
    """
    matches = [_LAYER.fullmatch(name) for name in names]
    layers = [match[2] for match in matches if match]
    if len(layers) != len(names) or len(layers) == 1:
        return ", ".join(names)
    first = matches[0]
    prefix = first[1] if first else ""
    shown = ",".join(layers[:3]) + (".." if len(layers) > 3 else "")
    return f"{prefix}.{{{shown}}}.{field_class(names[0])}"


@dataclass(frozen=True, slots=True)
class RankSummary:
    """Bytes that a rank holds per token and per snapshot, and the padding of its pages.

    If ranks divide the tokens, bytes per token count only the rank's own tokens.
    """

    rank: int
    regions: int
    shards: int
    bytes_per_token: int
    bytes_per_snapshot: int
    padding_bytes: int
    """Padding of a page of each region, added up."""
    bytes_of_inputs: int = 0
    """Mixer inputs that the rank keeps beside a snapshot."""
    bytes_of_weights: int = 0
    """Weights that the rank offers for recomputing conv windows."""


def summarize(rank: RankLayout) -> RankSummary:
    """Return the summary of a rank of a checked layout."""
    per_token = per_snapshot = used = 0
    for region, shard in rank.held():
        size = volume(shard.box) * shard.dtype.itemsize_bytes
        used += size * (region.page_tokens or 1)
        if region.page_tokens is None:
            per_snapshot += size
        else:
            per_token += size
    used += sum(math.prod(s.sizes) * s.dtype.itemsize_bytes for s in rank.scratch)
    inputs = sum(volume(shard.box) * shard.dtype.itemsize_bytes for shard in rank.inputs)
    weights = sum(region.page_stride_bytes for region in rank.regions if region.constant)
    used += inputs + weights
    pages = sum(region.page_stride_bytes for region in rank.regions)
    counts = len(rank.regions), len(rank.shards)
    return RankSummary(rank.rank, *counts, per_token, per_snapshot, pages - used, inputs, weights)


def shared_tokens(layout: Layout) -> dict[str, tuple[int, int]]:
    """Return parts and interleaved tokens of the groups whose tokens are divided among ranks."""
    return {
        region.group: (region.context_parts, region.interleave_tokens)
        for rank in layout.ranks
        for region in rank.regions
        if region.context_parts > 1
    }


def scaled_fields(model: Model) -> dict[str, list[str]]:
    """Return the names of scaled fields, without layers, by scale."""
    names_of: dict[str, list[str]] = {}
    for field in model.fields:
        name = field_class(field.name)
        if field.scales and name not in names_of.setdefault(field.scales, []):
            names_of[field.scales].append(name)
    return names_of


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference in an aspect of ``subject``: model, engine, or fields that differ alike."""

    subject: str
    aspect: str
    left: str
    right: str


def differences(left: Layout, right: Layout) -> list[Difference]:
    """Return all differences between two checked layouts; empty if they are equal.

    Fields of several layers that differ in the same way share an entry.
    """
    listed = []
    for part in ("name", *IDENTITY_PARTS):
        mine, theirs = getattr(left.model, part), getattr(right.model, part)
        if mine != theirs:
            listed.append(Difference("model", part, mine or "none", theirs or "none"))
    if len(left.ranks) != len(right.ranks):
        listed.append(Difference("engine", "ranks", str(len(left.ranks)), str(len(right.ranks))))
    forms = (_forms(left), _forms(right))
    alike: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name in dict.fromkeys([*forms[0], *forms[1]]):
        mine, theirs = (form.get(name) for form in forms)
        if mine is None or theirs is None:
            alike["field", _there(mine), _there(theirs)].append(name)
            continue
        for aspect, words in mine.items():
            if words != theirs[aspect]:
                alike[aspect, words, theirs[aspect]].append(name)
    for (aspect, left_words, right_words), names in alike.items():
        for subject in _by_class(names):
            listed.append(Difference(subject, aspect, left_words, right_words))
    if not listed and left != right:
        listed.append(Difference("pages", "places of shards", "other offsets", "other offsets"))
    return listed


def _there(form: dict[str, str] | None) -> str:
    return "none" if form is None else "there"


def _by_class(names: list[str]) -> list[str]:
    classes: dict[str, list[str]] = defaultdict(list)
    for name in names:
        classes[field_class(name)].append(name)
    return [joined_name(class_names) for class_names in classes.values()]


def _forms(layout: Layout) -> dict[str, dict[str, str]]:
    """Return a description of every field, and of every input that some rank keeps, by aspect."""
    shards: dict[str, list[tuple[int, Shard, Region]]] = defaultdict(list)
    offered: dict[str, list[str]] = defaultdict(list)
    for rank in layout.ranks:
        regions = {region.name: region for region in rank.regions}
        for shard in (*rank.shards, *rank.inputs):
            shards[shard.field].append((rank.rank, shard, regions[shard.region]))
        for weights in rank.projections:
            offered[weights.field].append(weights.dtype.label)
    kept = [field for field in layout.model.inputs if shards[field.name]]
    return {
        field.name: _form(field, shards[field.name])
        | {"in-projection": _all(offered[field.name]) or "none"}
        for field in (*layout.model.fields, *kept)
    }


def _form(field: Field, held: list[tuple[int, Shard, Region]]) -> dict[str, str]:
    held_alike = Counter((shard.box, region.tokens) for _, shard, region in held)
    boxes, copies = {box for box, _ in held_alike}, sorted(set(held_alike.values()))
    sizes = ", ".join(f"{axis} {size}" for axis, size in zip(field.axes, field.shape, strict=True))
    return {
        "shape": f"{field.kind.value}, {sizes}",
        "window": f"{field.window_tokens} tokens" if field.window_tokens else "all tokens",
        "cut": f"{len(boxes)} parts" + (f", {'/'.join(map(str, copies))} copies" * (copies != [1])),
        "ranks": _ranges(sorted({rank for rank, _, _ in held})),
        "scales": field.scales or "none",
        "draft": field.draft or "none",
        "type": _all(shard.dtype.label for _, shard, _ in held),
        "order": _all(_order(field, shard) for _, shard, _ in held),
        "page": _all(
            f"{region.page_tokens} tokens" if region.page_tokens else "a snapshot"
            for _, _, region in held
        ),
        "null block": _all(
            "none" if region.null_block is None else str(region.null_block) for _, _, region in held
        ),
        "tokens": _all(_cut_text(region) for _, _, region in held),
        "first block of a window": _all(
            "whole" if region.whole_blocks else "in part" for _, _, region in held
        ),
        "pages in a block": _all(str(region.pages_per_block) for _, _, region in held),
        "page bytes": _all(f"{region.page_stride_bytes}" for _, _, region in held),
    }


def _cut_text(region: Region) -> str:
    """Describe how tokens are divided among ranks; equal for all regions of the division."""
    parts, run = region.context_parts, region.interleave_tokens
    return f"in {parts} parts, {run} in turn" if parts > 1 else "on each rank"


def _order(field: Field, shard: Shard) -> str:
    """Return the axes from the outermost to the innermost, without axes of a single element."""
    strides = [
        (stride, axis)
        for stride, axis, span in zip(shard.strides_bytes, field.axes, shard.box, strict=True)
        if span.size > 1
    ]
    if shard.token_stride_bytes is not None:
        strides.append((shard.token_stride_bytes, "token"))
    return " ".join(axis for _, axis in sorted(strides, reverse=True))


def _all(words: Iterable[str]) -> str:
    """Join distinct words in the order of their first occurrence."""
    return " / ".join(dict.fromkeys(words))


def _ranges(ranks: list[int]) -> str:
    """Format rank numbers as ranges.

    >>> _ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
