"""A segment: hashes that follow each other in a chain, and who holds which of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from restow.broker.core.prefix.keys import KEY_BYTES

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
