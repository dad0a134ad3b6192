"""What engines keep and offer so that conv windows can be rebuilt, and why some can not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import transformers

from restow.broker.errors import LayoutFormError
from restow.broker.families import (
    EngineSettings,
    Mamba1Spec,
    Mamba2Spec,
    Mixer,
    ModelSpec,
    build_layout,
)
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType, Span, check_layout

NEMOTRON = {
    "model_type": "nemotron_h",
    "hidden_size": 32,
    "hybrid_override_pattern": "M*-M",
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "ssm_state_size": 6,
    "n_groups": 2,
    "num_key_value_heads": 4,
    "dtype": "bfloat16",
}


def test_inputs_lie_behind_the_states_whole_on_every_rank() -> None:
    model = model_from_hf_config(NEMOTRON)
    plain = build_layout(model, EngineSettings(tp=2))
    layout = build_layout(model, EngineSettings(tp=2, mixer_inputs=True))
    check_layout(layout)
    assert [f.name for f in layout.model.inputs] == ["layers.0.mixer_input", "layers.3.mixer_input"]
    for rank, without in zip(layout.ranks, plain.ranks, strict=True):
        assert rank.shards == without.shards
        assert [shard.box for shard in rank.inputs] == [(Span(0, 3), Span(0, 32))] * 2
        state = without.regions[0].page_stride_bytes
        assert rank.inputs[0].offset_bytes == -(-state // 16) * 16
        assert rank.regions[0].page_stride_bytes == rank.inputs[0].offset_bytes + 3 * 32 * 2


def test_inputs_behind_those_of_a_smaller_type_lie_where_numbers_may() -> None:
    # The layers of a group may lie side by side.
    layers = tuple(
        Mamba2Spec(at, 1, 1, 1, 1, 2, dtype, DType.FLOAT32, mixer=Mixer(1, dtype))
        for at, dtype in enumerate((DType.FLOAT16, DType.FLOAT32))
    )
    settings = EngineSettings(mixer_inputs=True, cross_layer_blocks=True)
    layout = build_layout(ModelSpec("m", layers), settings)
    check_layout(layout)
    assert [one.offset_bytes for rank in layout.ranks for one in rank.inputs] == [16, 32 + 16]


def test_a_rank_offers_the_rows_of_its_own_channels() -> None:
    model = model_from_hf_config(NEMOTRON)
    layout = build_layout(model, EngineSettings(tp=4, projections=True))
    check_layout(layout)
    for index, rank in enumerate(layout.ranks):
        x, b, c = rank.projections[:3]
        assert x.box == (Span(8 * index, 8 * index + 8), Span(0, 3))
        assert b.box == c.box == (Span(index // 2, index // 2 + 1), Span(0, 6), Span(0, 3))
        assert (x.offset_bytes, b.offset_bytes, c.offset_bytes) == (0, 8 * 64, 14 * 64)
        assert b.strides_bytes == (6 * 64, 64, 2)
        region = rank.region(x.region)
        assert region.constant
        assert region.page_stride_bytes == 20 * 64


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"use_bias": True}, r"has a bias \(use_bias\)"),
        ({"quantization_config": {"bits": 8}}, "is quantized"),
        ({"hybrid_override_pattern": "**"}, "no layer is recurrent"),
    ],
)
@pytest.mark.parametrize(
    "wish", [EngineSettings(mixer_inputs=True), EngineSettings(projections=True)]
)
def test_what_can_not_be_rebuilt_is_refused(
    changes: dict[str, Any], why: str, wish: EngineSettings
) -> None:
    model = model_from_hf_config(NEMOTRON | changes)
    with pytest.raises(LayoutFormError, match=why):
        build_layout(model, wish)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("FalconH1Config", "scaled by multipliers"),
        ("Qwen3NextConfig", "in-projection of gdn layers is not described"),
        ("KimiLinearConfig", "in-projection of kda layers is not described"),
    ],
)
def test_families_without_a_plain_in_projection(name: str, why: str) -> None:
    model = model_from_hf_config(getattr(transformers, name)().to_dict())
    with pytest.raises(LayoutFormError, match=why):
        build_layout(model, EngineSettings(projections=True))


def test_windows_in_a_type_that_nothing_is_rounded_to() -> None:
    layers = tuple(
        replace(one, conv_dtype=DType.FLOAT8_E4M3FN) if isinstance(one, Mamba2Spec) else one
        for one in model_from_hf_config(NEMOTRON).layers
    )
    model = ModelSpec("m", layers)
    with pytest.raises(LayoutFormError, match="can't be multiplied into float8_e4m3fn"):
        build_layout(model, EngineSettings(mixer_inputs=True))


@pytest.mark.parametrize(
    ("name", "bias"),
    [
        ("NemotronHConfig", "use_bias"),
        ("BambaConfig", "mamba_proj_bias"),
        ("GraniteMoeHybridConfig", "mamba_proj_bias"),
        ("Mamba2Config", "use_bias"),
        ("MambaConfig", "use_bias"),
        ("JambaConfig", "mamba_proj_bias"),
        ("Zamba2Config", "add_bias_linear"),
    ],
)
def test_the_hidden_size_is_that_of_transformers(name: str, bias: str) -> None:
    config = getattr(transformers, name)()
    given = config.to_dict()
    assert not given[bias]
    model = model_from_hf_config({"model_type": given["model_type"]} | _kinds(given))
    mixers = _mixers(model)
    assert mixers
    assert {one.hidden for one in mixers} == {config.hidden_size}
    biased = model_from_hf_config(given | {bias: True})
    assert all(bias in one.obstacle for one in _mixers(biased))


def _mixers(model: ModelSpec) -> list[Mixer]:
    specs = [one for one in model.layers if isinstance(one, Mamba1Spec | Mamba2Spec)]
    return [spec.mixer for spec in specs if spec.mixer is not None]


def _kinds(config: dict[str, Any]) -> dict[str, Any]:
    wanted = ("layers_block_type", "layer_types", "num_hidden_layers")
    return {key: config[key] for key in wanted if config.get(key) is not None}
