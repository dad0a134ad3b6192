"""`restow layout from-config` of a folder or a file, and what it says of where values are from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cli.conftest import CONFIG
from cli.typed import typed
from restow.agents.engines.common.checkpoint import checkpoint_revision
from restow.broker.layout import Layout
from restow.broker.layout.json_form import layout_from_json

MODELOPT = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
}
STATIC = ("--kv-scales", "static", "--kv-scales-fingerprint", "v1")


def from_config(*arguments: object) -> Any:
    return typed("layout", "from-config", *arguments)


def layout_of(result: Any) -> Layout:
    return layout_from_json(json.loads(result.stdout))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Write a checkpoint's folder: a config, ModelOpt's file beside it, and weights."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    save_file({"a": torch.ones(4)}, folder / "model.safetensors")
    return folder


def test_a_folder_is_read_with_what_stands_beside_the_config(checkpoint: Path) -> None:
    result = from_config(checkpoint, *STATIC)
    model = layout_of(result).model
    assert (model.name, model.quantisation) == ("nemotron_h", "modelopt_fp4")
    assert model.revision == checkpoint_revision(checkpoint)
    (scales,) = {field.scales for field in model.fields if field.name.endswith(".k")}
    assert scales == "static v1"
    told = result.stderr
    assert "quantization.kv_cache_quant_algo  FP8" in told
    assert "hf_quant_config.json: KV is float8_e4m3fn" in told
    # Of a file the same is read, but for the weights.
    result = from_config(checkpoint / "config.json", *STATIC)
    same = layout_of(result).model
    assert (same.fields, same.quantisation, same.revision) == (model.fields, "modelopt_fp4", "")


def test_its_revision_stands_for_its_scales(checkpoint: Path) -> None:
    for given, revision in (((), checkpoint_revision(checkpoint)), (("--revision", "r7"), "r7")):
        result = from_config(checkpoint, *given)
        model = layout_of(result).model
        (scales,) = {field.scales for field in model.fields if field.name.endswith(".k")}
        assert (scales, model.revision) == (f"static {revision}", revision)
        assert "the scales that the revision's checkpoint declares" in result.stderr


@pytest.mark.parametrize("option", [(), ("-q",)])
def test_a_layout_is_for_looking_at_where_nothing_identifies_its_scales(
    option: tuple[str, ...], checkpoint: Path
) -> None:
    result = from_config(checkpoint / "config.json", *option)
    model = layout_of(result).model
    (scales,) = {field.scales for field in model.fields if field.name.endswith(".k")}
    assert (result.exit_code, scales) == (0, "unknown")
    assert "warning: this layout is for looking at" in result.stderr
    assert "--kv-scales-fingerprint" in result.stderr
    for named in (STATIC, ("--revision", "r7"), ("--kv-dtype", "bfloat16")):
        assert "warning" not in from_config(checkpoint / "config.json", *named).stderr
    trimmed = {"quantization": MODELOPT["quantization"]}
    (checkpoint / "hf_quant_config.json").write_text(json.dumps(trimmed))
    assert "take the whole file" in from_config(checkpoint / "config.json", *STATIC).stderr
    as_json = from_config(checkpoint / "config.json", "--json")
    (told,) = [one for one in json.loads(as_json.stderr)["readings"] if one["key"] == "kv_scales"]
    assert (told["value"], told["file"]) == ("unknown", "")


def test_an_operator_may_say_who_the_model_is(checkpoint: Path) -> None:
    words = ("--revision", "r7", "--adapter", "a", "--quantisation", "mine", "--name", "m")
    model = layout_of(from_config(checkpoint, *STATIC, *words)).model
    said = (model.name, model.revision, model.adapter, model.quantisation)
    assert said == ("m", "r7", "a", "mine")
    result = from_config(checkpoint, *STATIC, "--revision", "", "--quantisation", "")
    model = layout_of(result).model
    assert (model.revision, model.quantisation) == ("", "")


def test_values_are_told_with_key_and_file(config: Path) -> None:
    result = from_config(config)
    lines = [line.split(maxsplit=2) for line in result.stderr.splitlines()]
    told = {key: (value, origin) for key, value, origin in lines}
    assert told["head_dim"] == ("16", "config.json")
    assert told["conv_kernel" if "conv_kernel" in told else "mamba_d_conv"] == (
        "4",
        "assumed: the default of the model's configuration class",
    )
    layout = json.loads(result.stdout)
    for option in ("-q", "--quiet"):
        quiet = from_config(config, option)
        assert (json.loads(quiet.stdout), quiet.stderr) == (layout, "")
    as_json = from_config(config, "--json")
    assert json.loads(as_json.stdout) == layout
    readings = json.loads(as_json.stderr)["readings"]
    assert {"key": "head_dim", "value": 16, "file": "config.json", "note": ""} in readings
    assert [one["key"] for one in readings] == list(told)


def test_a_value_steers_no_terminal(config: Path) -> None:
    config.write_text(
        json.dumps(
            {
                **CONFIG,
                "dtype": "auto",
                "quantization_config": {"quant_method": "fp8", "kv_cache_scheme": "\x1b[2J" * 20},
            }
        )
    )
    told = from_config(config).stderr
    assert "\x1b" not in told
    assert "left aside" in told


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    result = from_config(tmp_path)
    assert "holds no config.json" in str(result.exception)
    (tmp_path / "config.json").mkdir()
    assert "can't be read" in str(from_config(tmp_path).exception)


@pytest.mark.parametrize(("content", "message"), [("{", "is no JSON"), ("[]", "no JSON object")])
def test_a_file_beside_it_that_says_nothing(checkpoint: Path, content: str, message: str) -> None:
    (checkpoint / "hf_quant_config.json").write_text(content)
    result = from_config(checkpoint)
    assert message in str(result.exception)
    assert "hf_quant_config.json" in str(result.exception)


def test_a_type_to_compute_in(config: Path) -> None:
    config.write_text(json.dumps({**CONFIG, "dtype": "float32"}))
    for options, wanted in (((), "bfloat16"), (("--dtype", "float32"), "float32")):
        layout = layout_of(from_config(config, *options))
        found = {s.field.rpartition(".")[2]: s.dtype.label for s in layout.ranks[0].shards}
        assert found["k"] == found["x"] == wanted


def test_pages_that_an_indexer_needs_are_said_to_be_assumed(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "deepseek_v32", "num_hidden_layers": 1}))
    (line,) = (one for one in from_config(file).stderr.splitlines() if "page_tokens" in one)
    assert line.split()[:3] == ["page_tokens", "64", "assumed:"]
    assert "page_tokens" not in from_config(file, "--page-tokens", 64).stderr
