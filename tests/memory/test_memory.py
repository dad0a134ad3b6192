"""Shared memory that outlives those who attach it, and regions that stay inside of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from forked.server import pipe, start
from restow.agents.memory import shared_memory as held_names
from restow.agents.memory.errors import RegionInvalidError
from restow.agents.memory.regions import RegionMemory
from restow.agents.memory.shared_memory import FOLDER, SharedMemory, SharedRegion, remove_left
from store.real_disk import mounted_or_skipped


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


# -- what is left of those that were killed -------------------------------------------------------


def _map(folder: str, name: str, size_bytes: int, said: Connection) -> None:
    """Make a shared memory object, or map it by its name, say the name and wait to be killed."""
    held_names.FOLDER = folder
    mapped = SharedMemory.attach(name) if name else SharedMemory.create(size_bytes)
    said.send(mapped.name)
    signal.pause()


class Mapping:
    """A process that has an object mapped."""

    def __init__(self, folder: Path, name: str = "", size_bytes: int = 4096) -> None:
        ours, theirs = pipe()
        self._process = start(_map, str(folder), name, size_bytes, theirs)
        assert ours.poll(60)
        self.path = folder / ours.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(held_names, "FOLDER", str(tmp_path))
    return tmp_path


def test_what_nobody_has_mapped_is_removed_and_nothing_else(folder: Path) -> None:
    killed, living = Mapping(folder), Mapping(folder)
    (folder / "restow-mem-link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "restow-mem-fifo")
    for name in ("mine", "restow-0123456789abcdef"):
        (folder / name).write_bytes(b"an older release's, or somebody's own")
    kept = set(folder.iterdir()) - {killed.path}
    with SharedMemory.create(4096, "of a given name"):
        kept.add(folder / "of a given name")
        assert remove_left() == []
        killed.kill()
        assert remove_left() == [killed.path.name]
        assert set(folder.iterdir()) == kept
    living.kill()


def test_an_object_stays_as_long_as_anybody_has_it_mapped(folder: Path) -> None:
    owner = Mapping(folder)
    other = Mapping(folder, owner.path.name)
    owner.kill()
    assert remove_left() == []
    SharedMemory.attach(owner.path.name).close()
    other.kill()
    assert remove_left() == [owner.path.name]


def test_a_view_holds_the_memory_like_the_object_itself(folder: Path) -> None:
    owner = Mapping(folder)
    with SharedMemory.attach(owner.path.name) as shared:
        view = np.frombuffer(shared.buffer, np.uint8)
    owner.kill()
    assert remove_left() == []
    del view, shared
    assert remove_left() == [owner.path.name]


@pytest.fixture
def small_folder(folder: Path) -> Iterator[Path]:
    """Mount a file system of 8 MiB in memory."""
    with mounted_or_skipped(folder, 8 << 20):
        yield folder


def test_a_crash_loop_does_not_run_out_of_memory(small_folder: Path) -> None:
    for _ in range(8):
        Mapping(small_folder, size_bytes=3 << 20).kill()
    living = [Mapping(small_folder, size_bytes=3 << 20) for _ in range(2)]
    with pytest.raises(RegionInvalidError, match="No space left"):
        SharedMemory.create(3 << 20)
    for one in living:
        assert one.path.exists()
        one.kill()
