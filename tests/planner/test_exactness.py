"""Which changes of type are exact."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from restow.broker.errors import NarrowingError
from restow.broker.families import AttentionSpec, EngineSettings, ModelSpec, build_layout
from restow.broker.layout import DType
from restow.broker.planner import check_exact, make_plan

FLOATS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
PAIRS = list(itertools.product(FLOATS, FLOATS))


def survives(values: torch.Tensor, other: DType) -> bool:
    """Return whether torch gives the same numbers back through another type."""
    back = values.to(getattr(torch, other.label)).to(values.dtype)
    return bool(torch.equal(back, values))


@pytest.mark.parametrize(("source", "destination"), PAIRS)
def test_a_type_holds_another_iff_every_value_survives(source: DType, destination: DType) -> None:
    if source is DType.FLOAT32:
        bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32).view(np.int32)
    else:
        bits = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
    values = torch.from_numpy(bits.copy()).view(getattr(torch, source.label))
    values = values[~values.isnan()]
    assert destination.holds(source) == survives(values, destination)


@pytest.mark.parametrize(("source", "destination"), PAIRS)
def test_a_plan_is_refused_that_would_round(source: DType, destination: DType) -> None:
    layouts = (
        build_layout(ModelSpec("m", (AttentionSpec(0, 2, 4, dtype),)), EngineSettings())
        for dtype in (source, destination)
    )
    plan = make_plan(*layouts)
    if destination.holds(source):
        check_exact(plan)
        return
    with pytest.raises(NarrowingError) as caught:
        check_exact(plan)
    assert caught.value.subject["field"] == "layers.0.k"
    assert caught.value.reason == "NARROWING_NOT_ALLOWED"
