"""Check mixer inputs and projections, from which conv windows can be recomputed."""

from __future__ import annotations

from restow.broker.errors import LayoutFormError, LayoutStrideError
from restow.broker.layout.span import Span, box_text, volume
from restow.broker.layout.values import (
    MAX_CHANNELS,
    MAX_HIDDEN,
    MAX_TAPS,
    Field,
    Kind,
    Layout,
    Projection,
    Region,
    Shard,
)

INPUT_AXES = ("tap", "hidden")


def check_inputs(layout: Layout) -> None:
    """Raise `LayoutFormError` or `LayoutStrideError` if an input or a projection is invalid.

    `PageChecker` checks their places inside of pages.
    """
    inputs = {field.name: field for field in layout.model.inputs}
    fields = {field.name: field for field in layout.model.fields}
    for field in inputs.values():
        if field.kind is not Kind.SNAPSHOT or field.axes != INPUT_AXES:
            raise LayoutFormError(
                f"input {field.name}: it must be a snapshot with the axes {list(INPUT_AXES)}",
                field=field.name,
            )
        if field.shape[0] > MAX_TAPS or field.shape[1] > MAX_HIDDEN:
            raise LayoutFormError(
                f"input {field.name}: {list(field.shape)} is more than {MAX_TAPS} taps of "
                f"{MAX_HIDDEN}",
                field=field.name,
            )
    for rank in layout.ranks:
        for shard in rank.inputs:
            _check_input(rank.rank, shard, inputs.get(shard.field))
        types = {(shard.field, shard.box): shard.dtype for shard in rank.shards}
        regions = {region.name: region for region in rank.regions}
        offered = set()
        for weights in rank.projections:
            why = _misfit(weights, fields.get(weights.field), inputs.get(weights.input), regions)
            held = types.get((weights.field, weights.box))
            if not why:
                if held is None:
                    why = "the rank has no shard of that box"
                elif not held.castable:
                    why = f"no number can be converted to the {held.label} of its shard"
                elif (weights.field, weights.box) in offered:
                    why = "it is listed more than once"
            if why:
                raise LayoutFormError(
                    f"rank {rank.rank}, projection of {weights.field}: {why}",
                    field=weights.field,
                    ranks=rank.rank,
                    region=weights.region,
                )
            offered.add((weights.field, weights.box))


def _check_input(rank: int, shard: Shard, field: Field | None) -> None:
    """Check that an input is held whole, as aligned rows of numbers without gaps in a row."""
    item = shard.dtype.itemsize_bytes
    wrong = ""
    if field is None:
        wrong = "the model lists no such input"
    elif shard.box != tuple(Span(0, size) for size in field.shape):
        wrong = "a rank must keep all of an input"
    elif not shard.dtype.castable:
        wrong = f"{shard.dtype.label} cannot be multiplied"
    elif len(shard.strides_bytes) != 2 or shard.strides_bytes[1] != item:
        wrong = f"strides {list(shard.strides_bytes)}: a row must have no gaps"
    elif shard.offset_bytes % item or shard.strides_bytes[0] % item:
        wrong = f"its numbers must lie at multiples of {item} bytes"
    if wrong:
        raise LayoutStrideError(
            f"rank {rank}, input {shard.field}: {wrong}",
            field=shard.field,
            ranks=rank,
            region=shard.region,
        )


def _misfit(
    weights: Projection,
    field: Field | None,
    read: Field | None,
    regions: dict[str, Region],
) -> str:
    """Return why a projection is invalid; empty if it is valid."""
    item = weights.dtype.itemsize_bytes
    region = regions.get(weights.region)
    if field is None:
        return "the model has no such field"
    if read is None:
        return f"the model has no input {weights.input!r}"
    if field.kind is not Kind.SNAPSHOT or "tap" not in field.axes:
        return "only windows (snapshots with an axis tap) can be recomputed"
    tap = field.axes.index("tap")
    if field.shape[tap] != read.shape[0]:
        return f"it has {field.shape[tap]} taps, input {read.name} has {read.shape[0]}"
    if len(weights.box) != len(field.axes) or weights.box[tap] != Span(0, field.shape[tap]):
        return "its box needs one range for each axis, and all taps"
    if region is None or not region.constant:
        return f"region {weights.region!r} is not listed, or is not constant (it has a group)"
    if not weights.dtype.castable:
        return f"{weights.dtype.label} cannot be multiplied"
    strides = weights.strides_bytes
    if len(strides) != len(field.axes) or strides[-1] != item:
        return (
            f"strides {list(strides)}: they need one entry for each axis but tap, and {item} bytes "
            f"as the last entry, because a row of weights has no gaps"
        )
    if any(stride % item for stride in (weights.offset_bytes, *strides)):
        return f"its numbers must lie at multiples of {item} bytes"
    if volume(weights.box) > MAX_CHANNELS:
        return f"it has more than {MAX_CHANNELS} channels"
    return ""


def weights_as_shard(weights: Projection, field: Field, read: Field) -> tuple[Field, Shard]:
    """Return weights as a shard of a field of their own, so that the same checks apply to them.

    The axis tap of the conv field ``field`` is replaced by the hidden axis of the input ``read``.
    """
    tap = field.axes.index("tap")
    name = f"(weights of {field.name} {box_text(weights.box)})"
    axes = (*field.axes[:tap], *field.axes[tap + 1 :], "hidden")
    return Field(name, Kind.SNAPSHOT, axes, ()), Shard(
        name,
        (*weights.box[:tap], *weights.box[tap + 1 :], Span(0, read.shape[1])),
        weights.dtype,
        weights.region,
        weights.offset_bytes,
        weights.strides_bytes,
    )
