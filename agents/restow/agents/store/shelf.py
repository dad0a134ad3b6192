"""A shelf: a folder with the pieces of states, in one run for each state that brought new pieces.

The journal says what the folder holds when a store starts again. Damage to the disk costs only
states: a piece that is missing, or not as it was written, counts as never kept.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

import xxhash

from restow.agents.store.room import PieceKey
from restow.agents.store.run_files import (
    DiskInUseError,
    DiskOtherError,
    DiskUnusableError,
    Journal,
    Record,
    RunLostError,
    Runs,
    Written,
    form_record,
    pieces_of,
    read_journal,
    read_pages,
    run_record,
    write_run,
)
from restow.broker.client import HashForm
from restow.broker.layout import Layout, digest
from restow.broker.logs import get_logger

SPARE_RECORDS = 256
"""Obsolete records that the journal may have, beyond two for each run, before it is rewritten."""
FULL = (errno.ENOSPC, errno.EDQUOT)
GO_AT_ONCE = 8
"""Most runs that are dropped for one write on a disk that is full before its limit."""
Page = tuple[PieceKey, memoryview]
T = TypeVar("T")


class Shelf:
    """The pieces on a disk. For one thread at a time; `has` may be called from any thread."""

    def __init__(
        self, folder: Path, layout: Layout, strides: Mapping[str, int], limit_bytes: int
    ) -> None:
        """Read what the folder has. Pages of each group have ``strides`` bytes.

        Raises `DiskInUseError`, `DiskOtherError` and `DiskUnusableError`.
        """
        self.folder, self.limit_bytes = folder, limit_bytes
        self.lost = 0
        """States that were not written, and runs that could not be read."""
        self.hash_form: HashForm | None = None
        """The form of all hashes in the folder; None before the first state."""
        self.on_gone: Callable[[Sequence[PieceKey]], None] = lambda _: None
        """Called with pieces that are gone, on the thread that noticed."""
        self._runs = Runs(strides)
        self._log = get_logger("restow.store").bind(folder=str(folder))
        of_any_revision = replace(layout, model=replace(layout.model, revision=""))
        self._form = {"layout": digest(of_any_revision), "strides": dict(strides)}
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            records, whole = read_journal(folder, self._form)
            for record in records:
                self._take(record)
            if not self._runs.by_number:
                self.hash_form = None
            self._remove_others()
            self._journal = self._with_room(self._new_journal)
        except BlockingIOError:
            os.close(self._lock)
            raise DiskInUseError(
                f"another store uses {folder}: give each store its own folder", path=str(folder)
            ) from None
        except OSError as error:
            os.close(self._lock)
            raise self._unusable(error) from None
        except DiskOtherError:
            os.close(self._lock)
            raise
        if not whole:
            self._log.warning("the journal is damaged: runs after the damage are lost")
        self._next = max(self._runs.by_number, default=0) + 1

    def __enter__(self) -> Self:
        """Return the shelf."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the shelf."""
        self.close()

    def close(self) -> None:
        """Close, so that another store can use the folder."""
        self._journal.close()
        os.close(self._lock)

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self._runs.by_number)

    @property
    def used_bytes(self) -> int:
        """Bytes of disk in use."""
        return self._runs.used_bytes

    def has(self, keys: Iterable[PieceKey]) -> bool:
        """Return whether all these pieces are on disk."""
        return all(key in self._runs.pieces for key in keys)

    @property
    def pieces(self) -> list[PieceKey]:
        """All pieces on disk."""
        return list(self._runs.pieces)

    def write(self, hash_form: HashForm, pages: Sequence[Page]) -> None:
        """Write the pieces of a state that are not on disk yet, as one run.

        All hashes have one form. The least recently used runs make room. Raises `RunLostError` if
        nothing was written.
        """
        new = [(key, view) for key, view in pages if key not in self._runs.pieces]
        self._runs.use(key for key, _ in pages)
        if not new:
            return
        size = sum(len(view) for _, view in new)
        if size > self.limit_bytes:
            raise self._loss(
                f"a state of {size} bytes exceeds the disk's limit of {self.limit_bytes} bytes"
            )
        try:
            while self.used_bytes + size > self.limit_bytes:
                self._drop(next(iter(self._runs.by_number)))
            run, self._next = self._next, self._next + 1
            checksums = {key: xxhash.xxh3_64_intdigest(view) for key, view in new}
            record, views = run_record(run, checksums), [view for _, view in new]
            self._with_room(lambda: self._write_run(hash_form, record, views))
        except OSError as error:
            raise self._loss(f"a state was not written: {error.strerror}") from None
        self._runs.add(run, checksums)
        self._runs.use(key for key, _ in pages)

    def read(self, pages: Sequence[Page]) -> None:
        """Read pieces into their pages. Raises `RunLostError`, and drops the run that failed."""
        by_run: dict[int, list[tuple[Written, Page]]] = {}
        for key, view in pages:
            written = self._runs.pieces.get(key)
            if written is None:
                raise RunLostError("a piece of the state is no longer on disk")
            by_run.setdefault(written.run, []).append((written, (key, view)))
        for run, pieces in by_run.items():
            try:
                self._read_run(run, pieces)
            except (OSError, RunLostError) as error:
                why = error.strerror if isinstance(error, OSError) else error.message
                self._lose(run)
                raise self._loss(f"run {run} can't be read: {why}") from None
        self._runs.use(key for key, _ in pages)

    def forget_revision(self, revision: str) -> None:
        """Drop the runs of states that these weights computed."""
        for number, run in list(self._runs.by_number.items()):
            if run.pieces[0].revision == revision:
                self._lose(number)

    def forget_state(self, keys: Iterable[PieceKey]) -> None:
        """Drop the runs that have these pieces, with what else is in them."""
        for run in {self._runs.pieces[key].run for key in keys if key in self._runs.pieces}:
            self._lose(run)

    def _read_run(self, run: int, pieces: Sequence[tuple[Written, Page]]) -> None:
        read_pages(self._path(run), [(written.offset_bytes, view) for written, (_, view) in pieces])
        for written, (key, view) in pieces:
            if xxhash.xxh3_64_intdigest(view) != written.checksum:
                raise RunLostError(f"a page of {key.group} differs from what was written")

    def _write_run(self, hash_form: HashForm, record: Record, views: Sequence[memoryview]) -> None:
        """Write a run and then its record. Raises `OSError`, and leaves no run then."""
        if self.hash_form is None:
            self._write_down(form_record(hash_form))
            self.hash_form = hash_form
        path = self._path(record["run"])
        write_run(path, views)
        try:
            self._write_down(record)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def _with_room(self, write: Callable[[], T]) -> T:
        """Write; if the disk is full before its limit, drop the least recently used runs."""
        for _ in range(GO_AT_ONCE):
            try:
                return write()
            except OSError as error:
                if error.errno not in FULL or not self._runs.by_number:
                    raise
                self._drop(next(iter(self._runs.by_number)))
        return write()

    def _write_down(self, record: Record) -> None:
        """Append to the journal, which is written anew if most of its records are obsolete."""
        if self._journal.records > SPARE_RECORDS + 2 * len(self._runs.by_number):
            before, self._journal = self._journal, self._new_journal()
            before.close()
        self._journal.append(record)

    def _new_journal(self) -> Journal:
        records = [form_record(self.hash_form)] if self.hash_form is not None else []
        records += [run_record(run, self._runs.checksums(run)) for run in self._runs.by_number]
        return Journal(self.folder, self._form, records)

    def _take(self, record: Record) -> None:
        """Take over a record of the journal, if the run's file exists."""
        if "hashes" in record:
            self.hash_form = HashForm(*record["hashes"])
            return
        run, checksums = record["run"], pieces_of(record)
        for key in checksums:  # an earlier run with this piece was dropped by then
            if key in self._runs.pieces:
                self._forget(self._runs.pieces[key].run)
        self._runs.add(run, checksums)
        try:
            there = self._path(run).stat().st_size == self._runs.by_number[run].size_bytes
        except FileNotFoundError:
            there = False
        if not there:
            self._forget(run)

    def _forget(self, run: int) -> None:
        if gone := self._runs.forget(run):
            self.on_gone(gone)

    def _drop(self, run: int) -> None:
        """Drop a run: without its file its record is ignored. Raises `OSError`, and then keeps it.

        So a full disk has room again before anything is written, and a disk that cannot remove
        files loses nothing.
        """
        self._path(run).unlink(missing_ok=True)
        self._forget(run)

    def _lose(self, run: int) -> None:
        """Forget a damaged run, whatever becomes of its file."""
        self._forget(run)
        try:
            self._path(run).unlink(missing_ok=True)
        except OSError as error:
            self._log.warning("a run's file can't be removed", run=run, detail=error.strerror)

    def _remove_others(self) -> None:
        """Remove files that were not written completely."""
        for path in self.folder.glob("*.run"):
            if path.stem.isdecimal() and int(path.stem) not in self._runs.by_number:
                path.unlink()

    def _path(self, run: int) -> Path:
        return self.folder / f"{run:012d}.run"

    def _loss(self, why: str) -> RunLostError:
        self.lost += 1
        self._log.warning("a state on disk is lost", detail=why)
        return RunLostError(f"{self.folder}: {why}", path=str(self.folder))

    def _unusable(self, error: OSError) -> DiskUnusableError:
        return DiskUnusableError(
            f"{self.folder} can't keep states: {error.strerror}", path=str(self.folder)
        )
