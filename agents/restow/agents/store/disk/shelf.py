"""A `Shelf` is a folder with the pieces of states: a run of them for each state that brought any.

What it holds is known by its journal when a store starts again. Whatever happens to the disk while
it runs costs states, and never more: a piece that is not there, or not as it was written, is one
that nobody has.
"""

from __future__ import annotations

import fcntl
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

from restow.agents.store.books.shape import PieceKey
from restow.agents.store.disk.errors import (
    DiskInUseError,
    DiskOtherError,
    DiskUnusableError,
    RunLostError,
)
from restow.agents.store.disk.journal import (
    Journal,
    Record,
    form_record,
    pieces_of,
    read_journal,
    run_record,
)
from restow.agents.store.disk.run_files import read_run, write_run
from restow.broker.client import HashForm
from restow.broker.layout import Layout, digest
from restow.broker.logs import get_logger

SPARE_RECORDS = 256
"""So many lines of what is gone a journal has at least before it begins anew."""
Page = tuple[PieceKey, memoryview]


@dataclass(frozen=True, slots=True)
class _Written:
    """Where a piece lies, and what it hashes to."""

    run: int
    offset_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class _Run:
    size_bytes: int
    pieces: tuple[PieceKey, ...]


class Shelf:
    """The pieces on a disk. One thread at a time; any may ask `has`."""

    def __init__(
        self, folder: Path, layout: Layout, strides: Mapping[str, int], limit_bytes: int
    ) -> None:
        """Find what is there. Pages of each group have ``strides`` bytes.

        Raises `DiskInUseError`, `DiskOtherError` and `DiskUnusableError`.
        """
        if not layout.model.revision:
            raise DiskOtherError(
                f"model {layout.model.name!r} has no revision, so that nobody can tell its states "
                f"from those of other weights: no disk keeps them",
                path=str(folder),
            )
        self.folder, self.limit_bytes = folder, limit_bytes
        self.used_bytes = 0
        self.lost = 0
        """States that were not written, and runs that could not be read."""
        self.hash_form: HashForm | None = None
        """How the hashes of what is there are made; None: nothing is, or was."""
        self.on_gone: Callable[[Sequence[PieceKey]], None] = lambda _: None
        """Hears what is not there any more, on the thread that found out."""
        self._strides = dict(strides)
        self._pieces: dict[PieceKey, _Written] = {}
        self._runs: OrderedDict[int, _Run] = OrderedDict()
        """From the one that was used longest ago on."""
        self._log = get_logger("restow.store").bind(folder=str(folder))
        self._form = {"layout": digest(layout), "strides": self._strides}
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
            if not self._runs:
                self.hash_form = None
            self._remove_others()
            self._journal = self._new_journal()
        except BlockingIOError:
            os.close(self._lock)
            raise DiskInUseError(
                f"{folder} is another store's: give each a folder of its own", path=str(folder)
            ) from None
        except OSError as error:
            os.close(self._lock)
            raise self._unusable(error) from None
        except DiskOtherError:
            os.close(self._lock)
            raise
        if not whole:
            self._log.warning("the journal was torn: what stood behind is lost")
        self._next = max(self._runs, default=0) + 1

    def __enter__(self) -> Self:
        """Use as a context."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Let another store have the folder."""
        self._journal.close()
        os.close(self._lock)

    def __len__(self) -> int:
        """How many runs there are."""
        return len(self._runs)

    def has(self, keys: Iterable[PieceKey]) -> bool:
        """Whether all of these pieces are there."""
        return all(key in self._pieces for key in keys)

    @property
    def pieces(self) -> list[PieceKey]:
        """All that is there."""
        return list(self._pieces)

    def write(self, hash_form: HashForm, pages: Sequence[Page]) -> None:
        """Write those pieces of a state that are not there yet, as one run.

        Hashes of all have one form. What was used longest ago makes room. Raises `RunLostError`:
        nothing was written then.
        """
        new = [(key, view) for key, view in pages if key not in self._pieces]
        self._touch(key for key, _ in pages)
        if not new:
            return
        size = sum(len(view) for _, view in new)
        if size > self.limit_bytes:
            raise self._loss(f"{size} bytes of one state are more than the disk may have")
        try:
            while self.used_bytes + size > self.limit_bytes:
                self._drop(next(iter(self._runs)))
            run, self._next = self._next, self._next + 1
            record = run_record(run, {key: xxhash.xxh3_64_intdigest(view) for key, view in new})
            if self.hash_form is None:
                self._write_down(form_record(hash_form))
                self.hash_form = hash_form
            path = self._path(run)
            write_run(path, [view for _, view in new])
            try:
                self._write_down(record)
            except OSError:
                path.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise self._loss(f"not written: {error.strerror}") from None
        self._add(record)
        self._touch(key for key, _ in pages)

    def read(self, pages: Sequence[Page]) -> None:
        """Read pieces, each into its page. Raises `RunLostError`, and has none of that run then."""
        by_run: dict[int, list[tuple[_Written, PieceKey, memoryview]]] = {}
        for key, view in pages:
            found = self._pieces.get(key)
            if found is None:
                raise RunLostError("a piece of the state is not on the disk any more")
            by_run.setdefault(found.run, []).append((found, key, view))
        for run, some in by_run.items():
            try:
                self._read_run(run, sorted(some, key=lambda one: one[0].offset_bytes))
            except (OSError, RunLostError) as error:
                why = error.strerror if isinstance(error, OSError) else error.message
                self._drop_quietly(run)
                raise self._loss(f"run {run} is not read: {why}") from None
            self._runs.move_to_end(run)

    def _read_run(self, run: int, some: list[tuple[_Written, PieceKey, memoryview]]) -> None:
        beside: list[memoryview] = []
        begin = end = some[0][0].offset_bytes
        for found, _, view in some:
            if found.offset_bytes != end:
                read_run(self._path(run), begin, beside)
                beside, begin = [], found.offset_bytes
            beside.append(view)
            end = found.offset_bytes + len(view)
        read_run(self._path(run), begin, beside)
        for found, key, view in some:
            if xxhash.xxh3_64_intdigest(view) != found.checksum:
                raise RunLostError(f"a page of {key.group} is not what was written")

    def _touch(self, keys: Iterable[PieceKey]) -> None:
        """The runs of these are the last ones to go."""
        for run in {found.run for key in keys if (found := self._pieces.get(key))}:
            self._runs.move_to_end(run)

    def _write_down(self, record: Record) -> None:
        """Say it in the journal, which begins anew when most of it is of what is gone."""
        if self._journal.records > SPARE_RECORDS + 2 * len(self._runs):
            before, self._journal = self._journal, self._new_journal()
            before.close()
        self._journal.append(record)

    def _new_journal(self) -> Journal:
        records = [form_record(self.hash_form)] if self.hash_form is not None else []
        for number, run in self._runs.items():
            pieces = {key: self._pieces[key].checksum for key in run.pieces}
            records.append(run_record(number, pieces))
        return Journal(self.folder, self._form, records)

    def _take(self, record: Record) -> None:
        """Take over what the journal says, if the file is there; else it is gone."""
        if "hashes" in record:
            self.hash_form = HashForm(*record["hashes"])
            return
        if "gone" in record:
            self._forget(record["gone"])
            return
        run = record["run"]
        for key in pieces_of(record):  # who brought it before was gone, though nothing says so
            if key in self._pieces:
                self._forget(self._pieces[key].run)
        self._add(record)
        try:
            there = self._path(run).stat().st_size == self._runs[run].size_bytes
        except FileNotFoundError:
            there = False
        if not there:
            self._forget(run)

    def _add(self, record: Record) -> None:
        run, end = record["run"], 0
        pieces = pieces_of(record)
        for key, checksum in pieces.items():
            self._pieces[key] = _Written(run, end, checksum)
            end += self._strides[key.group]
        self._runs[run] = _Run(end, tuple(pieces))
        self.used_bytes += end

    def _forget(self, run: int) -> None:
        gone = self._runs.pop(run, None)
        if gone is not None:
            self.used_bytes -= gone.size_bytes
            for key in gone.pieces:
                del self._pieces[key]
            self.on_gone(gone.pieces)

    def _drop(self, run: int) -> None:
        """Remove a run. Raises `OSError`; it is not found any more all the same."""
        self._forget(run)
        self._write_down({"gone": run})
        self._path(run).unlink(missing_ok=True)

    def _drop_quietly(self, run: int) -> None:
        try:
            self._drop(run)
        except OSError as error:
            self._log.warning("a run stays where it is", run=run, detail=error.strerror)

    def _remove_others(self) -> None:
        """Remove files that were not written to their end."""
        for path in self.folder.glob("*.run"):
            if path.stem.isdecimal() and int(path.stem) not in self._runs:
                path.unlink()

    def _path(self, run: int) -> Path:
        return self.folder / f"{run:012d}.run"

    def _loss(self, why: str) -> RunLostError:
        self.lost += 1
        self._log.warning("a state is lost on the disk", detail=why)
        return RunLostError(f"{self.folder}: {why}", path=str(self.folder))

    def _unusable(self, error: OSError) -> DiskUnusableError:
        return DiskUnusableError(
            f"{self.folder} keeps no states: {error.strerror}", path=str(self.folder)
        )
