"""Shared memory that outlives those who attach it, and regions that stay inside of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forked.server import start
from restow.agents.errors import RegionInvalidError
from restow.agents.memory.regions import RegionMemory
from restow.agents.memory.shared_memory import FOLDER, SharedMemory, SharedRegion


def _write(name: str) -> None:
    with SharedMemory.attach(name) as shared:
        np.frombuffer(shared.buffer, np.uint8)[5] = 7


def test_another_process_writes_into_it_and_its_end_leaves_it_alone() -> None:
    with SharedMemory.create(4096) as shared:
        process = start(_write, shared.name)
        process.join()
        assert process.exitcode == 0
        assert shared.buffer[5] == 7
        SharedMemory.attach(shared.name).close()
        assert Path(FOLDER, shared.name).exists()
    assert not Path(FOLDER, shared.name).exists()


def test_views_outlive_close() -> None:
    shared = SharedMemory.create(4096)
    view = np.frombuffer(shared.buffer, np.uint8)
    shared.close()
    shared.close()
    assert view[0] == 0


def test_address_is_that_of_the_buffer_and_page_aligned() -> None:
    with SharedMemory.create(100) as shared:
        assert shared.address == np.frombuffer(shared.buffer, np.uint8).ctypes.data
        assert shared.address % 4096 == 0


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".", "no-such-object"])
def test_names_that_name_nothing_are_refused(name: str) -> None:
    with pytest.raises(RegionInvalidError):
        SharedMemory.attach(name)


def test_a_name_is_given_once() -> None:
    with (
        SharedMemory.create(1) as shared,
        pytest.raises(RegionInvalidError, match="can't be created"),
    ):
        SharedMemory.create(1, shared.name)


def test_a_region_must_lie_inside_the_object() -> None:
    with SharedMemory.create(1000) as shared:
        inside = SharedRegion("r", shared.name, 100, 9, 100)
        assert inside.memory(shared) == RegionMemory("r", shared.address + 100, 9, 100)
        with pytest.raises(RegionInvalidError, match=r"bytes \[101, 1001\) lie outside"):
            SharedRegion("r", shared.name, 101, 9, 100).memory(shared)
        with pytest.raises(RegionInvalidError, match="outside"):
            SharedRegion("r", shared.name, -1, 1, 1).memory(shared)


@pytest.mark.parametrize("field", ["base_address", "page_count", "page_stride_bytes"])
def test_a_region_without_size_or_place_is_refused(field: str) -> None:
    good = RegionMemory("r", 1, 1, 1)
    with pytest.raises(RegionInvalidError, match=field):
        replace(good, **{field: 0})  # type: ignore[arg-type]
