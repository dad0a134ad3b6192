"""Costs as they are given, measured and used: by them ways are chosen."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest

from restow.broker.draw.explain import explain
from restow.broker.errors import CostsInvalidError
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType
from restow.broker.planner import CopyCosts, CostModel, Plan, ReadCosts, Strategy, make_plan
from restow.broker.planner.costs import UNCACHED

COPYING = CopyCosts(1e-4, 1e-6, 4e-9, 5e9)
READING = ReadCosts(2e-6, 7e9)


def test_copies_cost_what_they_do_on_the_slower_host() -> None:
    other = CopyCosts(3e-4, 2e-7, 9e-9, 2e9)
    for pair in ((COPYING, other), (other, COPYING)):
        costs = CostModel.measured(*pair, READING, stage_s=1e-3)
        assert costs == CostModel(2e-6, 7e9, 2e9, 3e-4, 1e-6, 9e-9, 1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 11.0])
def test_hostile_figures_are_refused(value: float) -> None:
    with pytest.raises(CostsInvalidError, match="seconds_per_descriptor"):
        CostModel.measured(COPYING, COPYING, ReadCosts(value, 1e9), 0.0)
    with pytest.raises(CostsInvalidError, match="copy_bytes_per_second is 0"):
        CostModel.measured(COPYING, CopyCosts(0, 0, 0, 0.0), READING, 0.0)


def test_costs_that_an_operator_gives() -> None:
    assert CostModel.of({"seconds_per_stage": 1}) == CostModel(seconds_per_stage=1)
    assert CostModel.of(asdict(CostModel())) == CostModel()
    with pytest.raises(CostsInvalidError, match="'second_per_stage' is no cost; known are copy_"):
        CostModel.of({"second_per_stage": 1})
    for value in ("1", True, None):
        with pytest.raises(CostsInvalidError, match="not a number"):
            CostModel.of({"seconds_per_stage": value})


def test_what_is_expected_is_what_is_chosen_by() -> None:
    """Check that `auto` is expected to take no longer than any one way, but for gaps.

    Both use one model of costs. Descriptors, then copies, then everything that is staged become too
    dear.
    """
    plan = _plan()
    for costs in (
        CostModel(seconds_per_descriptor=1e-3),
        CostModel(seconds_per_copy=1e-2),
        CostModel(seconds_per_launch=1.0, seconds_per_stage=1.0),
        CostModel(),
    ):
        for rank in explain(plan, Strategy.AUTO, costs.nominal_tokens, costs):
            by_strategy = rank.cost_by_strategy.items()
            known = {one: c.seconds for one, c in by_strategy if not isinstance(c, str)}
            assert known[Strategy.AUTO] <= 1.01 * min(known.values()), costs


FAST = 1e15
OF_PIECES = CostModel(1.0, FAST, FAST, 0.0, 1.0, 0.0, 0.0)
OF_BYTES = CostModel(1.0, FAST, 1e4, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("costs", [OF_PIECES, OF_BYTES])
def test_packing_is_reckoned_with_bytes_that_no_cache_holds(costs: CostModel) -> None:
    kv = ModelSpec("kv", (AttentionSpec(0, 8, 128, DType.BFLOAT16),))
    plan = make_plan(*(build_layout(kv, EngineSettings(tp=tp)) for tp in (2, 4)))
    tokens = costs.nominal_tokens
    size_bytes, pages = (
        2 * 2 * 128 * 2 * tokens,
        tokens // 16,
    )  # k and v are read as one, and copied apart
    by = _costs_of_first_rank(plan, costs)
    twice_s = 2 * (UNCACHED * size_bytes / 1e4 if costs is OF_BYTES else 2 * pages)
    assert by[Strategy.PACK] == pytest.approx(twice_s + 1.0)  # one descriptor
    # What is expected is what is chosen by.
    for piece_s, chosen, other in (
        (0.9 * twice_s / pages, Strategy.SLICES, Strategy.PACK),
        (1.1 * twice_s / pages, Strategy.PACK, Strategy.SLICES),
    ):
        by = _costs_of_first_rank(plan, replace(costs, seconds_per_descriptor=piece_s))
        assert by[Strategy.AUTO] == by[chosen] < by[other]


def _costs_of_first_rank(plan: Plan, costs: CostModel) -> dict[Strategy, float]:
    first = next(iter(explain(plan, Strategy.AUTO, costs.nominal_tokens, costs)))
    return {
        one: cost.seconds
        for one, cost in first.cost_by_strategy.items()
        if not isinstance(cost, str)
    }


def _plan() -> Plan:
    spec = ModelSpec("m", (Mamba2Spec(0, 64, 64, 128, 8, 4, DType.BFLOAT16, DType.FLOAT32),))
    source, destination = (
        build_layout(spec, EngineSettings(tp=tp, conv_layout=conv))
        for tp, conv in ((2, ConvLayout.SD), (4, ConvLayout.DS))
    )
    return make_plan(source, destination)
