"""`restow layout`: what it writes and how it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import CONFIG, Outcome
from restow.broker.families import (
    ConvLayout,
    EngineSettings,
    KvOrder,
    ScaleKind,
    Scales,
    build_layout,
)
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType, digest
from restow.broker.layout.json_form import layout_from_json

Run = Callable[..., str]
Fail = Callable[..., Outcome]
LayoutFile = Callable[..., Path]


def test_from_config_writes_the_layout_of_its_settings(config: Path, run: Run) -> None:
    out = run(
        *("layout", "from-config", config, "--tp", 4, "--conv-layout", "DS", "--page-tokens", 8),
        *("--pages-per-block", 2, "--kv-order", "NHD", "--kv-dtype", "float8_e4m3fn"),
        *("--conv-dtype", "float16", "--ssm-dtype", "float16", "--speculative-tokens", 3),
        *("--page-align-bytes", 512, "--name", "mine"),
    )
    types = (DType.FLOAT8_E4M3FN, DType.FLOAT16, DType.FLOAT16)
    model = replace(model_from_hf_config(CONFIG, *types), name="mine")
    settings = EngineSettings(4, 8, 2, ConvLayout.DS, KvOrder.NHD, 3, 512)
    assert layout_from_json(json.loads(out)) == build_layout(model, settings)


def test_from_config_cuts_stages_and_keeps_keys_apart(config: Path, run: Run) -> None:
    out = run("layout", "from-config", config, "--pp", 2, "--layers-per-stage", "2,6", "--kv-apart")
    settings = EngineSettings(pp=2, layers_per_stage=(2, 6), kv_packed=False)
    layout = layout_from_json(json.loads(out))
    assert layout == build_layout(model_from_hf_config(CONFIG), settings)
    assert [len(rank.regions) for rank in layout.ranks] == [1, 7]


def test_from_config_keeps_whole_blocks(config: Path, run: Run) -> None:
    layout = layout_from_json(json.loads(run("layout", "from-config", config, "--whole-blocks")))
    settings = EngineSettings(whole_blocks=True)
    assert layout == build_layout(model_from_hf_config(CONFIG), settings)
    regions = layout.ranks[0].regions
    assert [one.whole_blocks for one in regions] == [one.page_tokens is not None for one in regions]


def test_from_config_puts_all_layers_into_one_block(config: Path, run: Run) -> None:
    out = run("layout", "from-config", config, "--cross-layer-blocks", "--page-align-bytes", 256)
    settings = EngineSettings(page_align_bytes=256, cross_layer_blocks=True)
    layout = layout_from_json(json.loads(out))
    assert layout == build_layout(model_from_hf_config(CONFIG), settings)
    apart = build_layout(model_from_hf_config(CONFIG), EngineSettings(page_align_bytes=256))
    together = {region.group: region for region in layout.ranks[0].regions}
    for group, region in together.items():
        strides = [r.page_stride_bytes for r in apart.ranks[0].regions if r.group == group]
        assert region.page_stride_bytes == sum(strides)


def test_from_config_takes_scales(config: Path, run: Run) -> None:
    own, static = Scales(ScaleKind.PER_TOKEN_HEAD), Scales(ScaleKind.STATIC, "rev 7")
    for scales, options in (
        (own, ["--kv-scales", "per-token-head"]),
        (static, ["--kv-scales", "static", "--kv-scales-fingerprint", "rev 7"]),
    ):
        out = run("layout", "from-config", config, "--kv-dtype", "float8_e4m3fn", *options)
        model = model_from_hf_config(CONFIG, DType.FLOAT8_E4M3FN, kv_scales=scales)
        assert layout_from_json(json.loads(out)) == build_layout(model, EngineSettings())


def test_from_config_of_a_model_with_an_indexer(tmp_path: Path, run: Run, fail: Fail) -> None:
    config = {"model_type": "deepseek_v32", "num_hidden_layers": 1}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    asked = ("--kv-dtype", "float8_e4m3fn", "--kv-scales", "per-block")
    # Pages have as many tokens as its kernels take, unless another number is asked for.
    layout = layout_from_json(json.loads(run("layout", "from-config", file, *asked)))
    (rank,) = layout.ranks
    assert [region.page_stride_bytes for region in rank.regions] == [64 * 656, 64 * 132]
    assert {region.page_tokens for region in rank.regions} == {64}
    outcome = fail("layout", "from-config", file, "--page-tokens", 16, "--json")
    assert "page_tokens 64" in outcome.json["error"]["message"]


def test_check_diff_and_plan_say_which_model(layout_file: LayoutFile, run: Run, fail: Fail) -> None:
    words = ("--revision", "v1", "--adapter", "a", "--quantisation", "fp8", "--name", "m")
    one, none = layout_file("one", *words), layout_file("none")
    other = layout_file("other", *words, "--adapter", "b")
    said = "model 'm' (revision 'v1', adapter 'a', quantisation 'fp8')"
    identity = {"name": "m", "revision": "v1", "adapter": "a", "quantisation": "fp8"}
    assert said in run("layout", "check", one)
    checked = json.loads(run("layout", "check", one, "--json"))
    assert {"model": "m", **dict(list(identity.items())[1:])}.items() <= checked.items()
    outcome = fail("layout", "diff", one, other, "--json")
    assert outcome.json["differences"] == [
        {"subject": "model", "aspect": "adapter", "left": "a", "right": "b"}
    ]
    outcome = fail("layout", "diff", one, none, "--json")
    assert {one["aspect"] for one in outcome.json["differences"]} == set(identity)
    assert said in run("plan", one, one, "--explain")
    assert json.loads(run("plan", one, one, "--json"))["model"] == identity
    for pair in ((one, other), (one, none), (none, other)):
        outcome = fail("plan", *pair, "--json")
        assert outcome.json["error"]["reason"] == "MODEL_MISMATCH"


def test_check_and_diff_say_the_scales(layout_file: LayoutFile, run: Run, fail: Fail) -> None:
    static = ("--kv-dtype", "float8_e4m3fn", "--kv-scales", "static", "--kv-scales-fingerprint")
    left, right = layout_file("left", *static, "v1"), layout_file("right", *static, "v2")
    assert "scales of k, v: static v1" in run("layout", "check", left)
    assert json.loads(run("layout", "check", left, "--json"))["scales"] == {"static v1": ["k", "v"]}
    outcome = fail("layout", "diff", left, right, "--json")
    assert {(one["aspect"], one["left"], one["right"]) for one in outcome.json["differences"]} == {
        ("scales", "static v1", "static v2")
    }
    outcome = fail("plan", left, right, "--json")
    assert outcome.json["error"]["reason"] == "SCALES_MISMATCH"


def test_tokens_that_ranks_share_out(
    config: Path, layout_file: LayoutFile, run: Run, fail: Fail
) -> None:
    asked = ("--tp", 8, "--decode-context-parallel", 4, "--kv-interleave", 8)
    shared, whole = layout_file("shared", *asked), layout_file("whole", "--tp", 8)
    settings = EngineSettings(tp=8, dcp=4, interleave_tokens=8)
    made = layout_from_json(json.loads(shared.read_text()))
    assert made.ranks == build_layout(model_from_hf_config(CONFIG), settings).ranks
    assert "tokens of attention: in 4 parts, 8 in turn" in run("layout", "check", shared)
    data = json.loads(run("layout", "check", shared, "--json"))
    assert data["shared_tokens"] == {"attention": {"context_parts": 4, "interleave_tokens": 8}}
    outcome = fail("layout", "diff", shared, whole, "--json")
    assert {(one["aspect"], one["left"], one["right"]) for one in outcome.json["differences"]} == {
        ("cut", "2 parts", "2 parts, 4 copies"),
        ("tokens", "in 4 parts, 8 in turn", "on each rank"),
    }
    assert "8 ranks to 8" in run("plan", shared, whole, "--explain")
    outcome = fail("layout", "from-config", config, "--tp", 8, "--decode-context-parallel", 3)
    assert "it must divide tp" in outcome.err


def test_stages_in_words_are_wrong_usage(config: Path, fail: Fail) -> None:
    outcome = fail("layout", "from-config", config, "--pp", 2, "--layers-per-stage", "2,many")
    assert outcome.code == 2
    assert "12,14" in outcome.err


def test_from_config_has_the_engines_defaults(config: Path, run: Run) -> None:
    layout = layout_from_json(json.loads(run("layout", "from-config", config)))
    assert layout == build_layout(model_from_hf_config(CONFIG), EngineSettings())
    assert layout.model.name == "nemotron_h"


def test_check_of_a_good_layout(layout_file: LayoutFile, run: Run) -> None:
    file = layout_file("good", "--tp", 2, "--page-align-bytes", 4096)
    out = run("layout", "check", file)
    assert out.startswith(
        "ok: model 'nemotron_h' (no revision, no adapter, no quantisation), 20 fields, 2 ranks"
    )
    assert "padding" in out
    data = json.loads(run("layout", "check", file, "--json"))
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


def test_check_names_a_hole(layout_file: LayoutFile, fail: Fail) -> None:
    file = layout_file("hole", "--tp", 2)
    change(file, lambda data: data["ranks"][1]["shards"].pop(3))
    outcome = fail("layout", "check", file)
    assert outcome.code == 1
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    assert "LAYOUT_HOLE: field layers.0.ssm, axis head: no rank holds [8, 16)" in outcome.err
    outcome = fail("layout", "check", file, "--json")
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
def test_check_of_what_is_no_layout(
    content: bytes, message: str, tmp_path: Path, fail: Fail
) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    outcome = fail("layout", "check", file, "--json")
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
    changes: dict[str, Any], settings: list[object], reason: str, config: Path, fail: Fail
) -> None:
    config.write_text(json.dumps({**CONFIG, **changes}))
    outcome = fail("layout", "from-config", config, *settings, "--json")
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
        ["nonsense"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str], config: Path, fail: Fail) -> None:
    given = [str(config) if argument == "CONFIG" else argument for argument in arguments]
    assert fail(*given).code == 2


def test_diff_says_in_what_two_layouts_differ(layout_file: LayoutFile, fail: Fail) -> None:
    left = layout_file("left", "--tp", 2)
    right = layout_file("right", "--tp", 4, "--conv-layout", "DS", "--ssm-dtype", "float16")
    outcome = fail("layout", "diff", left, right, "--json")
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
    text = fail("layout", "diff", left, right)
    assert text.code == 4
    assert "float32" in text.out


def test_diff_of_a_layout_with_itself(layout_file: LayoutFile, run: Run) -> None:
    file = layout_file("one", "--tp", 2)
    assert run("layout", "diff", file, file) == "equal\n"
    assert json.loads(run("layout", "diff", file, file, "--json")) == {
        "equal": True,
        "differences": [],
    }


def test_diff_of_a_broken_layout_is_no_answer(layout_file: LayoutFile, fail: Fail) -> None:
    good, bad = layout_file("good"), layout_file("bad")
    change(bad, lambda data: data["ranks"][0]["shards"].pop())
    outcome = fail("layout", "diff", good, bad, "--json")
    assert outcome.code == 1
    assert outcome.json["error"]["reason"] == "LAYOUT_HOLE"


def test_float4_has_scales_for_16_elements_and_static_ones(
    config: Path, run: Run, fail: Fail
) -> None:
    packed = ("--kv-dtype", "float4_e2m1fn_x2", "--kv-scales", "per-16")
    named = (*packed, "--kv-scales-fingerprint", "v1")
    layout = layout_from_json(json.loads(run("layout", "from-config", config, *named)))
    scales = {field.scales for field in layout.model.fields if field.name.endswith(".k")}
    assert scales == {"per token, head and 16 elements, static v1"}
    assert fail("layout", "from-config", config, *packed).code == 2
