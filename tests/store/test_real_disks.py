"""A store on disks that are full, read-only or pulled out: real ones, where tests may mount any."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from restow.agents.store.run_files import DiskUnusableError, RunLostError
from restow.agents.store.store import Store
from store.engine_house import MANY, MIB, PROMPTS, House, Tokens, kept
from store.holding_engine import state, until
from store.real_disk import Disk, mounted_or_skipped
from store.test_shelf import FORM, held, opened, pages, read


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with mounted_or_skipped(tmp_path / "disk", 4 * MIB) as made:
        yield made


def settled(house: House, store: Store, prompts: Sequence[Tokens]) -> list[bool]:
    """Return which prompts the store holds, once the broker agrees and nothing changes."""
    held: list[bool] = []

    def stays() -> bool:
        time.sleep(0.1)
        before = held.copy()
        held[:] = [store.holds(state(tokens)) for tokens in prompts]
        told = [house.d.is_held(state(tokens), "a store") for tokens in prompts]
        return before == held == told

    until(stays)
    return held


def test_what_was_used_longest_ago_makes_room_on_a_full_disk(disk: Disk) -> None:
    with opened(disk.folder) as one:
        for number in range(4):
            one.write(FORM, pages(number))
        disk.fill()
        for number in range(4, 60):  # the journal grows meanwhile
            one.write(FORM, pages(number))
            assert held(one, pages(number))
            sizes = [path.stat().st_size for path in disk.folder.glob("*.run")]
            assert sum(sizes) == one.used_bytes
        assert one.lost == 0
    disk.fill()
    with opened(disk.folder) as one:  # the journal begins anew all the same
        read(one, pages(59))
        disk.empty()
        one.write(FORM, pages(60))
        read(one, [*pages(59), *pages(60)])


def test_a_state_that_a_full_disk_has_no_room_for_is_lost_alone(disk: Disk) -> None:
    with opened(disk.folder) as one:
        disk.fill()
        with pytest.raises(RunLostError, match="No space left"):
            one.write(FORM, pages(1))
        disk.empty()
        one.write(FORM, pages(1))
    with opened(disk.folder) as one:
        read(one, pages(1))


def test_a_disk_that_can_not_be_written_when_a_store_starts_is_refused(disk: Disk) -> None:
    disk.fill()
    with pytest.raises(DiskUnusableError, match="can't keep states: No space left"):
        opened(disk.folder)
    disk.empty()
    disk.make_read_only()
    with pytest.raises(DiskUnusableError, match="can't keep states: Read-only file system"):
        opened(disk.folder)


def test_a_disk_that_fills_up_and_is_pulled_out_costs_no_request(house: House, disk: Disk) -> None:
    def ends(prompts: list[tuple[int, ...]]) -> list[str]:
        return [house.d.take(tokens, state(tokens)) for tokens in prompts]

    first, second = MANY[:8], MANY[8:16]
    with house.store("a store", MIB // 2, disk.folder) as store:  # not for all that is on the disk
        kept(house, "a store", first)
        until(lambda: store.figures.disk_runs == len(first))
        disk.fill()
        kept(house, "a store", second)
        until(lambda: store.holds(state(second[-1])))
        assert store.figures.evictions > 0
        for some in (first, second):
            there = settled(house, store, some)
            assert ends(some) == ["" if one else "NOT_HELD" for one in there]
        lost, declined = store.figures.disk_lost, store.figures.declined
        disk.pull_out()
        assert {*ends(MANY)} == {"", "NOT_HELD"}
        assert store.figures.disk_lost - lost == store.figures.declined - declined > 0
        kept(house, "a store", PROMPTS)
        there = settled(house, store, PROMPTS)
        assert any(there)
        assert ends(PROMPTS) == ["" if one else "NOT_HELD" for one in there]
