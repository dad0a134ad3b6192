"""The name of a layout's content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import astuple

from restow.broker.layout.values import Layout


def digest(layout: Layout) -> str:
    """SHA-256 over the layout's numbers and names: equal layouts, equal digests, anywhere.

    The text is one line of ASCII for each field, region and shard, in the layout's order: quoted
    names and integers, so that two layouts never share a text.
    """
    return hashlib.sha256("\n".join(_lines(layout)).encode("ascii")).hexdigest()


def _lines(layout: Layout) -> Iterator[str]:
    yield ascii(("layout", *astuple(layout.model.identity)))
    for field in layout.model.fields:
        yield ascii(
            (
                "field",
                field.name,
                field.kind.value,
                field.axes,
                field.shape,
                field.window_tokens,
                field.scales,
            )
        )
    for one in layout.model.inputs:
        yield ascii(("input field", one.name, one.kind.value, one.axes, one.shape))
    for rank in layout.ranks:
        yield ascii(("rank", rank.rank))
        for region in rank.regions:
            yield ascii(
                (
                    "region",
                    region.name,
                    region.group,
                    region.page_stride_bytes,
                    region.page_tokens,
                    region.pages_per_block,
                    region.null_block,
                )
            )
        held = [("shard", shard) for shard in rank.shards]
        for kind, shard in (*held, *(("input", shard) for shard in rank.inputs)):
            yield ascii(
                (
                    kind,
                    shard.field,
                    [(span.start, span.stop) for span in shard.box],
                    shard.dtype.label,
                    shard.region,
                    shard.offset_bytes,
                    shard.strides_bytes,
                    shard.token_stride_bytes,
                )
            )
        for scratch in rank.scratch:
            yield ascii(
                (
                    "scratch",
                    scratch.region,
                    scratch.dtype.label,
                    scratch.offset_bytes,
                    scratch.sizes,
                    scratch.strides_bytes,
                )
            )
        for weights in rank.projections:
            yield ascii(
                (
                    "projection",
                    weights.field,
                    [(span.start, span.stop) for span in weights.box],
                    weights.input,
                    weights.dtype.label,
                    weights.region,
                    weights.offset_bytes,
                    weights.strides_bytes,
                )
            )
