"""The algebra of ranges, and the examples in the docstrings of the pure modules."""

from __future__ import annotations

import doctest
import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restow.broker.errors import LayoutFormError
from restow.broker.layout import Span
from restow.broker.layout.span import overlap, volume

MODULES = [
    "restow.broker.layout.span",
    "restow.broker.layout.rows",
    "restow.broker.layout.values",
    "restow.broker.layout.check_whole",
    "restow.broker.families.settings",
    "restow.broker.layout.difference",
    "restow.broker.families.build",
    "restow.agents.binding.pages",
    "restow.agents.binding.operands",
    "restow.agents.probing.transport_name",
    "restow.agents.reading.ucx",
    "restow.agents.store.kept",
    "restow.agents.store.room",
]
SPANS = st.tuples(st.integers(0, 12), st.integers(1, 12)).map(lambda p: Span(p[0], p[0] + p[1]))


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


@given(SPANS, SPANS)
def test_overlap_is_the_intersection(one: Span, other: Span) -> None:
    both = set(range(one.start, one.stop)) & set(range(other.start, other.stop))
    common = one.overlap(other)
    assert set(range(common.start, common.stop) if common else ()) == both
    assert common == other.overlap(one)


@given(st.lists(st.tuples(SPANS, SPANS), min_size=1, max_size=3))
def test_overlap_of_boxes_is_axis_by_axis(pairs: list[tuple[Span, Span]]) -> None:
    one, other = zip(*pairs, strict=True)
    common = overlap(one, other)
    parts = [a.overlap(b) for a, b in pairs]
    assert common == (None if None in parts else tuple(parts))
    assert volume(common or ()) <= min(volume(one), volume(other))


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 2), (-1, 4)])
def test_an_empty_or_negative_range_is_refused(start: int, stop: int) -> None:
    with pytest.raises(LayoutFormError, match="empty or negative"):
        Span(start, stop)


def test_a_box_without_axes_holds_one_element() -> None:
    assert volume(()) == 1
    assert overlap((), ()) == ()


def test_both_notations() -> None:
    assert eval(repr(Span(1, 2))) == Span(1, 2)  # noqa: S307
    assert str(Span(1, 2)) == "[1, 2)"
