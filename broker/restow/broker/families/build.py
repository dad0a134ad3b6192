"""Lay a model's state out for an engine, as vLLM packs it: a region a layer and kind, or group."""

from __future__ import annotations

from dataclasses import fields
from itertools import chain

from restow.broker.families.cross_layer import join_layers
from restow.broker.families.pages import Pages, layer_pages
from restow.broker.families.settings import EngineSettings
from restow.broker.families.specs import ModelSpec
from restow.broker.families.stages import stage_layers
from restow.broker.layout import Layout, RankLayout, Span


def build_layout(model: ModelSpec, settings: EngineSettings) -> Layout:
    """The layout of ``model`` on an engine with ``settings``.

    Rank ``(stage * pcp + c) * tp + r`` is tensor-parallel rank ``r`` of a pipeline stage's
    prefill-context rank ``c``, and holds the state of the stage's layers. Raises `TpSizeError`,
    `StageError`, and `LayoutFormError` for settings outside of their bounds or that ask for what
    the model can't give.
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
