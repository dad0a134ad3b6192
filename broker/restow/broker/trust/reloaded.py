"""Values that come from files, and come anew when the files have changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from restow.broker.trust.errors import TrustError

T = TypeVar("T")

Stamp = tuple[tuple[int, int, int] | None, ...]


def stamp_of(paths: Sequence[Path]) -> Stamp:
    """What changes when one of the files is written or replaced; cheap."""
    return tuple(_stamp(path) for path in paths)


class Reloaded(Generic[T]):
    """A value of files. One that can't be used any more does not replace the last good one."""

    def __init__(
        self,
        paths: Sequence[Path],
        load: Callable[[], T],
        on_error: Callable[[TrustError], object],
    ) -> None:
        """Load it; raises what ``load`` raises. Later such errors go to ``on_error``, once each."""
        self._paths, self._load, self._on_error = tuple(paths), load, on_error
        self._stamp = stamp_of(self._paths)
        self._value = load()

    def current(self) -> T:
        """The value, loaded again if a file has changed. Any thread may call it."""
        stamp = stamp_of(self._paths)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._value = self._load()
            except TrustError as error:
                self._on_error(error)
        return self._value


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
