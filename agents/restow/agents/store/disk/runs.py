"""`Runs` know which pieces lie in which run, and where. They do no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from restow.agents.store.books.shape import PieceKey


@dataclass(frozen=True, slots=True)
class Written:
    """Where a piece lies, and what it hashes to."""

    run: int
    offset_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class _Run:
    size_bytes: int
    pieces: tuple[PieceKey, ...]


class Runs:
    """Those on a disk, by their numbers, from the one that was used longest ago on."""

    def __init__(self, strides: Mapping[str, int]) -> None:
        """Know of none. Pages of each group have ``strides`` bytes."""
        self.used_bytes = 0
        self.pieces: dict[PieceKey, Written] = {}
        self._strides = dict(strides)
        self._runs: OrderedDict[int, _Run] = OrderedDict()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._runs)

    def __iter__(self) -> Iterator[int]:
        """Go through their numbers."""
        return iter(self._runs)

    def __contains__(self, run: object) -> bool:
        """Whether a run is known."""
        return run in self._runs

    @property
    def oldest(self) -> int:
        """The one that was used longest ago, of some."""
        return next(iter(self._runs))

    @property
    def latest(self) -> int:
        """The highest number; 0: there is none."""
        return max(self._runs, default=0)

    def size_bytes(self, run: int) -> int:
        """Of a run's file."""
        return self._runs[run].size_bytes

    def revision(self, run: int) -> str:
        """Return the revision of the weights that computed a run."""
        return self._runs[run].pieces[0].revision

    def checksums(self, run: int) -> dict[PieceKey, int]:
        """The pieces of a run as they lie there, each with what it hashes to."""
        return {key: self.pieces[key].checksum for key in self._runs[run].pieces}

    def add(self, run: int, checksums: Mapping[PieceKey, int]) -> None:
        """A run is there, with these pieces one behind the other."""
        end = 0
        for key, checksum in checksums.items():
            self.pieces[key] = Written(run, end, checksum)
            end += self._strides[key.group]
        self._runs[run] = _Run(end, tuple(checksums))
        self.used_bytes += end

    def forget(self, run: int) -> tuple[PieceKey, ...]:
        """A run is there no longer, if it was; its pieces."""
        gone = self._runs.pop(run, None)
        if gone is None:
            return ()
        self.used_bytes -= gone.size_bytes
        for key in gone.pieces:
            del self.pieces[key]
        return gone.pieces

    def use(self, keys: Iterable[PieceKey]) -> None:
        """The runs of these pieces are the last ones to go."""
        for run in {found.run for key in keys if (found := self.pieces.get(key))}:
            self._runs.move_to_end(run)
