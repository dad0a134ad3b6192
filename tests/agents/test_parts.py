"""Law: a run's parts are complete in order, and every copy is done in exactly one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from restow.agents.copying import prepared_copies
from restow.agents.parts import MAX_PARTS, PART_BYTES, Parts
from restow.agents.pieces import Copies, Grid
from restow.broker.layout import DType
from restow.broker.layout.rows import Int64s
from restow.broker.planner.table import ITEM_BYTES

CPU = torch.device("cpu")
RUN = 1 << 20
FAR = 1 << 30
ITEM = int(ITEM_BYTES[DType.BFLOAT16])
One = tuple[int, ...]


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Copies at some places of a run, in any order, of one shape or of several."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    flat = rows == 1 and draw(st.booleans())

    def column(values: st.SearchStrategy[int]) -> Int64s:
        high = rows if draw(st.booleans()) else 1
        wide = width if draw(st.booleans()) else 1
        listed = draw(st.lists(values, min_size=high * wide, max_size=high * wide))
        table = np.array(listed, np.int64).reshape(high, wide)
        return table[0] if flat else table

    places = st.lists(
        st.integers(0, 2000).map(lambda at: at * ITEM), min_size=rows * width, max_size=rows * width
    )
    inside, outside = (np.array(draw(places), np.int64).reshape(rows, width) for _ in range(2))
    if draw(st.booleans()):
        inside = np.sort(inside.ravel()).reshape(rows, width)
    inside, outside = inside + RUN + (200 * ITEM), outside + FAR
    if flat:
        inside, outside = inside[0], outside[0]
    step = column(st.sampled_from([ITEM, 3 * ITEM, -ITEM]))
    count = column(st.integers(1, 60))
    kind = np.full_like(step, int(DType.BFLOAT16))
    return Grid(inside, outside, count, step, step, kind, kind)


def turned(grid: Grid) -> Grid:
    """The same copies the other way round."""
    return Grid(
        grid.dst_address,
        grid.src_address,
        grid.count,
        grid.dst_step_bytes,
        grid.src_step_bytes,
        grid.dst_dtype,
        grid.src_dtype,
    )


def listed(copies: Copies) -> list[One]:
    """Every copy as numbers."""
    found: list[One] = []
    for grid in copies.grids:
        columns = (
            grid.src_address,
            grid.dst_address,
            grid.count,
            grid.src_step_bytes,
            grid.dst_step_bytes,
            grid.src_dtype,
            grid.dst_dtype,
        )
        shape = grid.src_address.shape
        flat = [np.broadcast_to(one, shape).ravel().tolist() for one in columns]
        found += zip(*flat, strict=True)
    return found


def touched(address: int, count: int, step: int) -> tuple[int, int]:
    """The bytes ``[begin, end)`` of one copy at one end."""
    last = address + (count - 1) * step
    return min(address, last), max(address, last) + ITEM


@given(st.lists(grids(), min_size=1, max_size=3), st.integers(1, 900))
def test_a_part_is_complete_after_its_turn(found: Sequence[Grid], part_bytes: int) -> None:
    parts = Parts(RUN, 5000, part_bytes)
    copies = Copies(tuple(turned(grid) for grid in found))
    by_part = parts.gathered([copies])
    assert len(by_part) == parts.count
    assert Counter(chain.from_iterable(map(listed, by_part))) == Counter(listed(copies))
    for number, of_part in enumerate(by_part[1:], 1):
        begin, _ = parts.span(number, number + 1)
        for _, dst, count, _, step, _, _ in listed(of_part):
            assert touched(dst, count, step)[0] >= RUN + begin, "it belongs to an earlier part"


@given(st.lists(grids(), min_size=1, max_size=3), st.integers(1, 900))
def test_a_part_needs_nothing_behind_it(found: Sequence[Grid], part_bytes: int) -> None:
    parts = Parts(RUN, 5000, part_bytes)
    copies = Copies(tuple(found))
    by_part = parts.scattered([copies])
    assert len(by_part) == parts.count
    assert Counter(chain.from_iterable(map(listed, by_part))) == Counter(listed(copies))
    for number, of_part in enumerate(by_part[:-1]):
        _, end = parts.span(number, number + 1)
        for src, _, count, step, _, _, _ in listed(of_part):
            assert touched(src, count, step)[1] <= RUN + end, "it needs a later part"


def pages(rows: int, size_bytes: int, base: int, others: int, in_order: bool) -> Grid:
    """Pages from a run to places that lie apart."""
    rng = np.random.default_rng(rows)
    order = np.arange(rows) if in_order else rng.permutation(rows)
    away = rng.permutation(2 * rows)[:rows]
    one = np.ones((1, 1), np.int64)
    kind = one * int(DType.BFLOAT16)
    return Grid(
        (base + size_bytes * order)[None],
        (others + size_bytes * away)[None],
        one * (size_bytes // ITEM),
        one * ITEM,
        one * ITEM,
        kind,
        kind,
    )


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    ("rows", "size_bytes", "part_bytes"),
    [(700, 256, 4096), (700, 1024, 10_000), (40, 512, 3000), (700, 16, 999), (3, 2048, 1000)],
)
def test_what_is_done_part_by_part_is_the_whole(
    rows: int, size_bytes: int, part_bytes: int, in_order: bool
) -> None:
    length = rows * size_bytes
    run = torch.randint(0, 256, (length,), dtype=torch.uint8)
    paged, wanted = (torch.full((2 * length + 64,), 0xA5, dtype=torch.uint8) for _ in range(2))
    parts = Parts(run.data_ptr(), length, part_bytes)
    out_of = pages(rows, size_bytes, run.data_ptr(), paged.data_ptr(), in_order)
    reference = pages(rows, size_bytes, run.data_ptr(), wanted.data_ptr(), in_order)
    prepared_copies(Copies((reference,)), CPU)()

    prepared = parts.prepared_scatter([Copies((out_of,))], CPU)
    assert len(prepared) == parts.count
    whole = run.clone()
    for number, part in enumerate(prepared):
        _, end = parts.span(number, number + 1)
        run[:end], run[end:] = whole[:end], 0x5A
        part()
    assert torch.equal(paged, wanted)

    run.fill_(0x5A)
    for number, part in enumerate(parts.prepared_gather([Copies((turned(out_of),))], CPU)):
        part()
        _, end = parts.span(number, number + 1)
        assert torch.equal(run[:end], whole[:end]), "a part was counted before it was complete"
    assert torch.equal(run, whole)


@pytest.mark.parametrize("length", [1, PART_BYTES, PART_BYTES + 1, 300 * PART_BYTES, (1 << 40) + 5])
def test_a_byte_counts_them_and_they_tile_the_run(length: int) -> None:
    parts = Parts.of(64, length)
    assert 1 <= parts.count <= MAX_PARTS
    spans = [parts.span(one, one + 1) for one in range(parts.count)]
    assert (spans[0][0], spans[-1][1]) == (0, length)
    assert all(one[1] == other[0] for one, other in pairwise(spans))
    assert all(end - begin >= min(length, PART_BYTES) for begin, end in spans[:-1])
