"""`Holdings` follows what vLLM's prefix cache has, and tells of it in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from restow.agents.engines.common.groups import Group
from restow.agents.engines.vllm.prefix.request_chains import Named
from restow.agents.engines.vllm.prefix.told import (
    Evicted,
    Held,
    HeldBlocks,
    HeldSnapshot,
    HeldTail,
    HoldingsBatch,
)

MAX_BATCH_HASHES = 4096

GROUP_BYTES = 4
"""vLLM's key of a cached block is a block hash, and the number of a group in so many bytes."""


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
        self._number = 0
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
        self._entries.clear()
        for keys in self._keys.values():
            keys.clear()
        self.tell_again()

    # -- what is told ------------------------------------------------------------------------------

    def tell_again(self) -> None:
        """Have the next batch be number 1, and tell everything from there on."""
        self._number = 0
        self._evicted.clear()
        self._held = {
            _Place(group, name): None for group, keys in self._keys.items() for name in keys
        }

    def batch(self, most_hashes: int = MAX_BATCH_HASHES) -> HoldingsBatch | None:
        """Return what is to be told next; None: all was told.

        What came and went since, or went and came, is not in it. The first one of all is there
        though nothing may be held: it says that the engine tells.
        """
        if self._number and not self._evicted and not self._held:
            return None
        self._number += 1
        gone = [self._evicted.popitem()[0] for _ in range(min(most_hashes, len(self._evicted)))]
        room = min(most_hashes - len(gone), len(self._held))
        come = [place for place, _ in zip(self._held, range(room), strict=False)]
        for place in come:
            del self._held[place]
        return HoldingsBatch(self._number, _evicted(gone), self._runs(come))

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
                found.append(_blocks(run, groups[run[0].place.group]))
                run = []
            if group.is_state:
                found.append(HeldSnapshot(place.group, entry.token, place.hash))
            elif not full:
                found.append(HeldTail(place.group, entry.token, place.hash))
            else:
                run.append(entry)
        if run:
            found.append(_blocks(run, groups[run[0].place.group]))
        return tuple(found)


def _follows(last: _Entry, entry: _Entry, group: Group) -> bool:
    return (
        last.place.group == entry.place.group
        and last.place.hash == entry.parent
        and last.token + group.block_tokens == entry.token
    )


def _blocks(run: list[_Entry], group: Group) -> HeldBlocks:
    first = run[0]
    return HeldBlocks(
        group.name,
        first.token // group.block_tokens - 1,
        first.parent,
        tuple(entry.place.hash for entry in run),
    )


def _evicted(places: Iterable[_Place]) -> tuple[Evicted, ...]:
    by_group: dict[str, list[bytes]] = {}
    for place in places:
        by_group.setdefault(place.group, []).append(place.hash)
    return tuple(Evicted(group, tuple(hashes)) for group, hashes in by_group.items())
