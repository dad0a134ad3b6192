"""Which heads and groups a rank holds, and settings that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restow.broker.errors import LayoutFormError, TpSizeError
from restow.broker.families import EngineSettings, Mamba2Spec, ModelSpec, build_layout
from restow.broker.families.settings import rank_slice, rank_span
from restow.broker.layout import DType, Span

SPEC = Mamba2Spec(0, 8, 2, 4, 2, 4, DType.BFLOAT16, DType.FLOAT32)


@given(st.integers(1, 12), st.integers(1, 12))
def test_a_rank_holds_the_head_that_vllm_gives_it(count: int, times: int) -> None:
    """Check that rank r of T holds head r * Kv // T and those up to the next rank's."""
    for tp, heads in ((count * times, count), (count, count * times)):
        for rank in range(tp):
            span = rank_span(heads, tp, rank, "head")
            assert span.start == rank * heads // tp
            assert span.stop == max((rank + 1) * heads // tp, span.start + 1)


@given(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 6))
def test_a_replicated_group_is_rank_over_t_over_g(groups: int, times: int) -> None:
    tp = groups * times
    spans = [rank_span(groups, tp, rank, "group") for rank in range(tp)]
    assert spans == [Span(rank // (tp // groups), rank // (tp // groups) + 1) for rank in range(tp)]


def test_one_group_is_everybodys() -> None:
    assert {rank_span(1, 8, rank, "group") for rank in range(8)} == {Span(0, 1)}


@given(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
def test_a_rank_holds_the_groups_that_its_heads_use(groups: int, each: int, tp: int) -> None:
    heads = groups * each
    if heads % tp or (groups % tp and tp % groups):
        return
    for rank in range(tp):
        mine = rank_slice(heads, tp, rank, "Mamba head")
        used = {head // each for head in range(mine.start, mine.stop)}
        held = rank_span(groups, tp, rank, "group")
        assert used == set(range(held.start, held.stop))


@pytest.mark.parametrize(("count", "tp"), [(8, 3), (3, 8), (4, 6), (6, 4)])
def test_neither_cut_nor_replicated(count: int, tp: int) -> None:
    with pytest.raises(TpSizeError, match="one must divide the other") as caught:
        rank_span(count, tp, 0, "head")
    assert caught.value.subject["axis"] == "head"
    assert caught.value.reason == "TP_SIZE_NOT_ALLOWED"


def test_heads_of_a_recurrence_are_never_replicated() -> None:
    with pytest.raises(TpSizeError, match="does not divide"):
        rank_slice(8, 16, 0, "Mamba head")


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": 0},
        {"tp": 1025},
        {"page_tokens": 0},
        {"pages_per_block": 0},
        {"conv_rows_extra": -1},
        {"page_align_bytes": 0},
    ],
)
def test_settings_that_mean_nothing(changes: dict[str, Any]) -> None:
    with pytest.raises(LayoutFormError, match=next(iter(changes))):
        build_layout(ModelSpec("m", (SPEC,)), replace(EngineSettings(), **changes))
