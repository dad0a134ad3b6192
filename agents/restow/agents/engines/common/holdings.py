"""What an engine's prefix cache holds, by content, and which of its states a store should have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

from restow.agents.engines.common.blocks import Group
from restow.agents.engines.common.chains import HashedPrefix
from restow.broker.client import Prefix

GROUP_BYTES = 4
"""Bytes of the group's number at the end of a cache key (as in vLLM)."""
MAX_STATES = 256
"""States worth keeping that are remembered. The oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Blocks or snapshots of a group that are held.

    Each hash names all tokens up to the end of a block. The hash of a partly filled block names the
    tokens that are in it. Full blocks of one run follow each other in a chain, and ``parent`` names
    the tokens before the first block (empty if there are none, or if the block is not full).
    """

    group: str
    hashes: tuple[bytes, ...]
    parent: bytes = b""


@dataclass(frozen=True, slots=True)
class EvictedBlocks:
    """Hashes of which a group holds nothing any more, in any order."""

    group: str
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Blocks that were evicted and blocks that are held since the last changes."""

    evicted: tuple[EvictedBlocks, ...] = ()
    held: tuple[HeldBlocks, ...] = ()


class _Place(NamedTuple):
    """A group, and the hash of all tokens up to the end of one of its blocks."""

    group: str
    hash: bytes


class _Entry(NamedTuple):
    place: _Place
    token: int
    parent: bytes
    """Empty for a block that follows no other: the first, one filled in part, or a state."""


class CacheHoldings:
    """What an engine's cache holds, by its keys. Belongs to the scheduler's thread.

    A key is the engine's own block hash followed by the number of a group. It counts once, however
    many blocks the engine has under it. Several keys may stand for one place, as when an adapter
    was loaded twice. Blocks whose content has no name are not reported.
    """

    def __init__(
        self,
        groups: Mapping[int, Group],
        named: Callable[[bytes], HashedPrefix | None],
        before: Callable[[HashedPrefix, int], bytes],
    ) -> None:
        """Hold nothing of ``groups``, which are given by the engine's numbers.

        ``named`` and ``before`` are those of `RequestChains`.
        """
        self._groups = groups
        self._named = named
        self._before = before
        self._entries: dict[bytes, _Entry] = {}
        self._keys: dict[str, dict[bytes, tuple[bytes, ...]]] = {
            group.name: {} for group in groups.values()
        }
        """By group and hash."""
        self._evicted: dict[_Place, None] = {}
        self._held: dict[_Place, None] = {}

    def changed(self, keys: Iterable[bytes], is_cached: Callable[[bytes], bool]) -> None:
        """Note ``keys`` that may have come or gone."""
        for key in keys:
            if key in self._entries:
                if not is_cached(key):
                    self._forget(key)
            elif is_cached(key):
                self._note(key)

    def cleared(self) -> None:
        """Note that nothing is cached any more."""
        for key in list(self._entries):
            self._forget(key)

    def changes(self) -> CacheChanges:
        """Return what changed since the last call.

        Blocks that came and went meanwhile are left out, and so are blocks that went and came.
        """
        evicted, self._evicted = self._evicted, {}
        held, self._held = self._held, {}
        return CacheChanges(_evicted_blocks(evicted), self._runs(held))

    def keys(self, group: str) -> Mapping[bytes, tuple[bytes, ...]]:
        """Return the engine's keys of what a group holds, by the hash of the tokens."""
        return self._keys[group]

    def _note(self, key: bytes) -> None:
        group = self._groups.get(int.from_bytes(key[-GROUP_BYTES:], "big"))
        named = self._named(key[:-GROUP_BYTES])
        if group is None or named is None:
            return
        place = _Place(group.name, named.hash)
        full = named.token % group.block_tokens == 0
        parent = self._before(named, group.block_tokens) if full and not group.is_state else b""
        self._entries[key] = _Entry(place, named.token, parent)
        keys = self._keys[place.group]
        others = keys.get(place.hash, ())
        keys[place.hash] = (*others, key)
        if not others:
            self._turn(place, self._evicted, self._held)

    def _forget(self, key: bytes) -> None:
        place = self._entries.pop(key).place
        keys = self._keys[place.group]
        others = tuple(other for other in keys[place.hash] if other != key)
        if others:
            keys[place.hash] = others
            return
        del keys[place.hash]
        self._turn(place, self._held, self._evicted)

    def _turn(self, place: _Place, was: dict[_Place, None], now: dict[_Place, None]) -> None:
        """Cancel a change that was not reported yet; else note the new change."""
        if place in was:
            del was[place]
        else:
            now[place] = None

    def _runs(self, places: Iterable[_Place]) -> tuple[HeldBlocks, ...]:
        groups = {group.name: group for group in self._groups.values()}
        held: list[HeldBlocks] = []
        run: list[_Entry] = []
        for place in places:
            entry = self._entries[self._keys[place.group][place.hash][0]]
            if run and not _follows(run[-1], entry, groups[place.group]):
                held.append(_blocks(run))
                run = []
            run.append(entry)
        if run:
            held.append(_blocks(run))
        return tuple(held)


def _follows(last: _Entry, entry: _Entry, group: Group) -> bool:
    return (
        last.place.group == entry.place.group
        and last.place.hash == entry.parent
        and last.token + group.block_tokens == entry.token
    )


def _blocks(run: list[_Entry]) -> HeldBlocks:
    hashes = tuple(entry.place.hash for entry in run)
    return HeldBlocks(run[0].place.group, hashes, run[0].parent)


def _evicted_blocks(places: Iterable[_Place]) -> tuple[EvictedBlocks, ...]:
    by_group: dict[str, list[bytes]] = {}
    for place in places:
        by_group.setdefault(place.group, []).append(place.hash)
    return tuple(EvictedBlocks(group, tuple(hashes)) for group, hashes in by_group.items())


# -- states worth keeping -------------------------------------------------------------------------


class StatesToKeep:
    """States of one scheduler that requests used, or will use: a store should have them.

    Belongs to the scheduler's thread; `newest` may be called from any thread.

    ::

        noted, or a second request begins with it   kept from the next step on, if it is held then
        noted again                                 the newest of all; a store is told once
        evicted                                     forgotten
    """

    def __init__(self) -> None:
        """Begin with no states."""
        self._states: dict[bytes, Prefix] = {}
        """By the hash of all their tokens, the newest last."""
        self._noted: dict[bytes, Prefix] = {}
        self._begun: dict[bytes, None] = {}
        """Hashes of the states that one request has begun with."""
        self._lock = Lock()

    def note(self, prefix: Prefix) -> None:
        """Note a state that is worth keeping."""
        self._noted[_name(prefix)] = prefix

    def begin(self, prefix: Prefix) -> None:
        """Note that a request begins with a state. The second request makes it worth keeping.

        The first may be the next turn of a conversation, and the turn after it begins later in the
        text.
        """
        name = _name(prefix)
        if name in self._begun or name in self._states:
            self._begun.pop(name, None)
            self.note(prefix)
            return
        self._begun[name] = None
        _shorten(self._begun)

    def forget(self, names: Iterable[bytes]) -> None:
        """Forget states that are no longer held, or not by all groups."""
        with self._lock:
            for name in names:
                self._states.pop(name, None)

    def clear(self) -> None:
        """Forget all states: the weights that computed them were replaced."""
        with self._lock:
            self._states, self._noted, self._begun = {}, {}, {}

    def take_new(self, is_held: Callable[[Prefix], bool]) -> list[Prefix]:
        """Return the held states that were noted since the last call for the first time."""
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
        """Return all states, the newest first."""
        with self._lock:
            return [*reversed(self._states.values())]


def _name(prefix: Prefix) -> bytes:
    return prefix.end_hash or prefix.hashes[-1]


def _shorten(known: dict[bytes, Any]) -> None:
    """Forget the oldest entry if there are too many."""
    if len(known) > MAX_STATES:
        del known[next(iter(known))]
