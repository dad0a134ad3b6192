"""What a store keeps, against a plain model of it: random histories with pins and evictions."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from random import Random

import pytest

from restow.agents.store.kept import (
    SAMPLE,
    Candidate,
    Kept,
    Pinned,
    Recomputing,
    Worth,
    least_recently_used,
    recomputing_cost,
)
from restow.agents.store.room import (
    PAGE_ALIGN_BYTES,
    PageMove,
    PieceGroup,
    PieceKey,
    Room,
    RoomTooSmallError,
    Shape,
    StateKey,
    page_strides,
)
from restow.broker.client import HashForm, Prefix, chain_of
from restow.broker.errors import ChainFormError, ChainInvalidError

BLOCK = 4
SHAPES = {
    "hybrid": Shape(
        (PieceGroup("tokens", BLOCK), PieceGroup("snapshots", 0)),
        {"tokens": 3000, "snapshots": 40_000},
    ),
    "attention": Shape((PieceGroup("tokens", BLOCK),), {"tokens": 3000}),
    "recurrent": Shape((PieceGroup("snapshots", 0),), {"snapshots": 5000}),
    "windows": Shape(
        (PieceGroup("tokens", BLOCK), PieceGroup("tokens.6", BLOCK, 6)),
        {"tokens": 3000, "tokens.6": 9000},
    ),
}


def prefix_of(
    tokens: list[int], position_tokens: int, quantum_tokens: int = BLOCK, salt: str = ""
) -> Prefix:
    ends = [position_tokens] if position_tokens % quantum_tokens else []
    chain = replace(chain_of(tokens, quantum_tokens, ends_tokens=ends), salt=salt)
    return chain.prefix(position_tokens)


class Store:
    """The memory of a store: what each page holds, by the words of its piece."""

    def __init__(self, shape: Shape, size_bytes: int, worth: Worth) -> None:
        room = Room(shape.page_bytes, size_bytes)
        self.kept = Kept(shape, room, worth, Recomputing(1.0, 0.01), self._note)
        self.worth = worth
        self.told: set[PieceKey] = set()
        self.memory: dict[tuple[str, int], PieceKey] = {}
        self.read: list[Pinned] = []
        self.written: list[Pinned] = []

    def _note(self, key: PieceKey, there: bool) -> None:
        assert (key in self.told) != there, "it is told twice"
        self.told ^= {key}

    def reserve(self, prefix: Prefix, now_s: float) -> bool:
        states = self.kept._states
        before = {name: state.used_s for name, state in states.by_key.items()}
        reserved = self.kept.reserve(prefix, now_s)
        if reserved is None:
            return False
        if self.worth is least_recently_used:
            left = [before[name] for name in states.by_key if not self.kept._pinned(name)]
            gone = [used_s for name, used_s in before.items() if name not in states.by_key]
            assert max(gone, default=-1.0) <= min(left, default=now_s), "a newer one was evicted"
        self._move(reserved.moves)
        pinned = reserved.pinned
        busy = self.pages_in_use()
        for key, page in pinned.new.items():
            assert page != 0
            assert (key.group, page) not in busy, "a page is written while it is read or written"
        self.written.append(pinned)
        return True

    def _move(self, moves: tuple[PageMove, ...]) -> None:
        busy = self.pages_in_use()
        for move in moves:
            assert (move.group, move.source) not in busy, "a pinned page is moved"
            if (move.group, move.source) in self.memory:
                self.memory[move.group, move.target] = self.memory[move.group, move.source]

    def pages_in_use(self) -> set[tuple[str, int]]:
        found = set()
        for pinned in (*self.read, *self.written):
            for group, pages in pinned.blocks.items():
                found |= {(group, page) for page in pages if page}
        return found

    def commit(self, pinned: Pinned, now_s: float) -> None:
        for key, page in pinned.new.items():
            self.memory[key.group, page] = key
        self.written.remove(pinned)
        self.check(pinned)
        name, states = StateKey.of(pinned.prefix), self.kept._states
        is_new = name not in states.by_key
        self.kept.commit(pinned, now_s)
        if is_new and name in states.by_key:
            assert states.base_tokens(name) == self.nearest(name)

    def pin(self, prefix: Prefix, now_s: float) -> bool:
        pinned = self.kept.pin(prefix, now_s)
        if pinned is None:
            return False
        self.read.append(pinned)
        self.check(pinned)
        return True

    def check(self, pinned: Pinned) -> None:
        listed = self.kept.shape.pieces(pinned.prefix)
        for group, pages in pinned.blocks.items():
            for page, key in zip(pages, listed[group], strict=True):
                assert (page == 0) == (key is None)
                assert key is None or self.memory[group, page] == key, "the page has other content"

    def nearest(self, name: StateKey) -> int:
        """Return the position of the nearest state that begins as this one does."""
        by_key = self.kept._states.by_key
        state = by_key[name]
        for end in (*reversed(state.block_hashes), b""):
            found = [
                other.position_tokens
                for key, other in by_key.items()
                if key != name and key[::2] == name[::2]
                if (other.block_hashes or (b"",))[-1] == end
                if other.position_tokens < state.position_tokens
            ]
            if found:
                return max(found)
        return 0

    def check_bases(self) -> None:
        """Check the nearest states before all states, of which some are evicted by now."""
        states = self.kept._states
        for name, state in states.by_key.items():
            base = states.by_key.get(state.base) if state.base else None
            expected = base.position_tokens if base else self.nearest(name) if state.base else 0
            assert states.base_tokens(name) == expected

    def check_bytes(self) -> None:
        """Check that pages in use share no byte, and count what is free and what is a state's."""
        states, room = self.kept._states, self.kept.room
        used = [(key.group, piece.page) for key, piece in states.pieces.items()]
        writing = [(key.group, page) for one in self.written for key, page in one.new.items()]
        assert self.kept._writing == set(writing), "other pages than these may not be moved"
        used += writing
        assert all(page < room.page_counts[group] for group, page in used)
        spans = [(page * room.strides[group], room.strides[group]) for group, page in used]
        end = room.slab_bytes  # in front of it no page may lie
        for begin, size_bytes in sorted(spans):
            assert begin >= end, "two pages share a byte"
            end = begin + size_bytes
        assert end <= room.size_bytes
        assert room.free_bytes == room.usable_bytes - sum(size for _, size in spans)
        users = Counter(key for state in states.by_key.values() for key in set(state.pieces))
        for state in states.by_key.values():
            own = {key for key in state.pieces if users[key] == 1}
            assert state.own_bytes == sum(states.pieces[key].size_bytes for key in own)
        assert all(states._at.values()), "a place without states is kept"


def prompts(random: Random, count: int) -> list[Prefix]:
    """Return prefixes of a tree: prompts that begin with those before them, and then differ."""
    texts = [[random.randrange(9)] * random.randrange(1, 9) for _ in range(3)]
    for _ in range(count):
        begin = random.choice(texts)
        texts.append([*begin, *(random.randrange(9) for _ in range(random.randrange(1, 9)))][:60])
    return [
        prefix_of(text, len(text), random.choice((1, 2)), random.choice(("", "salt")))
        for text in texts
    ]


@pytest.mark.parametrize("worth", [least_recently_used, recomputing_cost])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(6))
def test_no_page_is_ever_of_two(name: str, seed: int, worth: Worth) -> None:
    random, shape = Random(seed), SHAPES[name]  # noqa: S311
    store = Store(shape, 700_000 if name == "hybrid" else 100_000, worth)
    some = prompts(random, 60)
    for now_s in range(1500):
        match random.randrange(6):
            case 0 | 1 if len(store.written) < 3:
                store.reserve(random.choice(some), now_s)
            case 2 if len(store.read) < 3:
                store.pin(random.choice(some), now_s)
            case 3 if store.read:
                pinned = store.read.pop(random.randrange(len(store.read)))
                store.check(pinned)
                store.kept.give_up(pinned)
            case 4 if store.written:
                store.commit(random.choice(store.written), now_s)
            case 5 if store.written and random.random() < 0.3:
                store.kept.give_up(store.written.pop())
        store.check_bytes()
        if not now_s % 50:
            store.check_bases()
    for pinned in (*store.read, *store.written):
        store.kept.give_up(pinned)
    assert store.kept.evictions > 0
    store.kept.forget_revision("")
    assert not store.told
    assert store.kept.room.free_bytes == store.kept.room.usable_bytes, "pages are lost"


def small(name: str, size_bytes: int = 700_000) -> Kept:
    shape = SHAPES[name]
    room = Room(shape.page_bytes, size_bytes)
    return Kept(shape, room, least_recently_used, Recomputing())


def keep(kept: Kept, tokens: list[int], now_s: float = 0.0) -> Pinned:
    reserved = kept.reserve(prefix_of(tokens, len(tokens)), now_s)
    assert reserved is not None
    kept.commit(reserved.pinned, now_s)
    return reserved.pinned


def test_states_that_begin_alike_share_blocks_and_only_the_rest_is_moved() -> None:
    kept = small("hybrid")
    first = keep(kept, [1] * 10)
    second = keep(kept, [1] * 10 + [2] * 3)
    assert first.held_tokens == 0
    assert second.held_tokens == 8
    assert second.blocks["tokens"][:2] == first.blocks["tokens"][:2]
    assert len(second.new) == 3  # two blocks, for the first one's third is not whole; a snapshot


def test_of_a_window_that_has_moved_on_the_old_blocks_do_not_hold() -> None:
    kept = small("windows")
    keep(kept, [1] * 20)
    longer = keep(kept, [1] * 28)  # of blocks 5, 6 none is here; and block 5 begins at token 20
    assert longer.held_tokens == 20
    assert longer.blocks["tokens.6"][:5] == [0] * 5
    shorter = keep(kept, [1] * 12)  # its window's blocks were never here
    assert shorter.held_tokens == 4


def test_attention_alone_is_found_at_any_block() -> None:
    kept = small("attention")
    keep(kept, [1] * 20)
    assert kept.holds(prefix_of([1] * 20, 12))
    assert not kept.holds(prefix_of([1] * 20, 11))


def test_a_snapshot_stands_at_its_position_alone() -> None:
    kept = small("hybrid")
    keep(kept, [1] * 20)
    assert not kept.holds(prefix_of([1] * 20, 12))


def test_what_is_too_large_is_refused_and_evicts_nothing() -> None:
    kept = small("hybrid", 200_000)
    keep(kept, [1] * 8)
    assert kept.reserve(prefix_of([2] * 400, 400), 1.0) is None
    assert kept.holds(prefix_of([1] * 8, 8))


def test_what_is_pinned_is_not_evicted() -> None:
    kept = small("hybrid", 200_000)
    keep(kept, [1] * 8)
    pinned = kept.pin(prefix_of([1] * 8, 8), 1.0)
    assert pinned is not None
    for number in range(2, 9):
        keep(kept, [number] * 8, float(number))
    assert kept.holds(pinned.prefix)
    kept.give_up(pinned)
    for number in range(2, 9):
        keep(kept, [number] * 8, 10.0 + number)
    assert not kept.holds(pinned.prefix)


def test_a_use_is_counted_for_the_state_that_was_used_last() -> None:
    kept = small("attention")
    for tokens in (12, 16):
        keep(kept, [1] * tokens, tokens)
    states = [kept._states.by_key[StateKey.of(prefix_of([1] * n, n))] for n in (12, 16)]
    for tokens, now_s in ((12, 20.0), (8, 30.0), (16, 40.0), (8, 50.0)):
        pinned = kept.pin(prefix_of([1] * 16, tokens), now_s)
        assert pinned is not None
        kept.give_up(pinned)
    assert kept.pin(prefix_of([2] * 16, 16), 60.0) is None
    assert kept.pin_quietly(prefix_of([1] * 16, 16)) is not None
    assert [(state.uses, state.used_s) for state in states] == [(2, 30.0), (2, 50.0)]


def test_of_many_states_one_is_evicted_that_is_not_pinned() -> None:
    kept = small("recurrent", (SAMPLE + 11) * 8192)
    pinned = [kept.pin(keep(kept, [number]).prefix, 1.0) for number in range(SAMPLE + 10)]
    for number in (SAMPLE + 9, 3, 40):
        free = pinned[number]
        assert free is not None
        kept.give_up(free)
        assert kept.reserve(prefix_of([1000 + number], 1), 2.0) is not None
        assert not kept.holds(free.prefix)
        assert kept.reserve(prefix_of([2000 + number], 1), 2.0) is None
    assert kept.evictions == 3


def test_what_is_dear_for_its_size_and_used_often_and_lately_is_worth_more() -> None:
    for state, worth in (
        (Candidate(cost=4.0, freed_bytes=1, uses=0, age_s=0.0), 2.0),
        (Candidate(cost=4.0, freed_bytes=0, uses=0, age_s=0.0), 2.0),
        (Candidate(cost=4.0, freed_bytes=4, uses=0, age_s=0.0), 1.0),
        (Candidate(cost=4.0, freed_bytes=1, uses=3, age_s=0.0), 4.0),
        (Candidate(cost=4.0, freed_bytes=1, uses=0, age_s=1.0), 1.0),
    ):
        assert recomputing_cost(state) == worth
        assert least_recently_used(state) == -state.age_s


def test_states_that_cost_more_a_byte_stay() -> None:
    shape = SHAPES["hybrid"]
    kept = Kept(shape, Room(shape.page_bytes, 300_000), recomputing_cost, Recomputing(1.0, 1.0))
    keep(kept, [9] * 50)
    for number in range(1, 20):
        keep(kept, [number + 10] * 5, float(number) / 100)
    assert kept.holds(prefix_of([9] * 50, 50))


def test_a_room_has_a_slab_for_each_group_and_an_unused_one() -> None:
    page_bytes = {"tokens": 4000, "snapshots": 50_000}
    least = 3 * max(page_strides(page_bytes).values())
    assert Room(page_bytes, least).can_take({"tokens": 1, "snapshots": 1})
    with pytest.raises(RoomTooSmallError, match=f"tokens, snapshots .* take {least} bytes"):
        Room(page_bytes, least - 1)


def test_a_block_is_named_at_its_end_whatever_lies_between_hashes() -> None:
    shape = SHAPES["hybrid"]
    tokens = list(range(30))
    for quantum_tokens in (1, 2, BLOCK):
        prefix = prefix_of(tokens, 14, quantum_tokens)
        shape.check(prefix)
        at = [prefix_of(tokens, stop, 1).hashes[-1] for stop in (4, 8, 12, 14)]
        assert shape.pieces(prefix) == {
            "tokens": [PieceKey("tokens", "", one) for one in at],
            "snapshots": [PieceKey("snapshots", "", at[-1])],
        }


@pytest.mark.parametrize("quantum_tokens", [3, 8])
def test_blocks_that_end_between_hashes_are_refused(quantum_tokens: int) -> None:
    with pytest.raises(ChainFormError, match="does not divide the store's blocks of 4"):
        SHAPES["hybrid"].check(prefix_of([1] * 24, 24, quantum_tokens))


def test_what_names_no_tokens_is_refused() -> None:
    form = HashForm("any", 4, 8)
    one = b"x" * 8
    for position, hashes, end in (
        (0, (), b""),
        (7, (one,), b""),
        (8, (one,), b""),
        (8, (one, one), one),
        (4, (one, one), b""),
    ):
        with pytest.raises(ChainInvalidError, match="do not name"):
            SHAPES["hybrid"].check(Prefix(form, position, hashes, end))


def test_states_of_another_salt_are_others() -> None:
    kept = small("hybrid")
    keep(kept, [1] * 10)
    reserved = kept.reserve(prefix_of([1] * 10, 10, salt="other"), 0.0)
    assert reserved is not None
    assert reserved.pinned.held_tokens == 0
    assert not kept.holds(prefix_of([1] * 10, 8, salt="other"))


def test_states_of_another_revision_are_others_and_are_dropped_alone() -> None:
    kept = small("hybrid")
    keep(kept, [1] * 10)
    old = prefix_of([1] * 10, 10)
    new = replace(old, revision="v2")
    reserved = kept.reserve(new, 0.0)
    assert reserved is not None
    assert reserved.pinned.held_tokens == 0
    kept.commit(reserved.pinned, 0.0)
    pinned = kept.pin(new, 0.0)
    assert pinned is not None
    kept.forget_revision("v2")
    assert len(kept) == 1
    assert kept.holds(new)  # its pages stay while they are read
    kept.give_up(pinned)
    assert (kept.holds(new), kept.holds(old)) == (False, True)


def test_pages_lie_where_files_can_be_read_directly() -> None:
    room = Room({"a": 10, "b": 5000, "c": 70_000}, 1 << 20)
    assert all(stride % PAGE_ALIGN_BYTES == 0 for stride in room.strides.values())
    taken: dict[str, set[int]] = defaultdict(set)
    for group, stride in room.strides.items():
        for page in room.take(group, 3):
            taken[group] |= set(range(page * stride, (page + 1) * stride))
    apart = sum(len(some) for some in taken.values())
    assert len(set().union(*taken.values())) == apart


@pytest.mark.parametrize("fuller", [0, 1])
def test_the_slab_with_the_fewest_pages_is_made_free(fuller: int) -> None:
    room = Room({"small": PAGE_ALIGN_BYTES, "large": 4 * PAGE_ALIGN_BYTES}, 48 * PAGE_ALIGN_BYTES)
    slabs = [room.take("small", 4) for _ in range(2)]
    room.give("small", slabs[fuller][0])
    for page in slabs[1 - fuller][:3]:
        room.give("small", page)
    (move,) = room.gather({})
    assert (move.source, move.target) == (slabs[1 - fuller][3], slabs[fuller][0])


def test_a_state_that_is_named_in_two_ways_leaves_no_pages_behind() -> None:
    # Only a liar names a state in two ways, for a hash is of all tokens before it.
    store = Store(SHAPES["attention"], 40 * PAGE_ALIGN_BYTES, least_recently_used)
    right = prefix_of(list(range(12)), 12)
    wrong = replace(right, hashes=(b"\1" * 32, b"\2" * 32, right.hashes[2]))
    for now_s, prefix in enumerate((right, wrong)):
        assert store.reserve(prefix, now_s)
        store.commit(store.written[0], now_s)
    store.kept.forget_revision("")
    assert not store.told
    assert store.kept.room.free_bytes == store.kept.room.usable_bytes


def scattered() -> tuple[Kept, list[Prefix]]:
    """Return a store in which a large page fits only if small pages move, and its states."""
    size_bytes = PAGE_ALIGN_BYTES
    groups = (PieceGroup("small", BLOCK), PieceGroup("large", 0))
    shape = Shape(groups, {"small": size_bytes, "large": 4 * size_bytes})
    room = Room(shape.page_bytes, 22 * 4 * size_bytes)
    kept = Kept(shape, room, least_recently_used, Recomputing())
    states = []
    for number in range(12):
        state = replace(prefix_of([number] * 12, 12), revision="old" if number % 2 else "")
        reserved = kept.reserve(state, 0.0)
        assert reserved is not None
        kept.commit(reserved.pinned, 0.0)
        states.append(state)
    kept.forget_revision("old")
    for number in range(20, 26):
        keep(kept, [number] * 4, 1.0)
    return kept, states[::2]


def test_free_pages_that_lie_apart_are_brought_together_before_anything_is_evicted() -> None:
    kept, _ = scattered()
    reserved = kept.reserve(prefix_of([30] * 4, 4), 2.0)
    assert reserved is not None
    assert [move.group for move in reserved.moves] == ["small"]
    assert kept.evictions == 0


def test_pages_that_are_read_or_written_stay_in_place() -> None:
    kept, states = scattered()
    pinned = [kept.pin(state, 1.0) for state in states]
    reserved = kept.reserve(prefix_of([30] * 4, 4), 2.0)
    assert reserved is not None
    assert (reserved.moves, kept.evictions) == ((), 1)
    for read in pinned:
        assert read is not None
        kept.give_up(read)
    kept.commit(reserved.pinned, 2.0)


def test_the_tokens_that_are_held_end_with_the_state() -> None:
    kept = small("hybrid")
    keep(kept, [1] * 16)
    assert keep(kept, [1] * 8).held_tokens == 8  # its snapshot alone is missing
