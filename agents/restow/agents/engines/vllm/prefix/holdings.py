"""`Holdings` follows what vLLM's prefix cache has, and tells what came and went."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from restow.agents.engines.common.groups import Group
from restow.agents.engines.vllm.prefix.request_chains import Named

GROUP_BYTES = 4
"""vLLM's key of a cached block is a block hash, and the number of a group in so many bytes."""


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks or snapshots of a group. Each hash names the tokens up to the end of one.

    A block that is filled in part is named by the tokens that are in it. Full blocks of one run
    follow each other in a chain; ``parent`` names the tokens before the first one of them (empty:
    there are none, or it is no full block).
    """

    group: str
    hashes: tuple[bytes, ...]
    parent: bytes = b""


@dataclass(frozen=True, slots=True)
class Evicted:
    """Hashes of which a group has nothing any more, in any order."""

    group: str
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Changes:
    """What was evicted, and what is held, since the changes before."""

    evicted: tuple[Evicted, ...] = ()
    held: tuple[Held, ...] = ()


class _Place(NamedTuple):
    """What is told and asked for: a group, and the hash of what comes before a token."""

    group: str
    hash: bytes


class _Entry(NamedTuple):
    place: _Place
    token: int
    parent: bytes


class Holdings:
    """What is held under which of vLLM's keys. Belongs to the scheduler's thread.

    A key is counted once, however many blocks vLLM has under it. Several keys may stand for one
    place: of an adapter that was loaded twice, say. What nobody can name is not told.
    """

    def __init__(
        self,
        groups: Mapping[int, Group],
        named: Callable[[bytes], Named | None],
        before: Callable[[Named, int], bytes],
    ) -> None:
        """Hold nothing of ``groups``, which are by vLLM's numbers."""
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

    # -- what vLLM does ----------------------------------------------------------------------------

    def changed(self, keys: Iterable[bytes], is_cached: Callable[[bytes], bool]) -> None:
        """Take in that ``keys`` may have come or gone."""
        for key in keys:
            if key in self._entries:
                if not is_cached(key):
                    self._forget(key)
            elif is_cached(key):
                self._note(key)

    def cleared(self) -> None:
        """Take in that nothing is cached any more."""
        for key in list(self._entries):
            self._forget(key)

    # -- what is told ------------------------------------------------------------------------------

    def changes(self) -> Changes:
        """Return what changed since the last call.

        What came and went since, or went and came, is not in it.
        """
        evicted, self._evicted = self._evicted, {}
        held, self._held = self._held, {}
        return Changes(_evicted(evicted), self._runs(held))

    # -- what is asked -----------------------------------------------------------------------------

    def keys(self, group: str) -> Mapping[bytes, tuple[bytes, ...]]:
        """vLLM's keys of what a group holds, by the hash of the tokens before."""
        return self._keys[group]

    def count(self) -> dict[str, int]:
        """How many hashes each group holds something of."""
        return {group: len(keys) for group, keys in self._keys.items()}

    # -- inside ------------------------------------------------------------------------------------

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
        others = tuple(one for one in keys[place.hash] if one != key)
        if others:
            keys[place.hash] = others
            return
        del keys[place.hash]
        self._turn(place, self._held, self._evicted)

    def _turn(self, place: _Place, was: dict[_Place, None], now: dict[_Place, None]) -> None:
        """Take back what was not told yet; else it is to be told."""
        if place in was:
            del was[place]
        else:
            now[place] = None

    def _runs(self, places: Iterable[_Place]) -> tuple[Held, ...]:
        groups = {group.name: group for group in self._groups.values()}
        found: list[Held] = []
        run: list[_Entry] = []
        for place in places:
            entry, group = (
                self._entries[self._keys[place.group][place.hash][0]],
                groups[place.group],
            )
            full = entry.token % group.block_tokens == 0
            follows = run and full and _follows(run[-1], entry, group)
            if run and not follows:
                found.append(_blocks(run))
                run = []
            if group.is_state or not full:
                found.append(Held(place.group, (place.hash,)))
            else:
                run.append(entry)
        if run:
            found.append(_blocks(run))
        return tuple(found)


def _follows(last: _Entry, entry: _Entry, group: Group) -> bool:
    return (
        last.place.group == entry.place.group
        and last.place.hash == entry.parent
        and last.token + group.block_tokens == entry.token
    )


def _blocks(run: list[_Entry]) -> Held:
    hashes = tuple(entry.place.hash for entry in run)
    return Held(run[0].place.group, hashes, run[0].parent)


def _evicted(places: Iterable[_Place]) -> tuple[Evicted, ...]:
    by_group: dict[str, list[bytes]] = {}
    for place in places:
        by_group.setdefault(place.group, []).append(place.hash)
    return tuple(Evicted(group, tuple(hashes)) for group, hashes in by_group.items())
