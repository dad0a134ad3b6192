"""Files of a store on disk: runs of pages, their index, and the journal."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from restow.agents.store.room import PieceKey
from restow.broker.client import HashForm
from restow.broker.errors import RestowError


class DiskInUseError(RestowError, status="FAILED_PRECONDITION", reason="STORE_DISK_IN_USE"):
    """Another store uses the folder."""


class DiskOtherError(RestowError, status="FAILED_PRECONDITION", reason="STORE_DISK_OTHER"):
    """The folder is of another model, layout or version, or is not a store's."""


class DiskUnusableError(RestowError, status="FAILED_PRECONDITION", reason="STORE_DISK_UNUSABLE"):
    """The folder can't be read or written."""


class RunLostError(RestowError, status="DATA_LOSS", reason="STORE_RUN_LOST"):
    """A state could not be written, or differs on disk from what was written."""


MAX_PIECES = 1024
"""Most pieces of one call (IOV_MAX)."""
MAX_CALL_BYTES = 1 << 30
"""Most bytes of one call: the system takes less than 2 GiB."""


def write_run(path: Path, pages: Sequence[memoryview]) -> None:
    """Write a new file durably. Raises `OSError`, and leaves no file then."""
    fd = _open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        _move(pages, lambda batch, offset: os.pwritev(fd, batch, offset), 0)
        os.fdatasync(fd)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def read_pages(path: Path, pages: Sequence[tuple[int, memoryview]]) -> None:
    """Read pages, each from its offset; adjacent pages are read together.

    Raises `OSError` and `RunLostError`.
    """
    fd = _open(path, os.O_RDONLY)
    try:
        beside: list[memoryview] = []
        begin = end = 0
        for offset_bytes, view in sorted(pages, key=lambda page: page[0]):
            if offset_bytes != end:
                _read(fd, beside, begin)
                beside, begin = [], offset_bytes
            beside.append(view)
            end = offset_bytes + len(view)
        _read(fd, beside, begin)
    finally:
        os.close(fd)


def _read(fd: int, pages: Sequence[memoryview], offset_bytes: int) -> None:
    _move(pages, lambda batch, offset: os.preadv(fd, batch, offset), offset_bytes)


def _open(path: Path, flags: int) -> int:
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:  # else the file system has no direct I/O
            raise
        return os.open(path, flags & ~os.O_EXCL, 0o600)


def _move(
    pages: Sequence[memoryview], call: Callable[[list[memoryview], int], int], offset_bytes: int
) -> None:
    left = list(reversed(pages))
    while left:
        batch: list[memoryview] = []
        size = 0
        while left and len(batch) < MAX_PIECES and size + len(left[-1]) <= MAX_CALL_BYTES:
            batch.append(left.pop())
            size += len(batch[-1])
        if not batch:  # a single page that is longer than a call
            batch, size = [left[-1][:MAX_CALL_BYTES]], MAX_CALL_BYTES
            left[-1] = left[-1][MAX_CALL_BYTES:]
        moved = call(batch, offset_bytes)
        if not moved:
            raise RunLostError("the run's file ends before its last page")
        offset_bytes += moved
        for page in reversed(batch):  # the next call moves the rest
            size -= len(page)
            if moved <= size:
                left.append(page)
            elif moved < size + len(page):
                left.append(page[moved - size :])


@dataclass(frozen=True, slots=True)
class Written:
    """The position of a piece, and its checksum."""

    run: int
    offset_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class FileRun:
    """A run: the size of its file, and its pieces in the file's order."""

    size_bytes: int
    pieces: tuple[PieceKey, ...]


class Runs:
    """The runs on a disk, and the pieces in them."""

    def __init__(self, strides: Mapping[str, int]) -> None:
        """Begin without runs. Pages of each group have ``strides`` bytes."""
        self.used_bytes = 0
        self.pieces: dict[PieceKey, Written] = {}
        self.by_number: OrderedDict[int, FileRun] = OrderedDict()
        """Runs by number, least recently used first."""
        self._strides = dict(strides)

    def checksums(self, run: int) -> dict[PieceKey, int]:
        """Return the pieces of a run in the file's order, each with its checksum."""
        return {key: self.pieces[key].checksum for key in self.by_number[run].pieces}

    def add(self, run: int, checksums: Mapping[PieceKey, int]) -> None:
        """Add a run with these consecutive pieces."""
        end = 0
        for key, checksum in checksums.items():
            self.pieces[key] = Written(run, end, checksum)
            end += self._strides[key.group]
        self.by_number[run] = FileRun(end, tuple(checksums))
        self.used_bytes += end

    def forget(self, run: int) -> tuple[PieceKey, ...]:
        """Forget a run if it is known; return its pieces."""
        gone = self.by_number.pop(run, None)
        if gone is None:
            return ()
        self.used_bytes -= gone.size_bytes
        for key in gone.pieces:
            del self.pieces[key]
        return gone.pieces

    def use(self, keys: Iterable[PieceKey]) -> None:
        """Mark the runs of these pieces as the most recently used."""
        for run in {written.run for key in keys if (written := self.pieces.get(key))}:
            self.by_number.move_to_end(run)


FORMAT = "restow store 3"
NAME = "journal"
Record = Mapping[str, Any]


class Journal:
    """A file to which records are appended. For one thread."""

    def __init__(self, folder: Path, form: Record, records: Sequence[Record]) -> None:
        """Write a new file with these records. Raises `OSError`."""
        fresh = folder / f"{NAME}.new"
        lines = [_line({"format": FORMAT, **form}), *map(_line, records)]
        self._fd = os.open(fresh, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            self._size_bytes = 0
            self.records = len(records)
            """Number of records."""
            self._write(b"".join(lines))
            os.rename(fresh, folder / NAME)
        except OSError:
            self.close()
            raise

    def append(self, record: Record) -> None:
        """Append a record durably. Raises `OSError`, and leaves the file as it was then."""
        self._write(_line(record))
        self.records += 1

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _write(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], self._size_bytes + written)
            os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._size_bytes)
            raise
        self._size_bytes += len(data)


def read_journal(folder: Path, form: Record) -> tuple[list[Record], bool]:
    """Return the records of a folder's journal, if any, and whether the journal is undamaged.

    Raises `DiskOtherError` if it has another version or form, and `OSError`.
    """
    try:
        data = (folder / NAME).read_bytes()
    except FileNotFoundError:
        return [], True
    records, whole = [], data.endswith(b"\n") or not data
    for line in data.split(b"\n")[:-1]:
        record = _record(line)
        if record is None:
            whole = False
            break
        records.append(record)
    if not records:
        raise DiskOtherError(
            f"{folder / NAME} does not begin as a store's journal, so the folder may be another "
            f"program's: give the store an empty folder, or empty this folder",
            path=str(folder),
        )
    expected = {"format": FORMAT, **form}
    if records[0] != expected:
        unlike = ", ".join(_unlike(records[0], expected))
        raise DiskOtherError(
            f"{folder} has states of a store that differs in {unlike}: give this store another "
            f"folder, or empty this folder",
            path=str(folder),
        )
    return records[1:], whole


def form_record(form: HashForm) -> Record:
    """Return the record before the first run: the form of all hashes in the folder."""
    return {"hashes": astuple(form)}


def run_record(run: int, checksums: Mapping[PieceKey, int]) -> Record:
    """Return the record of a run: its pieces, in the file's order.

    They belong to one state, so they have the same salt and revision.
    """
    first = next(iter(checksums))
    return {
        "run": run,
        "salt": first.salt,
        "revision": first.revision,
        "pieces": [[key.group, key.hash.hex(), checksum] for key, checksum in checksums.items()],
    }


def pieces_of(record: Record) -> dict[PieceKey, int]:
    """Return the pieces of a run's record, with their checksums."""
    salt, revision = record["salt"], record["revision"]
    return {
        PieceKey(group, salt, bytes.fromhex(name), revision): checksum
        for group, name, checksum in record["pieces"]
    }


def _unlike(found: Record, expected: Record) -> Iterator[str]:
    for name in sorted({*found, *expected}):
        if found.get(name) != expected.get(name):
            yield f"{name} ({found.get(name)!r} in place of {expected.get(name)!r})"


def _line(record: Record) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _record(line: bytes) -> Record | None:
    crc, _, text = line.partition(b" ")
    if crc != b"%08x" % zlib.crc32(text):
        return None
    record: Record = json.loads(text)
    return record
