"""In what two layouts differ, in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from restow.broker.layout.names import field_class, joined_name
from restow.broker.layout.values import IDENTITY_PARTS, Field, Layout, Region, Shard


@dataclass(frozen=True, slots=True)
class Difference:
    """One aspect of one thing: ``subject`` is the model, the ranks, or fields that differ alike."""

    subject: str
    aspect: str
    left: str
    right: str


def differences(left: Layout, right: Layout) -> list[Difference]:
    """Everything in which two checked layouts differ; empty when they are equal.

    Fields of several layers that differ in the same way are one entry.
    """
    found = []
    for part in ("name", *IDENTITY_PARTS):
        one, other = getattr(left.model, part), getattr(right.model, part)
        if one != other:
            found.append(Difference("model", part, one or "none", other or "none"))
    if len(left.ranks) != len(right.ranks):
        found.append(Difference("engine", "ranks", str(len(left.ranks)), str(len(right.ranks))))
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
    for (aspect, one_words, other_words), names in alike.items():
        for subject in _by_class(names):
            found.append(Difference(subject, aspect, one_words, other_words))
    if not found and left != right:
        found.append(Difference("pages", "places of shards", "other offsets", "other offsets"))
    return found


def _there(form: dict[str, str] | None) -> str:
    return "none" if form is None else "there"


def _by_class(names: list[str]) -> list[str]:
    classes: dict[str, list[str]] = defaultdict(list)
    for name in names:
        classes[field_class(name)].append(name)
    return [joined_name(some) for some in classes.values()]


def _forms(layout: Layout) -> dict[str, dict[str, str]]:
    """What there is to say of every field, and of every input that some rank keeps."""
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
    """How tokens are cut over ranks, whichever of these has the region."""
    parts, run = region.context_parts, region.interleave_tokens
    return f"in {parts} parts, {run} in turn" if parts > 1 else "on each rank"


def _order(field: Field, shard: Shard) -> str:
    """The axes from the outermost to the innermost; an axis of one element has no place."""
    strides = [
        (stride, axis)
        for stride, axis, span in zip(shard.strides_bytes, field.axes, shard.box, strict=True)
        if span.size > 1
    ]
    if shard.token_stride_bytes is not None:
        strides.append((shard.token_stride_bytes, "token"))
    return " ".join(axis for _, axis in sorted(strides, reverse=True))


def _all(words: Iterable[str]) -> str:
    """Each word once, in the order in which they come."""
    return " / ".join(dict.fromkeys(words))


def _ranges(ranks: list[int]) -> str:
    """Ranks in short.

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
