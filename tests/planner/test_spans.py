"""Spans cover their rows, apart from each other, and span no gap that is too long."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from restow.broker.layout import DType
from restow.broker.planner.program import Column, GroupPair, PageForm
from restow.broker.planner.ways import SPAN_ALIGN_BYTES, Spans

PAIRS = (
    GroupPair(PageForm("state", 0, 1), PageForm("state", 0, 1)),
    GroupPair(PageForm("kv", 4, 1), PageForm("kv", 8, 1)),
)


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    rows = np.zeros((draw(st.integers(0, 12)), len(Column)), np.int64)
    for row in rows:
        row[Column.SRC_RANK] = draw(st.integers(0, 2))
        row[Column.GROUP_PAIR] = draw(st.integers(0, 1))
        row[Column.SRC_REGION] = draw(st.integers(0, 1))
        row[Column.SRC_OFFSET_BYTES] = 4 * draw(st.integers(0, 100))
        row[Column.COUNT] = draw(st.integers(1, 9))
        row[Column.SRC_STEP_BYTES] = draw(st.sampled_from([4, 8]))
        row[Column.SRC_TOKEN_STRIDE_BYTES] = 4 * draw(st.integers(1, 5))
        row[[Column.SRC_DTYPE, Column.DST_DTYPE]] = DType.FLOAT32
    return rows


@settings(max_examples=300, derandomize=True)
@given(tables(), st.none() | st.integers(0, 200))
def test_spans(
    rows: np.ndarray[tuple[int, int], np.dtype[np.int64]], max_gap_bytes: int | None
) -> None:
    spans = Spans.of(rows, PAIRS, max_gap_bytes)
    needed: dict[int, set[int]] = {number: set() for number in range(len(spans.table))}
    runs: dict[int, list[tuple[int, int]]] = {number: [] for number in needed}
    for row, number in zip(rows, spans.span_of, strict=True):
        span = spans.table[number]
        for column in (Column.SRC_RANK, Column.GROUP_PAIR, Column.SRC_REGION):
            assert span[column] == row[column]
        tokens = max(PAIRS[row[Column.GROUP_PAIR]].src.page_tokens, 1)
        last = row[Column.SRC_OFFSET_BYTES] + (tokens - 1) * row[Column.SRC_TOKEN_STRIDE_BYTES]
        last += (row[Column.COUNT] - 1) * row[Column.SRC_STEP_BYTES] + 4
        needed[int(number)] |= {int(row[Column.SRC_OFFSET_BYTES]), int(last)}
        begin = int(row[Column.SRC_OFFSET_BYTES]) // SPAN_ALIGN_BYTES * SPAN_ALIGN_BYTES
        runs[int(number)].append((begin, int(last)))
    pages: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for number, span in enumerate(spans.table):
        begin = int(span[Column.SRC_OFFSET_BYTES])
        end = begin + int(span[Column.COUNT])
        assert begin % SPAN_ALIGN_BYTES == 0
        assert begin == min(needed[number]) // SPAN_ALIGN_BYTES * SPAN_ALIGN_BYTES
        assert end == max(needed[number])
        pages.setdefault(tuple(span[:3]), []).append((begin, end))
    for inside in runs.values():
        reached = min(begin for begin, _ in inside)
        for begin, last in sorted(inside):
            # Wherever the gap is too long the span should have ended, whatever lies in other pages.
            assert max_gap_bytes is None or begin - reached <= max_gap_bytes
            reached = max(reached, last)
    for found in pages.values():
        assert max_gap_bytes is not None or len(found) == 1
        for (_, end), (begin, _) in pairwise(found):
            assert begin - end > (max_gap_bytes or 0)
    extracted = spans.extracted(rows)
    assert len(extracted) == len(rows)
    assert (np.diff(extracted[:, Column.SRC_REGION]) >= 0).all()
    assert (extracted[:, Column.SRC_OFFSET_BYTES] >= 0).all()
