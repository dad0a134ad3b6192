"""Layout files: what is written is read back, and what is malformed is named by its place."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from restow.broker.errors import LayoutFormError
from restow.broker.families import (
    AttentionSpec,
    EngineSettings,
    Mamba2Spec,
    ModelSpec,
    ScaleKind,
    Scales,
    build_layout,
)
from restow.broker.layout import DType, check_layout, digest
from restow.broker.layout.json_form import layout_from_json, layout_to_json
from restow.broker.rpc import wire
from restow.v1 import layout_pb2

MODEL = ModelSpec(
    "m",
    (
        Mamba2Spec(0, 4, 2, 3, 2, 4, DType.BFLOAT16, DType.FLOAT32),
        AttentionSpec(1, 2, 4, DType.BFLOAT16),
        AttentionSpec(2, 2, 4, DType.INT8, 8, Scales(ScaleKind.PER_TOKEN_HEAD)),
        AttentionSpec(3, 2, 4, DType.FLOAT8_E4M3FN, scales=Scales(ScaleKind.STATIC, "v1")),
    ),
)
LAYOUT = build_layout(
    MODEL,
    EngineSettings(tp=2, pages_per_block=2, page_align_bytes=64, conv_rows_extra=2, null_block=0),
)


def as_json() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(layout_to_json(LAYOUT)))
    return data


def test_round_trips() -> None:
    assert layout_from_json(as_json()) == LAYOUT
    assert wire.layout_from_proto(wire.layout_to_proto(LAYOUT)) == LAYOUT
    nameless = replace(LAYOUT, model=replace(LAYOUT.model, name=""))
    assert layout_from_json(layout_to_json(nameless)) == nameless


def test_blocks_that_are_not_kept_whole_need_not_say_so() -> None:
    assert not any("whole_blocks" in region for region in as_json()["ranks"][0]["regions"])


@pytest.mark.parametrize("part", ["", "model", "model.fields", "ranks", "ranks.regions"])
def test_a_message_of_a_later_release_is_refused(part: str) -> None:
    # A field that is left out might be the field that tells pages apart.
    message = wire.layout_to_proto(LAYOUT)
    inner: Any = message
    for name in part.split(".") if part else ():
        inner = getattr(inner, name)
        inner = inner if hasattr(inner, "MergeFromString") else inner[0]
    inner.MergeFromString(b"\xc2\x3e\x01x")  # field 1000, a text
    with pytest.raises(LayoutFormError, match="upgrade the broker first"):
        wire.layout_from_proto(layout_pb2.Layout.FromString(message.SerializeToString()))


def test_a_field_without_scales_need_not_say_so() -> None:
    data = as_json()
    for field in data["model"]["fields"]:
        if not field["scales"]:
            del field["scales"]
    assert layout_from_json(data) == LAYOUT


def test_a_layout_without_scratch_memory_need_not_say_so() -> None:
    data = as_json()
    for rank in data["ranks"]:
        del rank["scratch"]
    ranks = tuple(replace(rank, scratch=()) for rank in LAYOUT.ranks)
    assert layout_from_json(data) == replace(LAYOUT, ranks=ranks)
    assert digest(layout_from_json(data)) != digest(LAYOUT)


def test_the_form_that_scripts_rely_on() -> None:
    assert as_json()["ranks"][1]["scratch"] == [
        {
            "region": "layers.0.mamba",
            "dtype": "bfloat16",
            "offset_bytes": 60,
            "sizes": [10, 2],
            "strides_bytes": [2, 20],
        }
    ]
    shard = as_json()["ranks"][1]["shards"][0]
    assert shard == {
        "field": "layers.0.conv.x",
        "kind": "snapshot",
        "axes": ["channel", "tap"],
        "box": [[4, 8], [0, 3]],
        "dtype": "bfloat16",
        "region": "layers.0.mamba",
        "offset_bytes": 0,
        "strides_bytes": [2, 20],
        "token_stride_bytes": None,
    }


def test_only_what_the_design_lists_is_needed() -> None:
    data = as_json()
    data["model"] = {}  # windows and scales can be said of a listed field only
    plain = tuple(replace(field, window_tokens=0, scales="") for field in LAYOUT.model.fields)
    for rank in data["ranks"]:
        for region in rank["regions"]:
            if region["group"] in ("attention", "state"):
                del region["group"]
            if region["page_tokens"] is None:
                del region["page_tokens"], region["pages_per_block"]
    layout = layout_from_json(data)
    check_layout(layout)
    assert layout.model.fields == plain
    assert layout.ranks == LAYOUT.ranks


def test_extra_keys_do_no_harm() -> None:
    data = as_json()
    data["comment"] = data["ranks"][0]["shards"][0]["comment"] = "for people"
    assert layout_from_json(data) == LAYOUT


SHARD = "ranks[0].shards[1]"
MALFORMED: list[tuple[str, object]] = [
    ("model", None),
    ("model.name", 5),
    ("model.fields", {}),
    ("model.fields[0]", "x"),
    ("model.fields[0].field", ""),
    ("model.fields[0].kind", "weekly"),
    ("model.fields[0].axes", "channel"),
    ("model.fields[0].axes[1]", 3),
    ("model.fields[0].scales", 1.0),
    ("model.fields[0].scales", None),
    ("model.fields[0].shape[0]", 1.5),
    ("ranks", {"0": {}}),
    ("ranks[1]", []),
    ("ranks[1].rank", True),
    ("ranks[1].regions", None),
    ("ranks[1].regions[0]", 3),
    ("ranks[1].regions[0].name", None),
    ("ranks[1].regions[0].group", 7),
    ("ranks[1].regions[0].page_stride_bytes", "8"),
    ("ranks[1].regions[1].page_tokens", 1.0),
    ("ranks[1].regions[1].pages_per_block", []),
    ("ranks[1].regions[1].null_block", "0"),
    ("ranks[0].shards", "none"),
    ("ranks[0].scratch", 3),
    ("ranks[0].scratch[0]", []),
    ("ranks[0].scratch[0].region", 3),
    ("ranks[0].scratch[0].dtype", "float17"),
    ("ranks[0].scratch[0].offset_bytes", None),
    ("ranks[0].scratch[0].sizes[0]", 1.5),
    ("ranks[0].scratch[0].strides_bytes", {}),
    (SHARD, None),
    (f"{SHARD}.field", 9),
    (f"{SHARD}.kind", "perhaps"),
    (f"{SHARD}.axes", 3),
    (f"{SHARD}.box", 3),
    (f"{SHARD}.box[0]", [1]),
    (f"{SHARD}.box[0]", [2, 1]),
    (f"{SHARD}.box[0]", [-1, 1]),
    (f"{SHARD}.box[0][1]", None),
    (f"{SHARD}.dtype", "float17"),
    (f"{SHARD}.region", ["r"]),
    (f"{SHARD}.offset_bytes", "0"),
    (f"{SHARD}.strides_bytes", 2),
    (f"{SHARD}.strides_bytes[0]", "2"),
    (f"{SHARD}.token_stride_bytes", "2"),
    ("model.name", None),
    ("model.name", "half a character: \ud800"),
    (f"{SHARD}.field", "\udfff"),
]


def put(data: Any, path: str, value: object, delete: bool = False) -> None:
    """Set or delete what a path such as ``ranks[0].shards[1].box`` names."""
    keys = [
        int(k) if k.isdigit() else k for k in path.replace("[", ".").replace("]", "").split(".")
    ]
    for key in keys[:-1]:
        data = data[key]
    if delete:
        del data[keys[-1]]
    else:
        data[keys[-1]] = value


@pytest.mark.parametrize(
    ("place", "value"), MALFORMED, ids=[f"{place}={value!r}" for place, value in MALFORMED]
)
def test_a_malformed_place_is_named(place: str, value: object) -> None:
    data = as_json()
    put(data, place, value)
    with pytest.raises(LayoutFormError) as caught:
        layout_from_json(data)
    assert caught.value.subject["place"] == place
    assert caught.value.reason == "LAYOUT_MALFORMED"
    assert place in caught.value.message


@pytest.mark.parametrize(
    "path",
    [
        "model",
        "ranks",
        "ranks[0].rank",
        "ranks[0].regions",
        "ranks[0].shards",
        "ranks[0].regions[0].name",
        "ranks[0].regions[0].page_stride_bytes",
        "model.fields[0].field",
        "model.fields[0].kind",
        "model.fields[0].axes",
        "model.fields[0].shape",
        *(
            f"{SHARD}.{key}"
            for key in ("field", "kind", "axes", "box", "dtype", "region", "offset_bytes")
        ),
        f"{SHARD}.strides_bytes",
    ],
)
def test_a_missing_key_is_named(path: str) -> None:
    data = as_json()
    put(data, path, None, delete=True)
    with pytest.raises(LayoutFormError, match=path.rpartition(".")[2]) as caught:
        layout_from_json(data)
    assert caught.value.subject["place"] == (path.rpartition(".")[0] or "layout")


@pytest.mark.parametrize("data", [None, 3, "layout", [], [1], b"{}"])
def test_what_is_no_layout_at_all(data: object) -> None:
    with pytest.raises(LayoutFormError):
        layout_from_json(data)


@pytest.mark.parametrize("key", ["axes", "kind"])
def test_shards_that_contradict_the_model(key: str) -> None:
    data = as_json()
    shards = [s for rank in data["ranks"] for s in rank["shards"]]
    for shard in shards:
        if shard["field"] == "layers.0.ssm":
            shard[key] = ["a", "b", "c"] if key == "axes" else "per_token"
    with pytest.raises(LayoutFormError, match=r"layers\.0\.ssm"):
        layout_from_json(data)


@pytest.mark.parametrize("key", ["axes", "kind"])
def test_shards_that_contradict_each_other(key: str) -> None:
    data = as_json()
    del data["model"]["fields"]
    data["ranks"][1]["shards"][0][key] = ["a", "b"] if key == "axes" else "per_token"
    with pytest.raises(LayoutFormError, match="other axes or another kind"):
        layout_from_json(data)


def test_a_long_value_is_cut_short_in_the_message() -> None:
    data = copy.deepcopy(as_json())
    data["ranks"][0]["rank"] = "9" * 100_000
    with pytest.raises(LayoutFormError) as caught:
        layout_from_json(data)
    assert len(caught.value.message) < 200
