"""Keys: what stands for a hash in here, with all else that a prefix is known by."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Self

import numpy as np

from restow.broker.core.common.events import MAX_HASH_BYTES, HashForm
from restow.broker.layout.values import ModelIdentity

KEY_BYTES = 8
_SPARE_BITS = 4
"""Keys have 60 bits: Python's integers of so many take a third less than those of 64."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Those of hashes in a row, as integers and as 8 bytes each."""

    values: list[int]
    raw: bytes

    def __len__(self) -> int:
        """How many."""
        return len(self.values)

    def distinct(self) -> Self:
        """These without what came before among them."""
        values = list(dict.fromkeys(self.values))
        if len(values) == len(self.values):
            return self
        return type(self)(values, np.array(values, "<u8").tobytes())


class Keyer:
    """Makes keys. Two hashes of a tenant share one by chance, once in 2**60 pairs.

    Then a state may be found that is not held. It is asked for by its hash, and declined.
    """

    def __init__(self, secret: bytes) -> None:
        """``secret`` keeps others from choosing hashes that meet; it is that of one broker."""
        self._secret = secret
        drawn = hashlib.blake2b(b"factors", key=secret, digest_size=MAX_HASH_BYTES).digest()
        self._factors = np.frombuffer(drawn, "<u8") | np.uint64(1)

    def keys(self, model: ModelIdentity, form: HashForm, salt: str, hashes: bytes) -> Keys:
        """The keys of ``hashes``: other ones for another model, form or salt."""
        named = json.dumps([model.name, model.revision, model.adapter, model.quantisation])
        named += json.dumps([*form, salt])
        seed = hashlib.blake2b(named.encode(), key=self._secret, digest_size=KEY_BYTES).digest()
        words = np.frombuffer(hashes, "<u8").reshape(-1, form.hash_bytes // KEY_BYTES)
        mixed = words ^ (words >> np.uint64(31))
        mixed = mixed * self._factors[: words.shape[1]]
        mixed ^= mixed >> np.uint64(29)
        summed = mixed.sum(axis=1, dtype=np.uint64) + np.frombuffer(seed, "<u8")
        keys = (summed * self._factors[0]) >> np.uint64(_SPARE_BITS)
        return Keys(keys.tolist(), keys.astype("<u8").tobytes())


MAX_PLACES = 512
BLANK = b"\xff" * KEY_BYTES
"""Of a place that nobody holds: no key is like it."""


@dataclass(slots=True, eq=False)
class Segment:
    """Keys in their places. A **slot** is one group of one engine.

    Chains are mostly told, asked for and dropped in long runs, so that of a whole run the first
    key alone is looked up, and who holds what is bits.
    """

    number: int
    keys: bytearray = field(default_factory=bytearray)
    held: dict[int, int] = field(default_factory=dict)
    """Of each slot that holds any: a bit for each place, the lowest for the first."""

    def __len__(self) -> int:
        """How many places it has."""
        return len(self.keys) // KEY_BYTES

    @property
    def anyone(self) -> int:
        """The places that any slot holds."""
        found = 0
        for bits in self.held.values():
            found |= bits
        return found

    def place_of(self, key: bytes) -> int:
        """The place of a key that is here."""
        at = self.keys.find(key)
        while at % KEY_BYTES:
            at = self.keys.find(key, at + 1)
        return at // KEY_BYTES

    def common(self, place: int, raw: bytes, first: int) -> int:
        """How many keys from ``place`` on are those of ``raw`` from number ``first`` on."""
        at, other = (place + 1) * KEY_BYTES, (first + 1) * KEY_BYTES
        if self.keys[at : at + KEY_BYTES] != raw[other : other + KEY_BYTES]:
            return 1  # what was told by itself is compared at no greater length
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
        """How many places are free from ``place`` on: blank ones, or behind the end."""
        end = place
        while end < len(self) and self.keys[end * KEY_BYTES : (end + 1) * KEY_BYTES] == BLANK:
            end += 1
        return (MAX_PLACES if end == len(self) else end) - place

    def put(self, place: int, raw: bytes) -> int:
        """Have keys stand from ``place`` on; how many places that adds."""
        before = len(self)
        self.keys[place * KEY_BYTES : place * KEY_BYTES + len(raw)] = raw
        return len(self) - before

    def blank(self, places: int) -> list[int]:
        """Free places, given as bits; the keys that stood there."""
        freed = []
        while places:
            lowest = places & -places
            places ^= lowest
            at = (lowest.bit_length() - 1) * KEY_BYTES
            freed.append(int.from_bytes(self.keys[at : at + KEY_BYTES], "little"))
            self.keys[at : at + KEY_BYTES] = BLANK
        return freed

    def all_keys(self) -> list[int]:
        """The keys that are here."""
        keys = np.frombuffer(self.keys, "<u8")
        found: list[int] = keys[keys != np.frombuffer(BLANK, "<u8")].tolist()
        return found


HASH_BYTES = 80
"""Of a key: its integer, and where it is (`bench --suite prefix-lookup` measures them)."""
SEGMENT_BYTES = 400
"""Of a segment beside its places."""
HOLDER_BYTES = 120
"""Of a slot that holds any of a segment."""
MAX_LOOKS = 1 << 16
"""Stretches of a chain, and slots in each, that one question is answered from: a tenth of a second.
Chains that were told in their order have a stretch for each `MAX_PLACES`."""
WINDOW = 1 << 12
"""Bits of an answer that are put together first: a long one would be copied for each stretch."""


class Index:
    """Segments, the latest told or asked for last. Forgets those that were longest not."""

    def __init__(self) -> None:
        """Nobody holds anything."""
        self._where: dict[int, int] = {}
        """The number of the segment that a key is in."""
        self._segments: OrderedDict[int, Segment] = OrderedDict()
        self._numbers: dict[int, set[int]] = {}
        """Of each slot, the segments of which it holds any."""
        self.counts: dict[int, int] = {}
        """How many keys each slot holds."""
        self.size_bytes = 0
        self._last = 0

    def __len__(self) -> int:
        """How many keys anybody holds."""
        return len(self._where)

    @property
    def empty(self) -> bool:
        """Whether nothing is here."""
        return not self._segments

    def hold(self, slot: int, keys: Keys, parent: int | None = None) -> None:
        """A slot holds these. ``parent`` is the key before them in their chain; None: unknown."""
        keys = keys.distinct()
        before: tuple[Segment, int] | None = None
        if parent is not None and (number := self._where.get(parent)) is not None:
            segment = self._segments[number]
            before = segment, segment.place_of(parent.to_bytes(KEY_BYTES, "little"))
        first = 0
        while first < len(keys):
            segment, place, count = self._place(keys, first, before)
            self._hold(segment, slot, place, count)
            before = segment, place + count - 1
            first += count

    def _place(
        self, keys: Keys, first: int, before: tuple[Segment, int] | None
    ) -> tuple[Segment, int, int]:
        """Where keys from ``first`` on are, made if they were not here, and how many in a row."""
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

    def evict(self, slot: int, keys: Keys) -> None:
        """A slot holds these no longer, if it did."""
        for _, segment, place, count in self._stretches(keys, 0):
            self._let_go(segment, slot, ((1 << count) - 1) << place)

    def look(self, keys: Keys, step: int) -> dict[int, int]:
        """Which slots hold which of ``keys``: of each a bit for each key, the lowest for the first.

        Not beyond a key that nobody holds and whose place is a multiple of ``step``; 0: whatever is
        not held. Nor beyond `MAX_LOOKS`.
        """
        found: dict[int, dict[int, int]] = {}
        looks = 0
        for first, segment, place, count in self._stretches(keys, step):
            looks += 1 + len(segment.held)
            if looks > MAX_LOOKS:
                break
            ones, (window, at) = (1 << count) - 1, divmod(first, WINDOW)
            for slot, bits in segment.held.items():
                if some := bits >> place & ones:
                    windows = found.setdefault(slot, {})
                    windows[window] = windows.get(window, 0) | some << at
            self._segments.move_to_end(segment.number)
        return {
            slot: reduce(or_, (bits << window * WINDOW for window, bits in windows.items()))
            for slot, windows in found.items()
        }

    def _stretches(self, keys: Keys, step: int) -> Iterator[tuple[int, Segment, int, int]]:
        """What is here of ``keys``: number of the first, segment, place and how many in a row."""
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
        """A slot holds nothing any more: forget it in so many ``segments``; how many are left."""
        numbers = self._numbers.get(slot)
        while numbers and segments:
            segment = self._segments[next(iter(numbers))]
            self._let_go(segment, slot, segment.held[slot])
            segments -= 1
        return len(numbers or ())

    def segments_of(self, slot: int) -> int:
        """Of how many segments a slot holds any."""
        return len(self._numbers.get(slot, ()))

    def drop_oldest(self) -> int:
        """Forget what was longest neither told nor asked for; how many holdings that were."""
        _, segment = next(iter(self._segments.items()))
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
            return
        freed = segment.blank(places & ~segment.anyone)
        for key in freed:
            del self._where[key]
        self.size_bytes -= HASH_BYTES * len(freed)
