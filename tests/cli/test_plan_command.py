"""`restow plan`: the JSON that scripts rely on, and the tables."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.typed import document, failed, printed
from restow.broker.layout import digest
from restow.broker.layout.json_form import layout_from_json
from restow.broker.planner import Strategy, make_plan

LayoutFile = Callable[..., Path]
Pair = tuple[Path, Path]
SLICES = ("--strategy", "slices")


@pytest.fixture
def pair(layout_file: LayoutFile) -> Pair:
    return layout_file("p", "--tp", 2), layout_file("d", "--tp", 4, "--conv-layout", "DS")


def test_the_json_form(pair: Pair) -> None:
    data = document("plan", *pair, "--tokens", 100)
    source, destination = (layout_from_json(json.loads(file.read_text())) for file in pair)
    plan = make_plan(source, destination)
    assert data["source"] == digest(source)
    assert data["destination"] == digest(destination)
    assert data["bytes"] == plan.bytes == sum(rank["bytes"] for rank in data["ranks"])
    assert (data["tokens"], data["bytes_at_tokens"]) == (100, plan.bytes_at(100))
    assert len(data["moves"]) == len(plan.moves)
    (move,) = (m for m in data["moves"] if m["field"] == "layers.2.conv.B" and m["dst_rank"] == 3)
    place = {"region": "layers.2.mamba", "token_stride_bytes": None, "dtype": "bfloat16"}
    assert move == {
        "field": "layers.2.conv.B",
        "src_rank": 1,
        "dst_rank": 3,
        "box": [[1, 2], [0, 16], [0, 3]],
        "src": {**place, "offset_bytes": 128, "strides_bytes": [32, 2, 192]},
        "dst": {**place, "offset_bytes": 192, "strides_bytes": [96, 6, 2]},
    }
    for rank in data["ranks"]:
        assert rank["strategy"].keys() == {"conv.x", "conv.B", "conv.C", "ssm", "k", "v"}
        assert set(rank["strategy"].values()) <= {"slices", "whole", "pack", "interleave", "mixed"}
        assert rank["strategies"].keys() == set(Strategy)
        assert {"dst_rank", "bytes", "reads", "launches"} <= rank.keys()


@pytest.mark.parametrize(
    ("strategy", "launches"), [("slices", 0), ("whole", 1), ("pack", 2), ("interleave", 2)]
)
def test_a_strategy_that_is_asked_for(pair: Pair, strategy: str, launches: int) -> None:
    data = document("plan", *pair, "--strategy", strategy)
    for rank in data["ranks"]:
        # Keys and values grow with the prompt: they are packed behind the states.
        others = {"pack"} if strategy == "interleave" else set()
        assert set(rank["strategy"].values()) == {strategy, *others}
        cost = {"reads": rank["reads"], "launches": rank["launches"]}
        assert cost.items() <= rank["strategies"][strategy].items()
        assert rank["launches"] == launches


def test_the_table(pair: Pair) -> None:
    out = printed("plan", *pair)
    assert out.startswith("2 ranks to 4: ")
    assert "conv.x, conv.B, conv.C, ssm, k, v" in out
    assert "layers." not in out


def test_the_explanation_fits_on_a_screen(pair: Pair) -> None:
    out = printed("plan", *pair, "--explain")
    assert "layers.{0,2,4..}.conv.x x4" in out
    assert "layers.{3,7}.k x2" in out
    words = " ".join(out.split())
    assert "4 layers (0, 2, 4, 5): conv.x, conv.B, conv.C, ssm" in words
    assert "(single elements, because channel is innermost on P and tap on D)" in words
    assert max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) < 100


def test_the_explanation_as_json(pair: Pair) -> None:
    data = document("plan", *pair, "--explain", *SLICES)
    assert [one["layers"] for one in data["alike"]] == [["0", "2", "4", "5"], ["3", "7"]]
    assert data["alike"][1]["remarks"][1:] == [
        "For each rank of D a page falls into 1 piece: k and v together 1.0 KiB.",
        "2 ranks of D hold the same k and v: each rank of D reads one copy.",
    ]
    rank = data["ranks"][1]
    (line,) = (line for line in rank["fields"] if line["class"] == "conv.B")
    assert line["fields"] == [f"layers.{i}.conv.B" for i in (0, 2, 4, 5)]
    assert line["bytes"] == 4 * 16 * 3 * 2
    assert line["parts"] == [
        {
            "box": [[0, 1], [0, 16], [0, 3]],
            "src_rank": 0,
            "replicas": [0],
            "pieces": 48,
            "piece_bytes": 2,
        }
    ]


def test_rounding_needs_the_operators_word(pair: Pair, layout_file: LayoutFile) -> None:
    other = layout_file("other", "--ssm-dtype", "bfloat16")
    error = failed("plan", pair[0], other, "--json").json["error"]
    assert (error["status"], error["reason"]) == ("FAILED_PRECONDITION", "NARROWING_NOT_ALLOWED")
    assert error["subject"]["field"].endswith(".ssm")
    assert "--allow-narrowing" in error["message"]
    assert document("plan", pair[0], other, "--allow-narrowing")["moves"]
    assert document("plan", other, pair[0])["moves"], "widening is exact"


def test_a_broken_layout_is_named_by_its_file(pair: Pair) -> None:
    data = json.loads(pair[1].read_text())
    data["ranks"][0]["shards"][0]["dtype"] = "float17"
    pair[1].write_text(json.dumps(data))
    error = failed("plan", *pair, "--json").json["error"]
    assert error["subject"] == {"place": "ranks[0].shards[0].dtype", "file": str(pair[1])}


def test_no_torch_for_plans(pair: Pair) -> None:
    script = (
        "import sys\n"
        "from restow.broker.cli.main import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules or 'grpc' in sys.modules)\n"
    )
    command = [sys.executable, "-c", script, "plan", *map(str, pair), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_costs_that_are_given(pair: Pair, tmp_path: Path) -> None:
    """Check that all is read in place where descriptors cost nothing.

    The expected time names the costs that it was computed from.
    """
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"seconds_per_descriptor": 0.0}))
    data = document("plan", *pair, "--costs", costs)
    assert data["costs"]["seconds_per_descriptor"] == 0.0
    for rank in data["ranks"]:
        assert set(rank["strategy"].values()) == {"slices"}
        size = rank["strategies"]["slices"]["bytes"]
        expected = size / data["costs"]["read_bytes_per_second"] * 1e3
        assert rank["strategies"]["slices"]["expected_ms"] == pytest.approx(expected, abs=1e-3)
    assert "expected by these costs: 0.00 us a read" in printed(
        "plan", *pair, "--costs", costs, "--explain"
    )
    costs.write_text(json.dumps({"seconds_per_read": 1}))
    outcome = failed("plan", *pair, "--costs", costs, "--json")
    assert outcome.json["error"]["reason"] == "COSTS_INVALID"
    costs.write_text("[]")
    assert "holds no JSON object" in failed("plan", *pair, "--costs", costs).err


def test_what_is_rebuilt_and_what_that_saves(layout_file: LayoutFile, tmp_path: Path) -> None:
    p = layout_file("p", "--mixer-inputs")
    d = layout_file("d", "--projections", "--conv-layout", "DS")
    assert "inputs" in printed("layout", "check", p)
    forced = ("--strategy", "recompute", "--json")
    (rank,) = json.loads(printed("plan", p, d, *forced, "--tokens", 1, "--explain"))["ranks"]
    (sent,) = document("plan", p, d, *SLICES, "--tokens", 1)["ranks"]
    layers, channels, hidden = 4, 16 * 8 + 2 * 2 * 16, 4096  # wider than its channels are many
    assert sent["bytes"] - rank["bytes"] == layers * 3 * (channels - hidden) * 2
    (line,) = (line for line in rank["fields"] if line["class"] == "mixer_input")
    assert (line["strategy"], line["bytes"]) == ("recompute", layers * 3 * hidden * 2)
    assert rank["strategies"]["recompute"]["reads"] == rank["reads"]
    shown = printed("plan", p, d, *forced[:2], "--explain", "--svg", tmp_path / "plan.svg")
    said = "Rebuilt on D from 24,576 bytes of mixer inputs: conv.x, conv.B and conv.C."
    assert said in shown
    assert said in (tmp_path / "plan.svg").read_text()
    outcome = failed("plan", p, layout_file("plain"), *forced)
    assert "D offers no in-projection weights" in outcome.json["error"]["message"]


def test_what_begins_cold_is_said(tmp_path: Path) -> None:
    """Check that the plan names the layers of MTP that D alone runs."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
    config = {"model_type": "mimo", **heads, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    pair = []
    for count in (0, 1):
        pair.append(tmp_path / f"{count}.json")
        asked = ("--draft-layers", count, "--tp", 1 + count)
        pair[-1].write_text(printed("layout", "from-config", tmp_path / "config.json", *asked))
    said = printed("plan", *pair, "--explain")
    assert "D's fields of drafts that P lacks begin zeroed: layers.2.k, layers.2.v" in said
    assert document("plan", *pair)["cold"] == ["layers.2.k", "layers.2.v"]
    assert document("plan", *reversed(pair))["cold"] == []
    printed("plan", *pair, "--svg", tmp_path / "drawn.svg")
