"""What engines keep and offer so that conv windows can be rebuilt instead of sent."""

from __future__ import annotations

import math

from restow.broker.families.parts import input_name
from restow.broker.families.recurrent import RecurrentSpec
from restow.broker.families.settings import EngineSettings
from restow.broker.layout import Projection, Region, Shard, Span

INPUT_ALIGN_BYTES = 16
CONSTANT_GROUP = ""


def input_shards(
    layer: RecurrentSpec, settings: EngineSettings, region: str, end: int
) -> tuple[tuple[Shard, ...], int]:
    """The layer's inputs behind the states that ``end`` there, and where they end.

    Every rank keeps them whole, as every rank reads them.
    """
    form = layer.recurrence()
    mixer = form.mixer
    if not settings.mixer_inputs or mixer is None or form.obstacle:
        return (), end
    start = -(-end // INPUT_ALIGN_BYTES) * INPUT_ALIGN_BYTES
    item = mixer.dtype.itemsize_bytes
    box = (Span(0, form.taps), Span(0, mixer.hidden))
    strides = (mixer.hidden * item, item)
    shard = Shard(input_name(layer.layer), box, mixer.dtype, region, start, strides)
    return (shard,), start + form.taps * strides[0]


def weights(
    layer: RecurrentSpec, settings: EngineSettings, tp_rank: int
) -> tuple[tuple[Region, ...], tuple[Projection, ...]]:
    """The rows of the in-projection that make a rank's windows: ``[x | B | C][hidden]``.

    They follow each other as in the weights of vLLM, where others lie before and behind them.
    """
    form = layer.recurrence()
    mixer = form.mixer
    if not settings.projections or mixer is None or form.obstacle:
        return (), ()
    name = f"layers.{layer.layer}.in_proj"
    item = mixer.dtype.itemsize_bytes
    row_bytes = mixer.hidden * item
    offered, end = [], 0
    for part in form.conv:
        box = part.box(settings.tp, tp_rank)
        sizes = [span.size for span in box]
        strides = (math.prod(sizes[axis + 1 :]) * row_bytes for axis in range(len(sizes)))
        offered.append(
            Projection(
                f"layers.{layer.layer}.{part.name}",
                (*box, Span(0, form.taps)),
                input_name(layer.layer),
                name,
                end,
                (*strides, item),
                mixer.dtype,
            )
        )
        end += math.prod(sizes) * row_bytes
    return (Region(name, CONSTANT_GROUP, end, None),), tuple(offered)
