"""`restow layout`: what it writes and how it refuses."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import CONFIG
from cli.typed import document, failed, printed
from restow.broker.families import (
    ConvLayout,
    EngineSettings,
    KvOrder,
    ModelSpec,
    ScaleKind,
    Scales,
    build_layout,
)
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType, digest
from restow.broker.layout.json_form import layout_from_json

LayoutFile = Callable[..., Path]


STATIC = Scales(ScaleKind.STATIC, "rev 7")
TYPES = (DType.FLOAT8_E4M3FN, DType.FLOAT16, DType.FLOAT16)
MADE: dict[str, tuple[str, ModelSpec, EngineSettings]] = {
    "defaults": ("", model_from_hf_config(CONFIG), EngineSettings()),
    "many": (
        "--tp 4 --conv-layout DS --page-tokens 8 --pages-per-block 2 --kv-order NHD "
        "--kv-dtype float8_e4m3fn --conv-dtype float16 --ssm-dtype float16 "
        "--speculative-tokens 3 --page-align-bytes 512 --name mine",
        replace(model_from_hf_config(CONFIG, *TYPES), name="mine"),
        EngineSettings(4, 8, 2, ConvLayout.DS, KvOrder.NHD, 3, 512),
    ),
    "stages": (
        "--pp 2 --layers-per-stage 2,6 --kv-apart",
        model_from_hf_config(CONFIG),
        EngineSettings(pp=2, layers_per_stage=(2, 6), kv_packed=False),
    ),
    "whole blocks": (
        "--whole-blocks",
        model_from_hf_config(CONFIG),
        EngineSettings(whole_blocks=True),
    ),
    "cross-layer blocks": (
        "--cross-layer-blocks --page-align-bytes 256",
        model_from_hf_config(CONFIG),
        EngineSettings(page_align_bytes=256, cross_layer_blocks=True),
    ),
    "own scales": (
        "--kv-dtype float8_e4m3fn --kv-scales per-token-head",
        model_from_hf_config(
            CONFIG, DType.FLOAT8_E4M3FN, kv_scales=Scales(ScaleKind.PER_TOKEN_HEAD)
        ),
        EngineSettings(),
    ),
    "static scales": (
        "--kv-dtype float8_e4m3fn --kv-scales static --kv-scales-fingerprint 'rev 7'",
        model_from_hf_config(CONFIG, DType.FLOAT8_E4M3FN, kv_scales=STATIC),
        EngineSettings(),
    ),
    "shared tokens": (
        "--tp 8 --decode-context-parallel 4 --kv-interleave 8",
        model_from_hf_config(CONFIG),
        EngineSettings(tp=8, dcp=4, interleave_tokens=8),
    ),
}


@pytest.mark.parametrize(("options", "model", "settings"), MADE.values(), ids=MADE)
def test_from_config_writes_the_layout_of_its_options(
    options: str, model: ModelSpec, settings: EngineSettings, config: Path
) -> None:
    out = printed("layout", "from-config", config, *shlex.split(options))
    assert layout_from_json(json.loads(out)) == build_layout(model, settings)


def test_all_layers_in_one_block_take_as_much_as_apart() -> None:
    settings = EngineSettings(page_align_bytes=256)
    together, apart = (
        build_layout(model_from_hf_config(CONFIG), one).ranks[0].regions
        for one in (replace(settings, cross_layer_blocks=True), settings)
    )
    for region in together:
        strides = [one.page_stride_bytes for one in apart if one.group == region.group]
        assert region.page_stride_bytes == sum(strides)


def test_from_config_of_a_model_with_an_indexer(tmp_path: Path) -> None:
    config = {"model_type": "deepseek_v32", "num_hidden_layers": 1}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    asked = ("--kv-dtype", "float8_e4m3fn", "--kv-scales", "per-block")
    # Pages have as many tokens as its kernels take, unless another number is asked for.
    layout = layout_from_json(json.loads(printed("layout", "from-config", file, *asked)))
    (rank,) = layout.ranks
    assert [region.page_stride_bytes for region in rank.regions] == [64 * 656, 64 * 132]
    assert {region.page_tokens for region in rank.regions} == {64}
    outcome = failed("layout", "from-config", file, "--page-tokens", 16, "--json")
    assert "page_tokens 64" in outcome.json["error"]["message"]


def test_check_diff_and_plan_say_which_model(layout_file: LayoutFile) -> None:
    words = ("--revision", "v1", "--adapter", "a", "--quantisation", "fp8", "--name", "m")
    one, none = layout_file("one", *words), layout_file("none")
    other = layout_file("other", *words, "--adapter", "b")
    said = "model 'm' (revision 'v1', adapter 'a', quantisation 'fp8')"
    identity = {"name": "m", "revision": "v1", "adapter": "a", "quantisation": "fp8"}
    assert said in printed("layout", "check", one)
    checked = document("layout", "check", one)
    assert {"model": "m", **dict(list(identity.items())[1:])}.items() <= checked.items()
    outcome = failed("layout", "diff", one, other, "--json")
    assert outcome.json["differences"] == [
        {"subject": "model", "aspect": "adapter", "left": "a", "right": "b"}
    ]
    outcome = failed("layout", "diff", one, none, "--json")
    assert {one["aspect"] for one in outcome.json["differences"]} == set(identity)
    assert said in printed("plan", one, one, "--explain")
    assert document("plan", one, one)["model"] == identity


def test_check_says_the_scales(layout_file: LayoutFile) -> None:
    static = ("--kv-dtype", "float8_e4m3fn", "--kv-scales", "static")
    file = layout_file("static", *static, "--kv-scales-fingerprint", "v1")
    assert "scales of k, v: static v1" in printed("layout", "check", file)
    assert document("layout", "check", file)["scales"] == {"static v1": ["k", "v"]}


def test_tokens_that_ranks_share_out(config: Path, layout_file: LayoutFile) -> None:
    asked = ("--tp", 8, "--decode-context-parallel", 4, "--kv-interleave", 8)
    shared, whole = layout_file("shared", *asked), layout_file("whole", "--tp", 8)
    assert "tokens of attention: in 4 parts, 8 in turn" in printed("layout", "check", shared)
    data = document("layout", "check", shared)
    assert data["shared_tokens"] == {"attention": {"context_parts": 4, "interleave_tokens": 8}}
    outcome = failed("layout", "diff", shared, whole, "--json")
    assert {(one["aspect"], one["left"], one["right"]) for one in outcome.json["differences"]} == {
        ("cut", "2 parts", "2 parts, 4 copies"),
        ("tokens", "in 4 parts, 8 in turn", "on each rank"),
    }
    assert "8 ranks to 8" in printed("plan", shared, whole, "--explain")
    outcome = failed("layout", "from-config", config, "--tp", 8, "--decode-context-parallel", 3)
    assert "it must divide tp" in outcome.err


def test_check_of_a_good_layout(layout_file: LayoutFile) -> None:
    file = layout_file("good", "--tp", 2, "--page-align-bytes", 4096)
    out = printed("layout", "check", file)
    assert out.startswith(
        "ok: model 'nemotron_h' (no revision, no adapter, no quantisation), 20 fields, 2 ranks"
    )
    assert "padding" in out
    data = document("layout", "check", file)
    assert data["ok"] is True
    assert data["digest"] == digest(layout_from_json(json.loads(file.read_text())))
    first = data["ranks"][0]
    conv, ssm = (16 * 8 + 2 * 2 * 16) // 2 * 3 * 2, 16 * 8 * 16 * 4 // 2
    assert first == {
        "rank": 0,
        "regions": 6,
        "shards": 20,
        "bytes_per_token": 2 * 2 * 16 * 2,
        "bytes_per_snapshot": 4 * (conv + ssm),
        "padding_bytes": 4 * (8192 - conv - ssm) + 2 * (4096 - 16 * 2 * 16 * 2),
        "bytes_of_inputs": 0,
        "bytes_of_weights": 0,
    }


def change(file: Path, edit: Callable[[Any], object]) -> None:
    data = json.loads(file.read_text())
    edit(data)
    file.write_text(json.dumps(data))


def test_check_names_a_hole(layout_file: LayoutFile) -> None:
    file = layout_file("hole", "--tp", 2)
    change(file, lambda data: data["ranks"][1]["shards"].pop(3))
    outcome = failed("layout", "check", file)
    assert outcome.code == 1
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    assert "LAYOUT_HOLE: field layers.0.ssm, axis head: no rank holds [8, 16)" in outcome.err
    outcome = failed("layout", "check", file, "--json")
    assert (outcome.code, outcome.err) == (1, "")
    error = outcome.json["error"]
    assert error["status"] == "INVALID_ARGUMENT"
    assert error["reason"] == "LAYOUT_HOLE"
    assert error["subject"] == {
        "field": "layers.0.ssm",
        "axis": "head",
        "ranks": "0",
        "range": "[8, 16)",
        "file": str(file),
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no JSON"),
        (b"{", "is no JSON"),
        (b"\xff\xfe\x00", "is no JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model": {}}', "'ranks' is missing"),
        (b'{"model": {}, "ranks": []}', "the model has no fields"),
        (b"9" * 5000, "is no JSON"),
    ],
)
def test_check_of_what_is_no_layout(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    outcome = failed("layout", "check", file, "--json")
    assert outcome.code == 1
    assert message in outcome.json["error"]["message"]
    assert outcome.json["error"]["reason"] == "LAYOUT_MALFORMED"
    assert outcome.json["error"]["subject"]["file"] == str(file)


@pytest.mark.parametrize(
    ("changes", "settings", "reason"),
    [
        ({"model_type": "perceptron"}, [], "MODEL_TYPE_UNKNOWN"),
        ({}, ["--tp", 3], "TP_SIZE_NOT_ALLOWED"),
        ({}, ["--tp", 5000], "LAYOUT_MALFORMED"),
        ({"n_groups": "two"}, [], "LAYOUT_MALFORMED"),
    ],
)
def test_from_config_refuses(
    changes: dict[str, Any], settings: list[object], reason: str, config: Path
) -> None:
    config.write_text(json.dumps({**CONFIG, **changes}))
    outcome = failed("layout", "from-config", config, *settings, "--json")
    assert outcome.code == 1
    assert outcome.json["error"]["reason"] == reason


@pytest.mark.parametrize(
    "arguments",
    [
        ["layout", "from-config", "nowhere.json"],
        ["layout", "check"],
        ["layout", "from-config", "CONFIG", "--tp", "0"],
        ["layout", "from-config", "CONFIG", "--conv-layout", "XY"],
        ["layout", "from-config", "CONFIG", "--kv-dtype", "float17"],
        ["layout", "from-config", "CONFIG", "--kv-dtype", "uint8"],
        ["layout", "from-config", "CONFIG", "--conv-dtype", "float8_e4m3fn"],
        ["layout", "from-config", "CONFIG", "--ssm-dtype", "uint8"],
        ["layout", "from-config", "CONFIG", "--kv-scales", "static"],
        ["layout", "from-config", "CONFIG", "--kv-scales-fingerprint", "v1"],
        ["layout", "from-config", "CONFIG", "--kv-dtype", "int8", "--kv-scales", "per-16"],
        ["layout", "from-config", "CONFIG", "--pp", "2", "--layers-per-stage", "2,many"],
        ["nonsense"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str], config: Path) -> None:
    given = [str(config) if argument == "CONFIG" else argument for argument in arguments]
    assert failed(*given).code == 2


def test_diff_says_in_what_two_layouts_differ(layout_file: LayoutFile) -> None:
    left = layout_file("left", "--tp", 2)
    right = layout_file("right", "--tp", 4, "--conv-layout", "DS", "--ssm-dtype", "float16")
    outcome = failed("layout", "diff", left, right, "--json")
    assert outcome.code == 4
    assert outcome.json["equal"] is False
    found = {
        (one["subject"].rsplit("}.", 1)[-1], one["aspect"]): (one["left"], one["right"])
        for one in outcome.json["differences"]
    }
    assert found["engine", "ranks"] == ("2", "4")
    assert found["ssm", "type"] == ("float32", "float16")
    assert found["conv.x", "order"] == ("tap channel", "channel tap")
    assert found["conv.B", "cut"] == ("2 parts", "2 parts, 2 copies")
    assert ("k", "page") not in found
    text = failed("layout", "diff", left, right)
    assert text.code == 4
    assert "float32" in text.out


def test_diff_of_a_layout_with_itself(layout_file: LayoutFile) -> None:
    file = layout_file("one", "--tp", 2)
    assert printed("layout", "diff", file, file) == "equal\n"
    told = document("layout", "diff", file, file)
    assert told == {"equal": True, "differences": []}


def test_float4_has_scales_for_16_elements_and_static_ones(config: Path) -> None:
    named = ("--kv-scales", "per-16", "--kv-scales-fingerprint", "v1")
    out = printed("layout", "from-config", config, "--kv-dtype", "float4_e2m1fn_x2", *named)
    layout = layout_from_json(json.loads(out))
    scales = {field.scales for field in layout.model.fields if field.name.endswith(".k")}
    assert scales == {"per token, head and 16 elements, static v1"}
