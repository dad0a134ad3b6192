"""The schema leaves nothing out: what a value has, each of its forms carries, and it counts."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from typing import Any

import pytest

from restow.broker.layout import (
    DType,
    Field,
    Kind,
    Layout,
    Model,
    Projection,
    RankLayout,
    Region,
    Scratch,
    Shard,
    Span,
    digest,
)
from restow.broker.layout.json_form import layout_from_json, layout_to_json
from restow.broker.layout.schema import (
    FIELD,
    MODEL,
    PROJECTION,
    RANK,
    REGION,
    SCRATCH,
    SHARD,
    Record,
    Sort,
)
from restow.broker.rpc import wire
from restow.v1 import layout_pb2

RECORDS = (FIELD, MODEL, REGION, SHARD, SCRATCH, PROJECTION, RANK)
BOX = (Span(0, 2),)
LAYOUT = Layout(
    Model(
        "m",
        tuple(Field(name, Kind.SNAPSHOT, ("a",), (2,)) for name in ("f", "other", "z")),
        tuple(Field(name, Kind.SNAPSHOT, ("a",), (2,)) for name in ("i", "j")),
    ),
    (
        RankLayout(
            0,
            (Region("r", "g", 64, None),),
            (Shard("f", BOX, DType.UINT8, "r", 0, (1,)),),
            (Scratch("r", DType.UINT8, 2, (2,), (1,)),),
            (Shard("i", BOX, DType.UINT8, "r", 4, (1,)),),
            (Projection("f", BOX, "i", DType.UINT8, "r", 6, (1,)),),
        ),
    ),
)
"""The last of each kind of values is changed; no shard lies in the last fields and inputs."""
CHANGES: dict[Sort, object] = {
    Sort.NAME: "other",
    Sort.TEXT: "other",
    Sort.NUMBER: 7,
    Sort.FLAG: True,
    Sort.NAMES: ("z",),
    Sort.NUMBERS: (7,),
    Sort.BOX: (Span(3, 5),),
    Sort.DTYPE: DType.INT8,
    Sort.KIND: Kind.PER_TOKEN,
}
PLACES = [
    (owner, part, one)
    for owner in (MODEL, RANK)
    for part in owner.nested
    for one in part.record.attributes
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.of.__name__)
def test_the_schema_has_what_the_value_and_its_message_have(record: Record) -> None:
    values = {one.name: one.default for one in dataclasses.fields(record.of)}
    message = layout_pb2.DESCRIPTOR.message_types_by_name[record.of.__name__].fields_by_name
    parts: tuple[Any, ...] = (*record.attributes, *record.nested)
    names = {one.name for one in parts}
    assert names == set(values) == set(message)
    for one in record.attributes:
        assert values[one.name] in (dataclasses.MISSING, one.default)
        assert message[one.name].has_presence == one.zero


@pytest.mark.parametrize(
    ("owner", "part", "one"), PLACES, ids=[f"{part.name}.{one.name}" for _, part, one in PLACES]
)
def test_all_that_a_part_says_is_carried_and_counts(owner: Record, part: Any, one: Any) -> None:
    whole: Any = LAYOUT.model if owner is MODEL else LAYOUT.ranks[0]
    *others, value = getattr(whole, part.name)
    other = replace(value, **{one.name: CHANGES[one.sort]})
    changed = replace(whole, **{part.name: (*others, other)})
    check_carried(
        replace(LAYOUT, model=changed) if owner is MODEL else replace(LAYOUT, ranks=(changed,)),
        counts=one.of_inputs or part.name != "inputs",
    )


@pytest.mark.parametrize("one", [*MODEL.attributes, *RANK.attributes], ids=lambda one: one.name)
def test_all_that_a_model_and_a_rank_say_is_carried_and_counts(one: Any) -> None:
    changed: Any = {one.name: CHANGES[one.sort]}
    if one in MODEL.attributes:
        check_carried(replace(LAYOUT, model=replace(LAYOUT.model, **changed)))
    else:
        check_carried(replace(LAYOUT, ranks=(replace(LAYOUT.ranks[0], **changed),)))


def check_carried(layout: Layout, counts: bool = True) -> None:
    """Check that JSON and messages carry a layout, and that its digest is another one's."""
    assert (digest(layout) != digest(LAYOUT)) == counts
    assert wire.layout_from_proto(wire.layout_to_proto(layout)) == layout
    assert layout_from_json(json.loads(json.dumps(layout_to_json(layout)))) == layout
