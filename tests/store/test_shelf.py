"""A disk under a store: what was written whole is found again, and nothing else ever is."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forked.server import pipe, start
from restow.agents.store import run_files, shelf
from restow.agents.store.room import PieceKey, page_strides
from restow.agents.store.run_files import (
    DiskInUseError,
    DiskOtherError,
    DiskUnusableError,
    RunLostError,
)
from restow.agents.store.shelf import Page, Shelf
from restow.broker.client import HashForm
from restow.broker.families import (
    AttentionSpec,
    EngineSettings,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Layout
from restow.broker.layout import digest as layout_digest
from restow.broker.layout.store_layout import store_layout

STRIDES = page_strides({"tokens": 5000, "snapshots": 20_000})
LIMIT_BYTES = 1 << 20
BF16 = DType.BFLOAT16
FORM = HashForm("any", 4, 8)
STATE_BYTES = 3 * STRIDES["tokens"] + STRIDES["snapshots"]
"""Of what `pages` returns."""


def layout(revision: str = "v1", kv_heads: int = 4) -> Layout:
    layers = (Mamba2Spec(0, 8, 4, 16, 4, 4, BF16, BF16), AttentionSpec(1, kv_heads, 8, BF16))
    spec = ModelSpec("hybrid", layers, revision=revision)
    return store_layout(build_layout(spec, EngineSettings()))


def opened(folder: Path, limit_bytes: int = LIMIT_BYTES) -> Shelf:
    return Shelf(folder, layout(), STRIDES, limit_bytes)


def pages(number: int, blocks: int = 3, salt: str = "") -> list[Page]:
    """Return the pieces of a state, at addresses at which a disk reads directly."""
    keys = [PieceKey("tokens", salt, b"%d block %d" % (number, one)) for one in range(blocks)]
    return [(key, filled(key)) for key in [*keys, PieceKey("snapshots", salt, b"%d" % number)]]


def filled(key: PieceKey) -> memoryview:
    view = empty(key)
    seed = int.from_bytes((key.salt.encode() + key.hash).ljust(8)[:8])
    view[:] = np.random.default_rng(seed).bytes(len(view))
    return view


def empty(key: PieceKey) -> memoryview:
    memory = np.zeros(STRIDES[key.group] + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory.data[start : start + STRIDES[key.group]]


def read(one: Shelf, written: list[Page]) -> None:
    """Read all pieces, and compare them with what was written."""
    back = [(key, empty(key)) for key, _ in written]
    one.read(back)
    assert all(there == here for (_, there), (_, here) in zip(written, back, strict=True))


def held(one: Shelf, written: list[Page]) -> bool:
    return one.has([key for key, _ in written])


def test_what_is_written_is_read_in_another_life(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        for number in range(5):
            first.write(FORM, pages(number))
            read(first, pages(number))
        used = first.used_bytes
    with opened(tmp_path) as second:
        assert (len(second), second.used_bytes) == (5, used)
        for number in range(5):
            read(second, pages(number)[::-1])
            read(second, pages(number)[1:3])


def test_a_piece_is_written_once(tmp_path: Path) -> None:
    with opened(tmp_path) as one:
        one.write(FORM, pages(1))
        used = one.used_bytes
        one.write(FORM, [*pages(1), *pages(2, 1)])
        assert one.used_bytes == used + STRIDES["tokens"] + STRIDES["snapshots"]
        one.write(FORM, pages(1))
        read(one, [*pages(1), *pages(2, 1)])


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    with opened(tmp_path) as one:
        limit = 3 * STATE_BYTES
    with opened(tmp_path, limit) as one:
        for number in range(3):
            one.write(FORM, pages(number))
        read(one, pages(0))
        one.write(FORM, pages(3))
        assert [held(one, pages(number)) for number in range(4)] == [True, False, True, True]
        assert one.used_bytes == limit
    with opened(tmp_path, limit) as one:
        assert [held(one, pages(number)) for number in range(4)] == [True, False, True, True]


def test_the_journal_does_not_grow_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf, "SPARE_RECORDS", 4)
    limit = 3 * STATE_BYTES
    with opened(tmp_path, limit) as one:
        sizes = []
        for number in range(60):
            one.write(FORM, pages(number))
            sizes.append((tmp_path / run_files.NAME).stat().st_size)
    assert max(sizes) < 3 * sizes[2]
    with opened(tmp_path, limit) as one:
        read(one, [*pages(57), *pages(58), *pages(59)])


def test_more_than_all_is_not_written(tmp_path: Path) -> None:
    with (
        opened(tmp_path, 4096) as one,
        pytest.raises(RunLostError, match="exceeds the disk's limit"),
    ):
        one.write(FORM, pages(1))


def flip(path: Path, where: int) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


@pytest.mark.parametrize(
    ("harm", "is_seen_at_start"),
    [
        (partial(flip, where=0), False),
        (partial(flip, where=5000), False),
        (partial(flip, where=-1), False),
        (cut, True),
        (Path.unlink, True),
    ],
)
def test_a_run_that_is_harmed_is_lost_alone(
    tmp_path: Path, harm: Callable[[Path], None], is_seen_at_start: bool
) -> None:
    with opened(tmp_path) as one:
        for number in (1, 2, 3):
            one.write(FORM, pages(number))
        harm(tmp_path / f"{1:012d}.run")
        with pytest.raises(RunLostError):
            read(one, pages(1))
        assert not held(one, pages(1))
        assert one.lost == 1
        one.write(FORM, pages(1))  # it may come again
        read(one, [*pages(1), *pages(2)])
        harm(tmp_path / f"{2:012d}.run")
    with opened(tmp_path) as one:
        assert held(one, pages(2)) != is_seen_at_start
        with pytest.raises(RunLostError):
            read(one, pages(2))
        assert not held(one, pages(2))
        read(one, [*pages(1), *pages(3)])


def test_a_truncated_journal_has_what_stood_before(tmp_path: Path) -> None:
    with opened(tmp_path) as one:
        sizes = []
        for number in range(3):
            one.write(FORM, pages(number))
            sizes.append((tmp_path / run_files.NAME).stat().st_size)
    whole = (tmp_path / run_files.NAME).read_bytes()
    for size in range(sizes[0], sizes[2] + 1, 7):
        (tmp_path / run_files.NAME).write_bytes(whole[:size])
        found, _ = run_files.read_journal(tmp_path, {"layout": digest(), "strides": STRIDES})
        assert len([one for one in found if "run" in one]) == sum(size >= one for one in sizes)
    (tmp_path / run_files.NAME).write_bytes(whole[: sizes[1] + 20])
    with opened(tmp_path) as one:
        assert len(one) == 2
        assert len(list(tmp_path.glob("*.run"))) == 2, "the file of the third one stays"
        one.write(FORM, pages(2))
        read(one, [*pages(0), *pages(1), *pages(2)])


def digest() -> str:
    return layout_digest(layout(""))


def test_a_journal_with_a_flipped_bit_has_what_stood_before(tmp_path: Path) -> None:
    with opened(tmp_path) as one:
        one.write(FORM, pages(1))
        size = (tmp_path / run_files.NAME).stat().st_size
        one.write(FORM, pages(2))
        one.write(FORM, pages(3))
    flip(tmp_path / run_files.NAME, size + 30)
    with opened(tmp_path) as one:
        assert [held(one, pages(number)) for number in (1, 2, 3)] == [True, False, False]


@pytest.mark.parametrize(
    "data", [b"", b"a text of somebody's\n", b"\n\n", bytes(range(256)) * 40], ids=len
)
def test_another_programs_folder_is_left_alone(tmp_path: Path, data: bytes) -> None:
    (tmp_path / run_files.NAME).write_bytes(data)
    (tmp_path / f"{7:012d}.run").write_bytes(b"precious")
    with pytest.raises(DiskOtherError, match="does not begin as a store's journal"):
        opened(tmp_path)
    assert (tmp_path / f"{7:012d}.run").read_bytes() == b"precious"


def test_another_models_or_versions_states_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as one:
        one.write(FORM, pages(1))
    with pytest.raises(DiskOtherError, match="differs in layout"):
        Shelf(tmp_path, layout(kv_heads=8), STRIDES, LIMIT_BYTES)
    with Shelf(tmp_path, layout("v2"), STRIDES, LIMIT_BYTES) as one:
        read(one, pages(1))  # each state says its own revision
    with monkeypatch.context() as patch:
        patch.setattr(run_files, "FORMAT", "restow store 4")
        with pytest.raises(DiskOtherError, match=r"format \('restow store 3' in place of"):
            opened(tmp_path)
    with opened(tmp_path) as one:
        read(one, pages(1))


def test_two_stores_do_not_share_a_folder(tmp_path: Path) -> None:
    with opened(tmp_path) as one:
        with pytest.raises(DiskInUseError, match="another store uses"):
            opened(tmp_path)
        one.write(FORM, pages(1))
        read(one, pages(1))


@contextmanager
def files_up_to(size_bytes: int) -> Iterator[None]:
    """Limit the size of the files that this process writes: EFBIG then comes, as ENOSPC would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_disk_that_takes_no_more_loses_that_state_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as one:
        one.write(FORM, pages(1))
        for size in (0, 4096, 40_960):
            with files_up_to(size), pytest.raises(RunLostError, match="File too large"):
                one.write(FORM, pages(2))
            assert not held(one, pages(2))
            assert len(list(tmp_path.glob("*.run"))) == 1
        one.write(FORM, pages(2))
    with opened(tmp_path) as one:
        read(one, [*pages(1), *pages(2)])


@contextmanager
def failing(call: str, code: int, first: int = 0) -> Iterator[None]:
    """Have a call of the system fail, from the ``first`` one on."""
    right, calls = getattr(os, call), itertools.count()

    def fails(*given: Any) -> Any:
        if next(calls) >= first:
            raise OSError(code, os.strerror(code))
        return right(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, fails)
        yield


WRITES = [("pwritev", 0), ("fdatasync", 0), ("fdatasync", 1), ("pwrite", 0)]
"""Calls of a write: of the run, its sync, that of the journal, and the journal."""


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO])
@pytest.mark.parametrize(("call", "first"), WRITES)
def test_any_error_of_a_write_loses_that_state_alone(
    tmp_path: Path, call: str, first: int, code: int
) -> None:
    with opened(tmp_path) as one:
        one.write(FORM, pages(1))
        said = (tmp_path / run_files.NAME).read_bytes()
        with failing(call, code, first), pytest.raises(RunLostError, match=os.strerror(code)):
            one.write(FORM, pages(2))
        assert (tmp_path / run_files.NAME).read_bytes() == said
        assert len(list(tmp_path.glob("*.run"))) == 1
        one.write(FORM, pages(3))
        assert one.lost == 1
    with opened(tmp_path) as one:
        assert [held(one, pages(number)) for number in (1, 2, 3)] == [True, False, True]
        read(one, [*pages(1), *pages(3)])


@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "pwrite"])
def test_a_disk_that_stays_full_loses_a_few_and_not_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(shelf, "GO_AT_ONCE", 2)
    with opened(tmp_path) as one:
        for number in range(5):
            one.write(FORM, pages(number))
        with failing(call, errno.ENOSPC), pytest.raises(RunLostError, match="No space left"):
            one.write(FORM, pages(5))
        one.write(FORM, pages(6))
    with opened(tmp_path) as one:
        found = [held(one, pages(number)) for number in range(7)]
        assert found == [False, False, True, True, True, False, True]
        assert len(list(tmp_path.glob("*.run"))) == 4
        read(one, [*pages(2), *pages(6)])


def test_a_folder_that_is_gone_loses_what_it_had(tmp_path: Path) -> None:
    with opened(tmp_path / "there") as one:
        one.write(FORM, pages(1))
        (tmp_path / "there").rename(tmp_path / "elsewhere")
        with pytest.raises(RunLostError, match="No such file"):
            one.write(FORM, pages(2))
        with pytest.raises(RunLostError, match="No such file"):
            read(one, pages(1))
        assert not held(one, pages(1))


def test_a_folder_that_can_not_be_had_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskUnusableError, match="can't keep states: "):
        opened(tmp_path / "file")


def test_it_says_what_is_there_and_what_is_gone(tmp_path: Path) -> None:
    """Check a shelf's keys, salts and the form of its hashes, those of an earlier life too."""
    limit = 2 * STATE_BYTES
    some = [pages(0), pages(1, salt="one's"), pages(1, salt="another's")]
    with opened(tmp_path, limit) as one:
        gone: list[PieceKey] = []
        one.on_gone = gone.extend
        assert one.hash_form is None
        for state in some:
            one.write(FORM, state)
        assert gone == [key for key, _ in some[0]]
    with opened(tmp_path, limit) as one:
        assert one.hash_form == FORM
        assert one.pieces == [key for state in some[1:] for key, _ in state]
        read(one, some[1])
        read(one, some[2])


def test_a_disk_with_nothing_left_has_no_form(tmp_path: Path) -> None:
    with opened(tmp_path) as one:
        one.write(FORM, pages(1))
        (tmp_path / f"{1:012d}.run").unlink()
    other = HashForm("other", 8, 16)
    with opened(tmp_path) as one:
        assert (one.hash_form, one.pieces) == (None, [])
        one.write(other, pages(2))
    with opened(tmp_path) as one:
        assert one.hash_form == other


def test_the_form_stays_when_the_journal_begins_anew_without_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf, "SPARE_RECORDS", 1)
    limit = STATE_BYTES
    with opened(tmp_path, limit) as one:
        for number in range(9):
            one.write(FORM, pages(number))
    with opened(tmp_path, limit) as one:
        assert one.hash_form == FORM
        read(one, pages(8))


def test_a_run_whose_file_could_not_be_removed_is_no_second_one(tmp_path: Path) -> None:
    limit = 2 * STATE_BYTES
    with opened(tmp_path, limit) as one:
        one.write(FORM, pages(1))
        flip(tmp_path / f"{1:012d}.run", 0)
        with failing("unlink", errno.EIO), pytest.raises(RunLostError):
            read(one, pages(1))
        assert not held(one, pages(1))
        one.write(FORM, pages(1))
        one.write(FORM, pages(2))
    with opened(tmp_path, limit) as one:
        assert len(one) == 2
        read(one, [*pages(1), *pages(2)])
        one.write(FORM, pages(3))
    with opened(tmp_path, limit) as one:
        read(one, [*pages(2), *pages(3)])


def test_a_disk_that_removes_nothing_keeps_what_it_has(tmp_path: Path) -> None:
    limit = 2 * STATE_BYTES
    with opened(tmp_path, limit) as one:
        one.write(FORM, pages(1))
        one.write(FORM, pages(2))
        with failing("unlink", errno.EROFS):
            for number in (3, 4, 5):
                with pytest.raises(RunLostError, match="Read-only file system"):
                    one.write(FORM, pages(number))
        assert one.used_bytes == limit
        read(one, [*pages(1), *pages(2)])
        one.write(FORM, pages(3))
        assert [held(one, pages(number)) for number in (1, 2, 3)] == [False, True, True]


def write_until_killed(said: Connection, folder: Path) -> None:
    one = opened(folder)
    for number in range(10_000):
        one.write(FORM, pages(number, 20))
        said.send(number)


@pytest.mark.parametrize("after", range(4))
def test_a_store_that_is_killed_while_it_writes_has_all_that_it_said(
    tmp_path: Path, after: int
) -> None:
    ours, theirs = pipe()
    process = start(write_until_killed, theirs, tmp_path)
    theirs.close()
    said = [ours.recv() for _ in range(3 + after)]
    process.kill()
    process.join()
    with suppress(EOFError):
        while True:
            said.append(ours.recv())
    with opened(tmp_path) as one:
        runs = {path.stem for path in tmp_path.glob("*.run")}
        assert len(runs) == len(one)
        for number in said[-2:]:
            read(one, pages(number, 20))
        last = pages(said[-1] + 1, 20)
        if held(one, last):  # it was whole, and not yet said
            read(one, last)


def test_pages_go_in_as_many_calls_as_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "MAX_PIECES", 3)
    monkeypatch.setattr(run_files, "MAX_CALL_BYTES", 16_384)
    with opened(tmp_path) as one:
        one.write(FORM, pages(1, 10))
        read(one, pages(1, 10))


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_what_a_call_leaves_is_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real = getattr(os, call)

    def short(fd: int, some: list[memoryview], offset: int) -> int:
        moved: int = real(fd, [some[0][: max(4096, len(some[0]) // 8192 * 4096)]], offset)
        return moved

    monkeypatch.setattr(os, call, short)
    with opened(tmp_path) as one:
        one.write(FORM, pages(1, 5))
        read(one, pages(1, 5))
