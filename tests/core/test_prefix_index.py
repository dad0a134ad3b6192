"""Laws of the index of prefixes: it finds what a plain book of the holdings has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from restow.broker.core.common.events import HashForm
from restow.broker.core.prefix import index as prefix_index
from restow.broker.core.prefix.index import (
    HASH_BYTES,
    HOLDER_BYTES,
    KEY_BYTES,
    SEGMENT_BYTES,
    HashKeys,
    Index,
    Keyer,
    Segment,
)
from restow.broker.core.prefix.prefixes import Holders
from restow.broker.layout.values import ModelIdentity

SLOTS = 3
KEYS = 12


def keys_of(*values: int) -> HashKeys:
    return HashKeys(list(values), np.array(values, "<u8").tobytes())


@dataclass
class Book:
    """An index, and the keys that each slot holds."""

    places: int
    index: Index = field(default_factory=Index)
    held: dict[int, set[int]] = field(
        default_factory=lambda: {slot: set() for slot in range(SLOTS)}
    )

    def hold(self, slot: int, keys: list[int], parent: int | None) -> None:
        self.index.hold(slot, keys_of(*keys), parent)
        self.held[slot].update(keys)

    def evict(self, slot: int, keys: list[int]) -> None:
        self.index.evict(slot, keys_of(*keys))
        self.held[slot].difference_update(keys)

    def forget(self, slot: int, segments: int) -> None:
        before = self.index.segments_of(slot)
        left = self.index.forget(slot, segments)
        assert left == self.index.segments_of(slot) == max(0, before - segments)
        kept = self.index.look(keys_of(*range(KEYS)), 0).get(slot, 0)
        self.held[slot] &= {key for key in range(KEYS) if kept >> key & 1}

    def drop_oldest(self) -> None:
        if self.index.empty:
            return
        before = sum(map(len, self.held.values()))
        segment = next(iter(self.index._segments.values()))
        dropped = set(segment.all_keys())
        for keys in self.held.values():
            keys -= dropped
        assert self.index.drop_oldest() == before - sum(map(len, self.held.values()))

    def look(self, keys: list[int], step: int) -> None:
        known = set().union(*self.held.values())
        ends = (at for at, key in enumerate(keys, 1) if key not in known and step and not at % step)
        count = next(ends, len(keys))
        wanted = {
            slot: sum(1 << at for at, key in enumerate(keys[:count]) if key in held)
            for slot, held in self.held.items()
        }
        found = self.index.look(keys_of(*keys), step)
        assert found == {slot: bits for slot, bits in wanted.items() if bits}

    def check(self) -> None:
        index, known = self.index, set().union(*self.held.values())
        assert len(index) == len(known)
        assert index.counts == {slot: len(keys) for slot, keys in self.held.items() if keys}
        assert index.empty == (not known)
        segments = index._segments.values()
        assert sorted(key for segment in segments for key in segment.all_keys()) == sorted(known)
        assert max(map(len, segments), default=0) <= self.places
        assert index.size_bytes == HASH_BYTES * len(known) + sum(
            SEGMENT_BYTES + KEY_BYTES * len(segment) + HOLDER_BYTES * len(segment.held)
            for segment in segments
        )


slots = st.integers(0, SLOTS - 1)
runs = st.builds(
    lambda first, count: list(range(first, min(first + count, KEYS))),
    st.integers(0, KEYS - 1),
    st.integers(1, KEYS),
) | st.lists(st.integers(0, KEYS - 1), max_size=KEYS)
steps = st.one_of(
    st.tuples(st.just(Book.hold), slots, runs, st.none() | st.integers(0, KEYS - 1)),
    st.tuples(st.just(Book.evict), slots, runs),
    st.tuples(st.just(Book.forget), slots, st.integers(0, 3)),
    st.tuples(st.just(Book.drop_oldest)),
    st.tuples(st.just(Book.look), runs, st.integers(0, 4)),
)


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from([2, 3, 5, 512]),
    st.sampled_from([1, 5, 4096]),
    st.lists(steps, max_size=12),
)
def test_the_index_finds_and_counts_what_each_slot_holds(
    places: int, window: int, history: list[tuple[Any, ...]]
) -> None:
    book = Book(places)
    with patch.multiple(prefix_index, MAX_PLACES=places, WINDOW=window):
        for act, *values in history:
            act(book, *values)
            book.check()
            book.look(list(range(KEYS)), 0)


def test_keys_differ_wherever_a_bit_of_their_hashes_differs() -> None:
    model = ModelIdentity("m", "v1")
    for secret in range(32):
        keyer = Keyer(b"%d" % secret)
        for words in (1, 4):
            bits = 64 * words
            plain = np.random.default_rng(secret).integers(0, 1 << 64, words, dtype=np.uint64)
            number = int.from_bytes(plain.tobytes(), "little")
            hashes = [number, *(number ^ 1 << bit for bit in range(bits))]
            raw = b"".join(one.to_bytes(bits // 8, "little") for one in hashes)
            keys = keyer.keys(model, HashForm("test", 4, bits // 8), "", raw)
            assert len(set(keys.values)) == bits + 1
            assert max(keys.values) < 1 << 60
            assert keys.raw == np.array(keys.values, "<u8").tobytes()


def test_a_search_ends_where_nobody_holds_a_key_that_every_state_needs() -> None:
    index = Index()
    for first, stop in ((1, 4), (8, 25)):  # places 3 to 6 are held by nobody
        index.hold(1, keys_of(*range(first, stop)))
    everything, beginning = (1 << 24) - 1 - (0b1111 << 3), 0b111
    for step, found in ((0, everything), (4, beginning), (7, beginning), (8, everything)):
        assert index.look(keys_of(*range(1, 25)), step) == {1: found}, step


def test_what_was_told_in_order_is_found_with_a_single_look() -> None:
    index, keys = Index(), keys_of(*range(1, 25))
    index.hold(1, keys)
    with patch.object(prefix_index, "MAX_LOOKS", 2):
        assert index.look(keys, 0) == {1: (1 << 24) - 1}
        index.hold(2, keys)
        assert index.look(keys, 0) == {}


def test_a_run_that_grows_stays_in_one_segment() -> None:
    index = Index()
    index.hold(1, keys_of(*range(1, 6)))
    index.hold(1, keys_of(6, 7), parent=5)
    index.hold(1, keys_of(*range(1, 11)))
    assert index.segments_of(1) == 1


def test_what_is_announced_again_is_not_the_oldest() -> None:
    index = Index()
    for slot, key in ((1, 1), (1, 2), (2, 1)):
        index.hold(slot, keys_of(key))
    index.drop_oldest()
    assert index.counts == {1: 1, 2: 1}
    assert index.look(keys_of(1, 2), 0) == {1: 1, 2: 1}


def test_a_blank_between_two_keys_takes_no_more_than_one_key() -> None:
    index = Index()
    index.hold(1, keys_of(*range(1, 6)))
    index.evict(1, keys_of(2, 4))
    index.hold(1, keys_of(11, 12), parent=1)
    assert index.look(keys_of(1, 11, 3, 5, 12), 0) == {1: 0b11111}


def test_keys_are_told_apart_wherever_their_bytes_stand() -> None:
    first, second = bytes(range(8)), bytes(range(8, 16))
    between = first[4:] + second[:4]
    segment = Segment(1, bytearray(first + second + between))
    assert [segment.place_of(key) for key in (first, second, between)] == [0, 1, 2]


def test_places_that_are_free_again_are_used_again() -> None:
    index = Index()
    index.hold(1, keys_of(*range(1, 11)))
    before_bytes = index.size_bytes
    index.evict(1, keys_of(*range(6, 11)))
    index.hold(1, keys_of(*range(21, 26)), parent=5)
    assert (index.size_bytes, index.segments_of(1)) == (before_bytes, 1)
    index.evict(1, keys_of(3, 4))
    index.hold(1, keys_of(31, 32, 33), parent=2)  # the third finds no place beside the others
    assert index.segments_of(1) == 2
    chain = keys_of(1, 2, 31, 32, 5, 21, 22, 23, 24, 25, 33)
    assert index.look(chain, 0) == {1: (1 << 11) - 1}
    assert index.counts == {1: 11}


def test_what_engines_held_that_left_is_cleared_step_by_step() -> None:
    holders = Holders()
    for slot in (1, 2):
        for segment in range(3):
            holders.index.hold(slot, keys_of(10 * slot + segment))
    holders.gone.extend((1, 2))
    assert holders.clear(2) == 0
    assert [holders.index.segments_of(slot) for slot in (1, 2)] == [1, 3]
    assert holders.clear(2) == 0
    assert [holders.index.segments_of(slot) for slot in (1, 2)] == [0, 2]
    assert holders.clear(5) == 3
    assert holders.index.empty
    assert not holders.gone


def test_room_is_made_of_what_left_and_nothing_of_it_stays_behind() -> None:
    holders = Holders()
    for key in range(20):  # a segment for each
        holders.index.hold(1, keys_of(key))
    holders.index.hold(2, keys_of(99))
    holders.gone.append(1)
    holders.keep_within(holders.index.size_bytes - 1)
    assert holders.index.counts[2] == 1
    assert not holders.forgotten
    assert holders.clear(100) > 0
    assert holders.index.counts == {2: 1}
