"""Index: which slots hold which prefix hashes, stored as 60-bit keys in segments."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import NamedTuple, Self

import numpy as np

from restow.broker.core.common.events import MAX_HASH_BYTES, HashForm
from restow.broker.layout.values import ModelIdentity

KEY_BYTES = 8
_SPARE_BITS = 4
"""Keys have 60 bits: Python's integers of this size take a third less memory than those of 64
bits."""


@dataclass(frozen=True, slots=True)
class HashKeys:
    """Keys of consecutive hashes, as integers and as 8 bytes each."""

    values: list[int]
    raw: bytes

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.values)

    def distinct(self) -> Self:
        """Return the keys without repetitions."""
        values = list(dict.fromkeys(self.values))
        if len(values) == len(self.values):
            return self
        return type(self)(values, np.array(values, "<u8").tobytes())


class Keyer:
    """Makes keys of hashes. Two hashes of a tenant collide by chance once in 2**60 pairs.

    After a collision a state may be found that nobody holds. It is requested by its hash, and the
    offer is declined.
    """

    def __init__(self, secret: bytes) -> None:
        """Begin with the broker's ``secret``, so that clients cannot choose hashes that collide."""
        self._secret = secret
        drawn = hashlib.blake2b(b"factors", key=secret, digest_size=MAX_HASH_BYTES).digest()
        self._factors = np.frombuffer(drawn, "<u8") | np.uint64(1)

    def keys(self, model: ModelIdentity, form: HashForm, salt: str, hashes: bytes) -> HashKeys:
        """Return the keys of ``hashes``; keys differ between models, forms and salts."""
        named = json.dumps([model.name, model.revision, model.adapter, model.quantisation])
        named += json.dumps([*form, salt])
        seed = hashlib.blake2b(named.encode(), key=self._secret, digest_size=KEY_BYTES).digest()
        words = np.frombuffer(hashes, "<u8").reshape(-1, form.hash_bytes // KEY_BYTES)
        mixed = words ^ (words >> np.uint64(31))
        mixed = mixed * self._factors[: words.shape[1]]
        mixed ^= mixed >> np.uint64(29)
        summed = mixed.sum(axis=1, dtype=np.uint64) + np.frombuffer(seed, "<u8")
        keys = (summed * self._factors[0]) >> np.uint64(_SPARE_BITS)
        return HashKeys(keys.tolist(), keys.astype("<u8").tobytes())


class Scope(NamedTuple):
    """What separates equal hashes: a segment's keys are all of one scope."""

    model: ModelIdentity
    """The model without its revision."""
    form: HashForm
    revision: str
    salt: str


MAX_PLACES = 512
BLANK = b"\xff" * KEY_BYTES
"""The bytes of a place that nobody holds; no key equals them."""


@dataclass(slots=True, eq=False)
class Segment:
    """A run of keys in consecutive places. A **slot** is a group of an engine.

    Engines announce, look up and drop mostly long runs of a chain. Segments make that cheap: only
    the first key of a run is looked up, and the holders of all its keys are bit sets.
    """

    number: int
    keys: bytearray = field(default_factory=bytearray)
    held: dict[int, int] = field(default_factory=dict)
    """For each slot that holds a key of this segment: a bit per place, the lowest for place 0."""
    scope: Scope | None = None
    """The scope of ``hashes``; None if there are none."""
    hashes: bytearray = field(default_factory=bytearray)
    """While somebody watches, the hash of each place; zeros where it was not told since."""

    def __len__(self) -> int:
        """Return the number of places."""
        return len(self.keys) // KEY_BYTES

    @property
    def anyone(self) -> int:
        """Return the places that any slot holds, as bits."""
        places = 0
        for bits in self.held.values():
            places |= bits
        return places

    def place_of(self, key: bytes) -> int:
        """Return the place of a key that is in this segment."""
        at = self.keys.find(key)
        while at % KEY_BYTES:
            at = self.keys.find(key, at + 1)
        return at // KEY_BYTES

    def common(self, place: int, raw: bytes, first: int) -> int:
        """Return how many keys from ``place`` on equal the keys of ``raw`` from ``first`` on."""
        at, raw_at = (place + 1) * KEY_BYTES, (first + 1) * KEY_BYTES
        if self.keys[at : at + KEY_BYTES] != raw[raw_at : raw_at + KEY_BYTES]:
            return 1  # keys that were announced singly: do not compare long slices
        mine = self.keys[place * KEY_BYTES :]
        theirs = raw[first * KEY_BYTES : first * KEY_BYTES + len(mine)]
        if mine == theirs:
            return len(mine) // KEY_BYTES
        least = min(len(mine), len(theirs))
        differ = int.from_bytes(mine[:least], "little") ^ int.from_bytes(theirs, "little")
        if not differ:
            return least // KEY_BYTES
        return ((differ & -differ).bit_length() - 1) // (8 * KEY_BYTES)

    def free_from(self, place: int) -> int:
        """Return how many places from ``place`` on are free: blank, or behind the end."""
        end = place
        while end < len(self) and self.keys[end * KEY_BYTES : (end + 1) * KEY_BYTES] == BLANK:
            end += 1
        return (MAX_PLACES if end == len(self) else end) - place

    def put(self, place: int, raw: bytes) -> int:
        """Store keys from ``place`` on; return how many places that adds."""
        before = len(self)
        self.keys[place * KEY_BYTES : place * KEY_BYTES + len(raw)] = raw
        return len(self) - before

    def blank(self, places: int) -> list[int]:
        """Free the places given as bits; return their keys."""
        freed = []
        while places:
            lowest = places & -places
            places ^= lowest
            at = (lowest.bit_length() - 1) * KEY_BYTES
            freed.append(int.from_bytes(self.keys[at : at + KEY_BYTES], "little"))
            self.keys[at : at + KEY_BYTES] = BLANK
        return freed

    def name(self, place: int, scope: Scope, hashes: bytes) -> int:
        """Store the hashes of keys from ``place`` on; return how many bytes that adds."""
        self.scope, before = scope, len(self.hashes)
        at = place * scope.form.hash_bytes
        self.hashes.extend(bytes(max(at - before, 0)))
        self.hashes[at : at + len(hashes)] = hashes
        return len(self.hashes) - before

    def hashes_at(self, places: int) -> bytes:
        """Return the known hashes at the places given as bits."""
        if self.scope is None:
            return b""
        rows = np.frombuffer(bytes(self.hashes), "u1").reshape(-1, self.scope.form.hash_bytes)
        count = max(len(rows), places.bit_length())
        bits = np.frombuffer(places.to_bytes((count + 7) // 8, "little"), "u1")
        chosen = rows[np.unpackbits(bits, count=len(rows), bitorder="little").astype(bool)]
        known: bytes = chosen[chosen.any(axis=1)].tobytes()
        return known

    def all_keys(self) -> list[int]:
        """Return all keys in this segment."""
        keys = np.frombuffer(self.keys, "<u8")
        stored: list[int] = keys[keys != np.frombuffer(BLANK, "<u8")].tolist()
        return stored


HASH_BYTES = 80
"""Per key: its integer and its place (measured by `bench --suite prefix-lookup`)."""
SEGMENT_BYTES = 400
"""Overhead of a segment beside its places."""
HOLDER_BYTES = 120
"""Per slot that holds any key of a segment."""
MAX_LOOKS = 1 << 16
"""Limit of stretches of a chain, and of slots in each, per query: a tenth of a second. A chain that
was announced in order has a stretch per `MAX_PLACES` keys."""
WINDOW = 1 << 12
"""Bits of an answer are collected in windows, because a long bit set would be copied per
stretch."""


class Index:
    """Segments in the order of use; the least recently used segment is dropped first."""

    def __init__(self) -> None:
        """Begin without holdings."""
        self._where: dict[int, int] = {}
        """The number of each key's segment."""
        self._segments: OrderedDict[int, Segment] = OrderedDict()
        self._numbers: dict[int, set[int]] = {}
        """For each slot, the segments of which it holds any key."""
        self.counts: dict[int, int] = {}
        """Number of keys that each slot holds."""
        self.size_bytes = 0
        self._last = 0

    def __len__(self) -> int:
        """Return the number of keys that any slot holds."""
        return len(self._where)

    @property
    def empty(self) -> bool:
        """Return whether there are no segments."""
        return not self._segments

    def hold(
        self,
        slot: int,
        keys: HashKeys,
        parent: int | None = None,
        named: tuple[Scope, bytes] | None = None,
    ) -> None:
        """Store that a slot holds ``keys``; ``parent`` is the key before them, if known.

        ``named`` has the hashes of the keys, which are then distinct, if somebody watches.
        """
        keys = keys.distinct()
        before: tuple[Segment, int] | None = None
        if parent is not None and (number := self._where.get(parent)) is not None:
            segment = self._segments[number]
            before = segment, segment.place_of(parent.to_bytes(KEY_BYTES, "little"))
        first = 0
        while first < len(keys):
            segment, place, count = self._place(keys, first, before)
            self._hold(segment, slot, place, count)
            if named is not None:
                scope, hashes = named
                hash_bytes = scope.form.hash_bytes
                run = hashes[first * hash_bytes : (first + count) * hash_bytes]
                self.size_bytes += segment.name(place, scope, run)
            before = segment, place + count - 1
            first += count

    def _place(
        self, keys: HashKeys, first: int, before: tuple[Segment, int] | None
    ) -> tuple[Segment, int, int]:
        """Return the segment and place of the key at ``first``, and how many keys match there.

        Keys that are not stored yet get places behind ``before``, or in a new segment.
        """
        number = self._where.get(keys.values[first])
        if number is not None:
            segment = self._segments[number]
            place = segment.place_of(keys.raw[first * KEY_BYTES : (first + 1) * KEY_BYTES])
            return segment, place, segment.common(place, keys.raw, first)
        place = room = 0
        if before is not None:
            segment, place = before[0], before[1] + 1
            room = segment.free_from(place)
        if not room:
            self._last += 1
            segment, place, room = Segment(self._last), 0, MAX_PLACES
            self._segments[self._last] = segment
            self.size_bytes += SEGMENT_BYTES
        stop = first + 1
        end = min(len(keys), first + room)
        while stop < end and keys.values[stop] not in self._where:
            stop += 1
        values = keys.values[first:stop]
        self._where.update(dict.fromkeys(values, segment.number))
        added = segment.put(place, keys.raw[first * KEY_BYTES : stop * KEY_BYTES])
        self.size_bytes += HASH_BYTES * len(values) + KEY_BYTES * added
        return segment, place, len(values)

    def _hold(self, segment: Segment, slot: int, place: int, count: int) -> None:
        before = segment.held.get(slot, 0)
        if not before:
            self.size_bytes += HOLDER_BYTES
            self._numbers.setdefault(slot, set()).add(segment.number)
        bits = before | ((1 << count) - 1) << place
        segment.held[slot] = bits
        self.counts[slot] = self.counts.get(slot, 0) + (bits ^ before).bit_count()
        self._segments.move_to_end(segment.number)

    def evict(self, slot: int, keys: HashKeys) -> None:
        """Store that a slot no longer holds ``keys``."""
        for _, segment, place, count in self._stretches(keys, 0):
            self._let_go(segment, slot, ((1 << count) - 1) << place)

    def look(self, keys: HashKeys, step: int) -> dict[int, int]:
        """Return for each slot which of ``keys`` it holds: a bit per key, the lowest for the first.

        The search ends at a key that nobody holds if its number is a multiple of ``step`` (a
        ``step`` of 0 never ends it), and after `MAX_LOOKS`.
        """
        by_slot: dict[int, dict[int, int]] = {}
        looks = 0
        for first, segment, place, count in self._stretches(keys, step):
            looks += 1 + len(segment.held)
            if looks > MAX_LOOKS:
                break
            mask, (window, at) = (1 << count) - 1, divmod(first, WINDOW)
            for slot, bits in segment.held.items():
                if some := bits >> place & mask:
                    windows = by_slot.setdefault(slot, {})
                    windows[window] = windows.get(window, 0) | some << at
            self._segments.move_to_end(segment.number)
        return {
            slot: reduce(or_, (bits << window * WINDOW for window, bits in windows.items()))
            for slot, windows in by_slot.items()
        }

    def _stretches(self, keys: HashKeys, step: int) -> Iterator[tuple[int, Segment, int, int]]:
        """Yield stored stretches of ``keys``: number of the first key, segment, place, length."""
        first, total, raw = 0, len(keys), keys.raw
        while first < total:
            number = self._where.get(keys.values[first])
            if number is None:
                first += 1
                if step and not first % step:
                    return
                continue
            segment = self._segments[number]
            place = segment.place_of(raw[first * KEY_BYTES : (first + 1) * KEY_BYTES])
            count = segment.common(place, raw, first)
            yield first, segment, place, count
            first += count

    def forget(self, slot: int, segments: int) -> int:
        """Drop a slot's holdings in at most ``segments``; return how many segments remain."""
        numbers = self._numbers.get(slot)
        while numbers and segments:
            segment = self._segments[next(iter(numbers))]
            self._let_go(segment, slot, segment.held[slot])
            segments -= 1
        return len(numbers or ())

    def segments_of(self, slot: int) -> int:
        """Return the number of segments of which a slot holds any key."""
        return len(self._numbers.get(slot, ()))

    def segments(self) -> list[Segment]:
        """Return all segments, the least recently used first."""
        return list(self._segments.values())

    @property
    def oldest(self) -> Segment:
        """Return the least recently used segment."""
        return next(iter(self._segments.values()))

    def drop_oldest(self) -> int:
        """Drop the least recently used segment; return the number of holdings lost."""
        segment = self.oldest
        lost = 0
        for slot, bits in list(segment.held.items()):
            lost += bits.bit_count()
            self._let_go(segment, slot, bits)
        return lost

    def _let_go(self, segment: Segment, slot: int, places: int) -> None:
        before = segment.held.get(slot, 0)
        places &= before
        if not places:
            return
        self.counts[slot] -= places.bit_count()
        if places == before:
            del segment.held[slot]
            self.size_bytes -= HOLDER_BYTES
            self._numbers[slot].discard(segment.number)
            if not self._numbers[slot]:
                del self._numbers[slot], self.counts[slot]
        else:
            segment.held[slot] = before ^ places
        if not segment.held:
            for key in (gone := segment.all_keys()):
                del self._where[key]
            del self._segments[segment.number]
            self.size_bytes -= SEGMENT_BYTES + HASH_BYTES * len(gone) + KEY_BYTES * len(segment)
            self.size_bytes -= len(segment.hashes)
            return
        freed = segment.blank(places & ~segment.anyone)
        for key in freed:
            del self._where[key]
        self.size_bytes -= HASH_BYTES * len(freed)
