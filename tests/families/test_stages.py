"""Pipeline stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restow.broker.errors import StageError
from restow.broker.families import AttentionSpec, EngineSettings, ModelSpec, build_layout
from restow.broker.families.build import stage_layers
from restow.broker.layout import DType, check_layout


@pytest.mark.parametrize(
    ("depth", "pp", "sizes"),
    [
        (10, 1, [10]),
        (10, 4, [2, 3, 3, 2]),
        (52, 8, [6, 6, 6, 7, 7, 7, 7, 6]),
        (7, 2, [4, 3]),
        (5, 5, [1] * 5),
    ],
)
def test_stages_are_cut_as_vllm_cuts_them(depth: int, pp: int, sizes: list[int]) -> None:
    assert [span.size for span in stage_layers(depth, pp)] == sizes


@given(st.integers(1, 60), st.integers(1, 60))
def test_every_layer_is_in_one_stage(depth: int, pp: int) -> None:
    if pp > depth:
        with pytest.raises(StageError):
            stage_layers(depth, pp)
        return
    spans = stage_layers(depth, pp)
    assert [layer for span in spans for layer in range(span.start, span.stop)] == [*range(depth)]
    assert len(spans) == pp
    assert all(span.size for span in spans)


@pytest.mark.parametrize("counts", [(3, 3), (3, 3, 3), (7, 0, 1), (9, -1, 0), (8,)])
def test_stages_that_do_not_add_up_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(StageError) as caught:
        stage_layers(8, 3, counts)
    assert caught.value.reason == "STAGES_NOT_ALLOWED"
    assert "8 layers" in str(caught.value)


def test_layers_without_state_count_in_the_cut() -> None:
    # Layer 1 of four has no state: the second stage is layers 2 and 3.
    layers = tuple(AttentionSpec(i, 2, 4, DType.BFLOAT16) for i in (0, 2, 3))
    layout = build_layout(ModelSpec("m", layers, layer_count=4), EngineSettings(tp=2, pp=2))
    check_layout(layout)
    names = [[region.name for region in rank.regions] for rank in layout.ranks]
    assert names == [["layers.0.kv"]] * 2 + [["layers.2.kv", "layers.3.kv"]] * 2
    assert [rank.rank for rank in layout.ranks] == [0, 1, 2, 3]
