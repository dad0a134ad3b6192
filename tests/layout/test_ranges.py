"""Ranges, boxes and classes of tokens against counting, and the examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restow.broker.errors import LayoutFormError
from restow.broker.layout import Span
from restow.broker.layout.span import overlap, volume
from restow.broker.layout.token_class import TokenClass, count_shared, cut_runs, shared_runs

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
    "restow.agents.probing.ucx_transport",
    "restow.agents.reading.ucx",
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


CLASSES = [
    TokenClass(parts, part, run)
    for parts in (1, 2, 3, 4, 6)
    for part in range(parts)
    for run in ((1, 2, 3, 4, 7) if parts > 1 else (1,))
]
TOKENS = np.arange(200)


def held(one: TokenClass) -> list[int]:
    return [t for t in TOKENS.tolist() if t // one.interleave_tokens % one.parts == one.part]


@pytest.mark.parametrize("one", CLASSES, ids=str)
def test_a_token_lies_behind_those_that_its_rank_holds_before_it(one: TokenClass) -> None:
    mine = held(one)
    before = [sum(other < token for other in mine) for token in TOKENS.tolist()]
    assert one.before(TOKENS).tolist() == before
    assert [one.before(token) for token in TOKENS.tolist()] == before
    assert one.first_tokens(np.arange(len(mine))).tolist() == mine


def test_places_are_those_of_vllms_block_tables() -> None:
    # In vLLM 0.32 `v1/worker/block_table.py` puts blocks of all ranks together first, then inside
    # one.
    block = 12
    for parts, run in itertools.product((2, 3, 4), (1, 2, 3, 4, 6, 12)):
        for token in TOKENS.tolist():
            index, offset = divmod(token, block * parts)
            part = offset // run % parts
            slot = offset // (parts * run) * run + offset % run
            one = TokenClass(parts, part, run)
            assert token in held(one)
            assert one.before(token) == index * block + slot


def test_what_two_classes_share() -> None:
    for one, other in itertools.product(CLASSES, CLASSES):
        period = math.lcm(one.period_tokens, other.period_tokens)
        tokens = np.arange(period)
        common = np.intersect1d(one.first_tokens(tokens), other.first_tokens(tokens))
        assert one.shared(other) * period == (common < period).sum(), (one, other)


def test_runs_of_shared_tokens() -> None:
    # Each token of a run is in both classes and follows the one before it in both; none is missing,
    # wherever the runs are cut out.
    for one, other in itertools.product(CLASSES[::2], CLASSES[1::3]):
        common = sorted(set(held(one)) & set(held(other)))
        for start, stop in ((0, 60), (5, 6), (7, 59), (13, 13), (60, 41)):
            begins, ends = shared_runs(one, other, start, stop)
            wanted = [token for token in common if start <= token < stop]
            runs = list(zip(begins.tolist(), ends.tolist(), strict=True))
            assert [token for run in runs for token in range(*run)] == wanted
            assert count_shared(one, other, start, stop) == len(wanted)


def test_runs_are_cut_where_they_say() -> None:
    begins, ends = cut_runs(np.array([4, 20]), np.array([9, 22]), np.array([2, 6]), 3)
    assert (begins.tolist(), ends.tolist()) == ([4, 5, 8, 20], [5, 8, 9, 22])


def test_as_much_is_made_as_is_shared() -> None:
    # A run of 2**31 tokens is not cut at all of its 2**31 turns, of which the other class has few.
    begins, ends = shared_runs(TokenClass(1024, 0, 2**31 - 1), TokenClass(1023, 5), 0, 2**31 - 1)
    assert begins.tolist() == list(range(5, 2**31 - 1, 1023))
    assert (ends - begins == 1).all()
