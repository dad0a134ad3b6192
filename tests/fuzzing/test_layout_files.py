"""Layout files of anybody's making: a checked layout comes of them, or a typed error."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_harness.world import make_case
from broker.fakes import model_layout
from fuzzing.messages import mutated_json, spoiled
from fuzzing.rounds import tried
from restow.broker.cli.common.files import read_layout
from restow.broker.errors import LayoutError, RestowError
from restow.broker.layout import Layout, check_layout, digest
from restow.broker.layout.json_form import layout_from_json, layout_to_json
from restow.broker.planner import Strategy, compile_programs, make_plan
from restow.broker.rpc import wire

LAYOUTS = (model_layout(2), make_case("recompute").source, make_case("recompute").destination)
FORMS: list[Any] = [layout_to_json(one) for one in LAYOUTS]


def use(layout: Layout) -> None:
    """Use a layout for all that a checked layout is good for."""
    again = layout_from_json(json.loads(json.dumps(layout_to_json(layout))))
    assert digest(again) == digest(layout)
    assert wire.layout_from_proto(wire.layout_to_proto(layout)) == layout
    other = LAYOUTS[len(digest(layout).strip("0")) % len(LAYOUTS)]
    for source, destination in ((layout, other), (other, layout)):
        try:
            compile_programs(make_plan(source, destination), Strategy.AUTO)
        except RestowError:
            continue


def test_a_file_with_a_few_things_changed() -> None:
    outcomes: Counter[str] = Counter()

    @tried(250)
    @given(st.sampled_from(FORMS).flatmap(mutated_json))
    def read(data: Any) -> None:
        try:
            layout = layout_from_json(data)
            check_layout(layout)
        except LayoutError as error:
            outcomes[error.reason] += 1
            error.message.encode()
            return
        outcomes["OK"] += 1
        use(layout)

    read()
    # Some pass, and of the others some fail only when strides and boxes are looked at.
    assert outcomes["OK"], outcomes
    assert outcomes.total() > outcomes["OK"] + outcomes["LAYOUT_MALFORMED"], outcomes


@tried(100)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["model", "ranks", "fields", "shards"]), inner)
        ),
    )
)
def test_any_json_at_all(data: Any) -> None:
    with pytest.raises(LayoutError):
        check_layout(layout_from_json(data))


def test_any_bytes_at_all(tmp_path: Path) -> None:
    file, good = tmp_path / "layout.json", json.dumps(FORMS[0]).encode()
    named: list[str] = []

    @tried(60)
    @given(spoiled(good))
    def read(data: bytes) -> None:
        file.write_bytes(data)
        try:
            use(read_layout(file))
        except LayoutError as error:
            error.message.encode()
            named.append(error.subject["file"])

    read()
    assert set(named) == {str(file)}
