"""What engines keep and offer so that conv windows can be rebuilt instead of sent."""

from __future__ import annotations

from math import lcm

from restow.broker.families.parts import input_name
from restow.broker.families.recurrent import RecurrentSpec
from restow.broker.families.settings import EngineSettings
from restow.broker.layout import Projection, Region, Shard, Span
from restow.broker.layout.span import aligned, packed_strides, volume

INPUT_ALIGN_BYTES = 16


def input_shards(
    layer: RecurrentSpec, settings: EngineSettings, region: str, end: int
) -> tuple[tuple[Shard, ...], int]:
    """The layer's inputs behind the states that ``end`` there, and where they end.

    Every rank keeps them whole, as every rank reads them.
    """
    form = layer.recurrence()
    mixer = form.read
    if not settings.mixer_inputs or mixer is None:
        return (), end
    start = aligned(end, INPUT_ALIGN_BYTES)
    item = mixer.dtype.itemsize_bytes
    box = (Span(0, form.taps), Span(0, mixer.hidden))
    strides = (mixer.hidden * item, item)
    shard = Shard(input_name(layer.layer), box, mixer.dtype, region, start, strides)
    return (shard,), start + form.taps * strides[0]


def state_align_bytes(settings: EngineSettings) -> int:
    """Where pages of states may end: behind one of them lies another layer's, with inputs too."""
    if not settings.mixer_inputs:
        return settings.page_align_bytes
    return lcm(settings.page_align_bytes, INPUT_ALIGN_BYTES)


def weights(
    layer: RecurrentSpec, settings: EngineSettings, tp_rank: int
) -> tuple[tuple[Region, ...], tuple[Projection, ...]]:
    """The rows of the in-projection that make a rank's windows: ``[x | B | C][hidden]``.

    They follow each other as in the weights of vLLM, where others lie before and behind them.
    """
    form = layer.recurrence()
    mixer = form.read
    if not settings.projections or mixer is None:
        return (), ()
    name = f"layers.{layer.layer}.in_proj"
    item = mixer.dtype.itemsize_bytes
    row_bytes = mixer.hidden * item
    offered, end = [], 0
    for part in form.conv:
        box = part.box(settings.tp, tp_rank)
        offered.append(
            Projection(
                f"layers.{layer.layer}.{part.name}",
                (*box, Span(0, form.taps)),
                input_name(layer.layer),
                mixer.dtype,
                name,
                end,
                (*packed_strides(box, row_bytes), item),
            )
        )
        end += volume(box) * row_bytes
    return (Region(name, "", end, None),), tuple(offered)
