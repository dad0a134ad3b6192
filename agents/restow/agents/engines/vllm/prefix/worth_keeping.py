"""`WorthKeeping` knows which of an engine's states a store is to have, while they are held."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any

from restow.broker.client import Prefix

MOST_STATES = 256
"""Known of one engine: of more, those that were wanted last."""


class WorthKeeping:
    """The states of one scheduler that somebody wanted, or will. `newest` suits any thread.

    ::

        noted, or begun with twice   known from the next step on, if it is held then
        noted again                  the newest of all; a store hears of it once
        evicted                      forgotten
    """

    def __init__(self) -> None:
        """Know none."""
        self._states: dict[bytes, Prefix] = {}
        """By the hash of all their tokens, the newest last."""
        self._noted: dict[bytes, Prefix] = {}
        self._begun: dict[bytes, None] = {}
        """Names of those that one request has begun with."""
        self._lock = Lock()

    def note(self, prefix: Prefix) -> None:
        """A state is worth keeping."""
        self._noted[_name(prefix)] = prefix

    def begin(self, prefix: Prefix) -> None:
        """A request begins with a state: the second one shows that more will.

        The first may be the next turn of a conversation, and the one after that begins later.
        """
        name = _name(prefix)
        if name in self._begun or name in self._states:
            self._begun.pop(name, None)
            self.note(prefix)
            return
        self._begun[name] = None
        _shorten(self._begun)

    def forget(self, names: Iterable[bytes]) -> None:
        """What these hashes name is not held any more, or not by all groups."""
        with self._lock:
            for name in names:
                self._states.pop(name, None)

    def clear(self) -> None:
        """Know none any more: the weights that computed them were replaced."""
        with self._lock:
            self._states, self._noted, self._begun = {}, {}, {}

    def take_new(self, is_held: Callable[[Prefix], bool]) -> list[Prefix]:
        """Return those that are held, and were noted since the last call and never before."""
        noted, self._noted = self._noted, {}
        new: list[Prefix] = []
        with self._lock:
            for name, prefix in noted.items():
                if not is_held(prefix):
                    continue
                if self._states.pop(name, None) is None:
                    new.append(prefix)
                self._states[name] = prefix
                _shorten(self._states)
        return new

    def newest(self) -> list[Prefix]:
        """Return all of them, the newest first."""
        with self._lock:
            return [*reversed(self._states.values())]


def _name(prefix: Prefix) -> bytes:
    return prefix.end_hash or prefix.hashes[-1]


def _shorten(known: dict[bytes, Any]) -> None:
    """Forget the oldest, if there are too many."""
    if len(known) > MOST_STATES:
        del known[next(iter(known))]
