"""Lay a model's state out for an engine, as vLLM packs it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import TypeVar

from restow.broker.errors import StageError
from restow.broker.families.pages import Pages, layer_pages
from restow.broker.families.settings import EngineSettings
from restow.broker.families.specs import ModelSpec
from restow.broker.layout import Layout, RankLayout, Region, Scratch, Shard, Span

Placed = TypeVar("Placed", Shard, Scratch)


def build_layout(model: ModelSpec, settings: EngineSettings) -> Layout:
    """Return the layout of ``model`` on an engine with ``settings``.

    Rank ``(stage * pcp + c) * tp + r`` is tensor-parallel rank ``r`` of prefill-context rank ``c``
    of a pipeline stage, and holds the state of the stage's layers. Raises `TpSizeError`,
    `StageError`, and `LayoutFormError` for settings that are out of bounds or that the model does
    not allow.
    """
    settings.check()
    model.check_rebuilding(settings.mixer_inputs or settings.projections)
    model.check_drafts()
    stages = stage_layers(model.depth, settings.pp, settings.layers_per_stage)
    ranks = tuple(
        _rank(model, settings, layers, index * settings.stage_ranks + rank, rank)
        for index, layers in enumerate(stages)
        for rank in range(settings.stage_ranks)
    )
    return Layout(model.model(settings.mixer_inputs or settings.projections), ranks)


def _rank(
    model: ModelSpec, settings: EngineSettings, layers: Span, rank: int, stage_rank: int
) -> RankLayout:
    own = [
        layer
        for layer in model.layers
        if layers.start <= layer.layer // model.numbers_per_layer < layers.stop
    ]
    drafts = model.draft_layers if layers.stop == model.depth else ()
    pages = [layer_pages(layer, settings, stage_rank) for layer in (*own, *drafts)]
    parts = {
        part.name: tuple(chain.from_iterable(getattr(one, part.name) for one in pages))
        for part in fields(Pages)
    }
    layout = RankLayout(rank, **parts)
    return join_layers(layout) if settings.cross_layer_blocks else layout


def stage_layers(depth: int, pp: int, layers_per_stage: Sequence[int] = ()) -> list[Span]:
    """Return the layers of every stage. Raises `StageError`.

    Without ``layers_per_stage`` stages are cut as in vLLM (`get_pp_indices`): evenly, and the
    remaining layers go to the stages before the last, one each, from the back.

    >>> [str(span) for span in stage_layers(10, 4)]
    ['[0, 2)', '[2, 5)', '[5, 8)', '[8, 10)']
    """
    counts = list(layers_per_stage)
    if not counts:
        if not 1 <= pp <= max(depth, 1):
            raise StageError(f"{depth} layers can't be cut into {pp} stages", stages=pp)
        counts = [depth // pp] * pp
        for back in range(2, depth % pp + 2):
            counts[-back] += 1
    if len(counts) != pp or sum(counts) != depth or min(counts) < 1:
        raise StageError(
            f"layers per stage are {counts}: {pp} stages need one number each, from 1 on, that "
            f"add up to {depth} layers",
            stages=pp,
        )
    return [
        Span(start, stop) for start, stop in itertools.pairwise([0, *itertools.accumulate(counts)])
    ]


def join_layers(rank: RankLayout) -> RankLayout:
    """Return the rank's layout with one region a group, whose pages hold those of all layers.

    A layer's page lies in the order of the layers, with its own padding (vLLM's cross-layer
    blocks). Constant regions stay as they are.
    """
    joined: dict[str, Region] = {}
    begins: dict[str, tuple[str, int]] = {}
    constant = []
    for region in rank.regions:
        if region.constant:
            constant.append(region)
            continue
        before = joined.get(region.group)
        start = 0 if before is None else before.page_stride_bytes
        whole_bytes = start + region.page_stride_bytes
        joined[region.group] = replace(region, name=region.group, page_stride_bytes=whole_bytes)
        begins[region.name] = region.group, start
    return replace(
        rank,
        regions=(*joined.values(), *constant),
        shards=tuple(_moved(rank.shards, begins)),
        scratch=tuple(_moved(rank.scratch, begins)),
        inputs=tuple(_moved(rank.inputs, begins)),
    )


def _moved(placed: tuple[Placed, ...], begins: dict[str, tuple[str, int]]) -> Iterator[Placed]:
    for one in placed:
        region, start = begins[one.region]
        yield replace(one, region=region, offset_bytes=one.offset_bytes + start)
