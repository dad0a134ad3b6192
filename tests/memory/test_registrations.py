"""What is registered with NIXL, of regions that overlay each other or touch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from restow.agents.memory.regions import HOST, MemoryKind, MemoryPlace, RegionMemory, registrations

SPANS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 12), st.sampled_from([0, 1]), st.booleans()),
    max_size=8,
)


@given(SPANS)
def test_every_byte_that_peers_may_read_is_registered_once(
    spans: list[tuple[int, int, int, bool]],
) -> None:
    regions = [
        RegionMemory(f"r{i}", begin, size, 1, MemoryKind.CUDA, device, private)
        for i, (begin, size, device, private) in enumerate(spans)
    ]
    wanted = {
        (region.place, region.base_address + at)
        for region in regions
        if not region.private
        for at in range(region.length_bytes)
    }
    found = [
        (place, begin + at) for begin, size, place in registrations(regions) for at in range(size)
    ]
    assert sorted(found, key=repr) == sorted(set(found), key=repr)
    assert set(found) == wanted


def test_neighbours_stay_apart() -> None:
    regions = [RegionMemory("a", 100, 10, 1), RegionMemory("b", 110, 10, 1)]
    assert registrations(regions) == [(100, 10, HOST), (110, 10, HOST)]


def test_one_inside_another_is_a_part_of_it() -> None:
    regions = [
        RegionMemory("a", 100, 40, 1, MemoryKind.CUDA, 1),
        RegionMemory("b", 105, 5, 1, MemoryKind.CUDA, 1),
        RegionMemory("c", 130, 20, 1, MemoryKind.CUDA, 1),
    ]
    assert registrations(regions) == [(100, 50, MemoryPlace(MemoryKind.CUDA, 1))]
