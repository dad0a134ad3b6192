"""Fields of drafts that do not move are left out of pictures, and the others are drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from restow.broker.draw.explain import explain
from restow.broker.draw.picture import make_picture
from restow.broker.draw.svg.plan import plan_svg
from restow.broker.families import AttentionSpec, EngineSettings, ModelSpec, build_layout
from restow.broker.layout import DType
from restow.broker.planner import make_plan

KV = AttentionSpec(0, 4, 8, DType.BFLOAT16)
PLAIN = ModelSpec("m", (KV, replace(KV, layer=1)))
MTP = replace(PLAIN, draft_layers=(replace(KV, layer=2),), draft="mtp")
OTHER = replace(MTP, draft="other")


@pytest.mark.parametrize("cross_layer", [False, True])
@pytest.mark.parametrize(
    ("source", "destination", "title"),
    [
        (PLAIN, MTP, "2 layers (0, 1): k, v"),
        (MTP, PLAIN, "2 layers (0, 1): k, v"),
        (MTP, MTP, "3 layers (0, 1, 2): k, v"),
        (MTP, OTHER, "2 layers (0, 1): k, v"),
    ],
    ids=["d", "p", "both", "another"],
)
def test_what_moves_is_drawn(
    source: ModelSpec, destination: ModelSpec, title: str, cross_layer: bool
) -> None:
    settings = EngineSettings(cross_layer_blocks=cross_layer)
    plan = make_plan(
        build_layout(source, settings), build_layout(destination, replace(settings, tp=2))
    )
    picture = make_picture(plan, explain(plan), 100)
    assert [panel.title for panel in picture.panels] == [title]
    assert plan_svg(picture)
