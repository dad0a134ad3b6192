"""`Journal` is a file of lines: what the folder is of, then each run that was written whole.

A line is a CRC-32 and JSON. It is written when the bytes that it speaks of are on the disk: so what
has no line was never finished. The first line that can't be read ends what is believed; what stood
behind it is lost, for a line more than the last one is torn only if something else wrote there.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from restow.agents.store.books.shape import PieceKey
from restow.agents.store.disk.errors import DiskOtherError
from restow.broker.client import HashForm

FORMAT = "restow store 3"
NAME = "journal"
Record = Mapping[str, Any]


class Journal:
    """Appends records. One thread."""

    def __init__(self, folder: Path, form: Record, records: Sequence[Record]) -> None:
        """Begin the file anew with these records. Raises `OSError`."""
        fresh = folder / f"{NAME}.new"
        lines = [_line({"format": FORMAT, **form}), *map(_line, records)]
        self._fd = os.open(fresh, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            self._size_bytes = 0
            self.records = len(records)
            """How many it has."""
            self._write(b"".join(lines))
            os.rename(fresh, folder / NAME)
        except OSError:
            self.close()
            raise

    def append(self, record: Record) -> None:
        """Add a record for good. Raises `OSError`, and is then as it was."""
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
    """The records in a folder's journal, and whether it was whole; none if there is none.

    Raises `DiskOtherError` if it is of another version or form, and `OSError`.
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
            f"{folder / NAME} does not begin as a store's journal: is the folder another program's?"
            f" Give an empty one, or remove what is in it",
            path=str(folder),
        )
    expected = {"format": FORMAT, **form}
    if records[0] != expected:
        unlike = ", ".join(_unlike(records[0], expected))
        raise DiskOtherError(
            f"{folder} has states of a store that differs in {unlike}. Give this one another "
            f"folder, or remove what is in it",
            path=str(folder),
        )
    return records[1:], whole


def form_record(form: HashForm) -> Record:
    """What is said before the first run: how its hashes are made, and those of all after it."""
    return {"hashes": astuple(form)}


def run_record(run: int, checksums: Mapping[PieceKey, int]) -> Record:
    """Return what is said of a run: its pieces, in the order in which they lie.

    They are of one state, so they have one salt and one revision.
    """
    first = next(iter(checksums))
    return {
        "run": run,
        "salt": first.salt,
        "revision": first.revision,
        "pieces": [[key.group, key.hash.hex(), one] for key, one in checksums.items()],
    }


def pieces_of(record: Record) -> dict[PieceKey, int]:
    """The pieces of a run, and their checksums."""
    salt, revision = record["salt"], record["revision"]
    return {
        PieceKey(group, salt, bytes.fromhex(name), revision): checksum
        for group, name, checksum in record["pieces"]
    }


def _unlike(one: Record, other: Record) -> Iterator[str]:
    for name in sorted({*one, *other}):
        if one.get(name) != other.get(name):
            yield f"{name} ({one.get(name)!r}, and not {other.get(name)!r})"


def _line(record: Record) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _record(line: bytes) -> Record | None:
    crc, _, text = line.partition(b" ")
    if crc != b"%08x" % zlib.crc32(text):
        return None
    record: Record = json.loads(text)
    return record
