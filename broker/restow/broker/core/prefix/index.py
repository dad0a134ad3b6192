"""The index of one tenant: which slot holds which keys, within a bound of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from functools import reduce
from operator import or_

from restow.broker.core.prefix.keys import KEY_BYTES, Keys
from restow.broker.core.prefix.segment import MAX_PLACES, Segment

HASH_BYTES = 80
"""Of a key: its integer, and where it is (`bench --suite prefixes` measures them)."""
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
