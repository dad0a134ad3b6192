"""CLEAR: masked slots are zeroed, everything else keeps its bytes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_arena import Arena, both

from restow.kernels import SlotColumn, SlotTable, SlotTableError, clear, clear_slots, reference

ClearSlots = Callable[..., None]
PAGES, STRIDE = 6, 20_000


def triton_clear(
    regions: SlotTable,
    slots: torch.Tensor,
    mask: torch.Tensor,
    *,
    of_zero: bool = False,
    first_page: int = 0,
) -> None:
    clear.clear_slots(regions, slots, mask, of_zero, first_page)


on_both = both(clear_slots, triton_clear)


def check(
    run: ClearSlots, ranges: list[tuple[int, int]], slots: torch.Tensor, mask: torch.Tensor
) -> None:
    """Clear ranges (offset, length) of two regions of poisoned pages; compare all bytes."""
    regions = [Arena(PAGES * STRIDE) for _ in range(2)]
    rows = [(region.address, STRIDE, *item, 0) for region in regions for item in ranges]
    run(SlotTable.checked(np.array(rows, np.int64).reshape(-1, 5)), slots, mask)
    want = [Arena(PAGES * STRIDE) for _ in regions]
    rows = [(region.address, STRIDE, *item, 0) for region in want for item in ranges]
    table = SlotTable.checked(np.array(rows, np.int64).reshape(-1, 5))
    reference.clear_slots(table, slots, mask, of_zero=False, first_page=0)
    for region, wanted in zip(regions, want, strict=True):
        assert np.array_equal(region.memory, wanted.memory)


@on_both
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("flags", [torch.bool, torch.uint8], ids=str)
def test_masked_slots_alone_are_cleared(
    run: ClearSlots, ids: torch.dtype, flags: torch.dtype
) -> None:
    slots = torch.tensor([4, 1, -1, 0, 2, -1], dtype=ids)  # -1 and mask 0: a graph's padding
    mask = torch.tensor([1, 0, 0, 1, 1, 0], dtype=flags)
    check(run, [(0, 36), (48, 0), (64, 17_000), (STRIDE - 8, 8)], slots, mask)


@on_both
@pytest.mark.parametrize("numbers", [torch.int32, torch.int64, torch.bool], ids=str)
def test_groups_have_pages_of_their_own(run: ClearSlots, numbers: torch.dtype) -> None:
    # A page is cleared where the number is zero; pages below the first are padding.
    regions = [Arena(PAGES * STRIDE) for _ in range(3)]
    groups = [1, 0, 1]
    rows = [
        (one.address, STRIDE, 24, 8000, group) for one, group in zip(regions, groups, strict=True)
    ]
    slots = torch.tensor([[1, 2, 0, 4, -1], [3, 5, 1, 2, 0]], dtype=torch.int32)
    context = torch.tensor([0, 7, 0, 1, 0]).to(numbers)
    run(SlotTable.checked(np.array(rows, np.int64)), slots, context, of_zero=True, first_page=1)
    for one, group in zip(regions, groups, strict=True):
        want = Arena(PAGES * STRIDE)
        for page in ([1], [3, 1])[group]:
            want.bytes[page * STRIDE + 24 :][:8000] = 0
        assert np.array_equal(one.memory, want.memory)


@on_both
def test_a_group_without_pages_is_refused(run: ClearSlots) -> None:
    table = SlotTable.checked(np.array([(800, 64, 8, 16, 2)], np.int64))
    for slots in (torch.tensor([1]), torch.tensor([[1], [2]])):
        with pytest.raises(SlotTableError, match="3 groups"):
            run(table, slots, torch.tensor([True]))


@on_both
@pytest.mark.parametrize("length", [1, 63, 1000, 2048, 2049])
def test_odd_ranges(run: ClearSlots, length: int) -> None:
    check(run, [(3, length)], torch.tensor([2, 5]), torch.tensor([True, True]))


@on_both
def test_nothing_to_clear(run: ClearSlots) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    check(run, [], torch.tensor([2]), torch.tensor([True]))
    check(run, [(0, 0)], torch.tensor([2]), torch.tensor([True]))
    check(run, [(0, 8)], none, none.bool())
    check(run, [(0, 8)], torch.tensor([2, 3]), torch.tensor([False, False]))


@given(
    st.permutations(range(PAGES)),
    st.lists(st.booleans(), min_size=PAGES, max_size=PAGES),
    st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 9000)), max_size=5),
)
@settings(max_examples=100)
def test_twin_clears_what_is_listed(
    slots: list[int], mask: list[bool], ranges: list[tuple[int, int]]
) -> None:
    check(clear_slots, ranges, torch.tensor(slots), torch.tensor(mask))


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        (SlotColumn.BASE_ADDRESS, 0, "BASE_ADDRESS is 0"),
        (SlotColumn.LENGTH_BYTES, -1, "LENGTH_BYTES is -1"),
        (SlotColumn.OFFSET_BYTES, -8, "OFFSET_BYTES is -8"),
        (SlotColumn.GROUP, -1, "GROUP is -1"),
        (SlotColumn.LENGTH_BYTES, 99, "ends at byte 107, after its page ends"),
    ],
)
def test_a_broken_range_is_named(column: SlotColumn, value: int, reason: str) -> None:
    rows = np.array([(800, 64, 8, 16, 0)] * 3, dtype=np.int64)
    rows[2, column] = value
    with pytest.raises(SlotTableError, match=f"row 2: .*{reason}"):
        SlotTable.checked(rows)


def test_another_shape_is_refused() -> None:
    with pytest.raises(SlotTableError, match=r"want int64 \[n, 5\]"):
        SlotTable.checked(np.zeros((3, 3), dtype=np.int64))
