"""What a store keeps, against a plain model of it: random histories with pins and evictions."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from random import Random

import pytest

from restow.agents.store.kept import REMEMBERED, Kept, KeptState, Pinned
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

    def __init__(self, shape: Shape, size_bytes: int) -> None:
        room = Room(shape.page_bytes, size_bytes)
        self.kept = Kept(shape, room, self._note)
        self._evict = self.kept._states.evict
        self.kept._states.evict = self.evict  # type: ignore[method-assign]
        self.told: set[PieceKey] = set()
        self.memory: dict[tuple[str, int], PieceKey] = {}
        self.read: list[Pinned] = []
        self.written: list[Pinned] = []

    def _note(self, key: PieceKey, there: bool) -> None:
        assert (key in self.told) != there, "it is told twice"
        self.told ^= {key}

    def reserve(self, prefix: Prefix) -> bool:
        reserved = self.kept.reserve(prefix)
        if reserved is None:
            return False
        self._move(reserved.moves)
        pinned = reserved.pinned
        busy = self.pages_in_use()
        for key, page in pinned.new.items():
            assert page != 0
            assert (key.group, page) not in busy, "a page is written while it is read or written"
        self.written.append(pinned)
        return True

    def evict(self, state: KeptState) -> None:
        """Check that the victim is the least valuable state that can go, and see what goes."""
        kept = self.kept
        if not kept.shape.by_block:
            self._evict(state)
            return
        assert kept.worth(state) == min(
            kept.worth(state)
            for state in kept._states.by_key.values()
            if not kept._pieces[state.pieces[-1]].pins
        )
        pieces = [*state.pieces]
        self._evict(state)
        assert kept.lacks(pieces) == pieces[-1:], "other pieces than the last one are gone"

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

    def commit(self, pinned: Pinned) -> None:
        for key, page in pinned.new.items():
            self.memory[key.group, page] = key
        self.written.remove(pinned)
        self.check(pinned)
        name, states = StateKey.of(pinned.prefix), self.kept._states
        is_new = name not in states.by_key
        self.kept.commit(pinned)
        if is_new and not self.kept.shape.by_block:
            assert states.base_tokens(states.by_key[name]) == self.nearest(states.by_key[name])

    def pin(self, prefix: Prefix) -> bool:
        pinned = self.kept.pin(prefix)
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

    def nearest(self, state: KeptState) -> int:
        """Return the position of the nearest state that begins as this one does."""
        for end in (*reversed(state.block_hashes), b""):
            found = [
                other.position_tokens
                for other in self.kept._states.by_key.values()
                if other.last_block == state.name._replace(hash=end)
                if other.position_tokens < state.position_tokens
            ]
            if found:
                return max(found)
        return 0

    def check_bases(self) -> None:
        """Check the nearest states before all states, of which some are evicted by now."""
        states = self.kept._states
        for state in states.by_key.values():
            base = state.base
            if base is not None and base not in states.by_key.values():
                assert states.base_tokens(state) == self.nearest(state)
            else:
                assert states.base_tokens(state) == (base.position_tokens if base else 0)

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
        assert all(name == state.name for name, state in states.by_key.items())
        assert len(self.kept._evicted) <= REMEMBERED * (len(states.pieces) + 1)


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


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(12))
def test_no_page_is_ever_of_two(name: str, seed: int) -> None:
    random, shape = Random(seed), SHAPES[name]  # noqa: S311
    store = Store(shape, 700_000 if name == "hybrid" else 100_000)
    some = prompts(random, 60)
    for step in range(1500):
        match random.randrange(6):
            case 0 | 1 if len(store.written) < 3:
                store.reserve(random.choice(some))
            case 2 if len(store.read) < 3:
                store.pin(random.choice(some))
            case 3 if store.read:
                pinned = store.read.pop(random.randrange(len(store.read)))
                store.check(pinned)
                store.kept.give_up(pinned)
            case 4 if store.written:
                store.commit(random.choice(store.written))
            case 5 if store.written and random.random() < 0.3:
                store.kept.give_up(store.written.pop())
        store.check_bytes()
        if not step % 50:
            store.check_bases()
    for pinned in (*store.read, *store.written):
        store.kept.give_up(pinned)
    assert store.kept.evictions > 0
    store.kept.forget_revision("")
    assert not store.told
    assert store.kept.room.free_bytes == store.kept.room.usable_bytes, "pages are lost"


def small(name: str, size_bytes: int = 700_000) -> Kept:
    shape = SHAPES[name]
    return Kept(shape, Room(shape.page_bytes, size_bytes))


def keep(kept: Kept, tokens: list[int], marked: bool = False) -> Pinned:
    reserved = kept.reserve(replace(prefix_of(tokens, len(tokens)), marked=marked))
    assert reserved is not None
    kept.commit(reserved.pinned)
    return reserved.pinned


def use(kept: Kept, tokens: list[int]) -> None:
    pinned = kept.pin(prefix_of(tokens, len(tokens)))
    assert pinned is not None
    kept.give_up(pinned)


def uses(kept: Kept, tokens: list[int]) -> list[float]:
    """Return the uses of each piece of a state."""
    pieces = kept.shape.pieces(prefix_of(tokens, len(tokens))).values()
    return [kept._pieces[key].uses for keys in pieces for key in keys if key]


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
    assert kept.reserve(prefix_of([2] * 400, 400)) is None
    assert kept.holds(prefix_of([1] * 8, 8))


def test_what_is_pinned_is_not_evicted() -> None:
    kept = small("hybrid", 200_000)
    keep(kept, [1] * 8)
    pinned = kept.pin(prefix_of([1] * 8, 8))
    assert pinned is not None
    for number in range(2, 20):
        keep(kept, [number] * 8)
    assert kept.holds(pinned.prefix)
    kept.give_up(pinned)
    for number in range(20, 40):
        keep(kept, [number] * 8)
    assert not kept.holds(pinned.prefix)


def test_of_many_states_only_one_that_is_not_pinned_is_evicted() -> None:
    kept = small("recurrent", 75 * 8192)
    pinned = [kept.pin(keep(kept, [number]).prefix) for number in range(74)]
    for number in (73, 3, 40):
        free = pinned[number]
        assert free is not None
        kept.give_up(free)
        assert kept.reserve(prefix_of([1000 + number], 1)) is not None
        assert not kept.holds(free.prefix)
        assert kept.reserve(prefix_of([2000 + number], 1)) is None
    assert kept.evictions == 3


def test_a_use_is_counted_for_each_piece_that_was_wanted() -> None:
    kept = small("attention")
    keep(kept, [1] * 16)
    use(kept, [1] * 12)
    use(kept, [1] * 8)
    assert kept.pin(prefix_of([2] * 16, 16)) is None
    assert kept.pin_quietly(prefix_of([1] * 16, 16)) is not None
    assert uses(kept, [1] * 16) == [2, 2, 1, 0]


def test_states_that_save_more_tokens_a_byte_stay_longer() -> None:
    kept = small("hybrid", 300_000)
    keep(kept, [9] * 50)
    for number in range(10, 18):
        keep(kept, [number] * 5)
    assert kept.evictions > 3
    assert kept.holds(prefix_of([9] * 50, 50))


def test_a_state_is_worth_the_tokens_that_it_saves_for_each_byte() -> None:
    kept = small("hybrid", 300_000)
    keep(kept, [9] * 50)
    (state,) = kept._states.by_key.values()
    assert kept.worth(state) == 50 / sum(kept.room.strides[key.group] for key in state.pieces)
    keep(kept, [9] * 60)  # the first state's whole blocks are part of the second
    assert kept.worth(state) > 50 / (kept.room.usable_bytes - kept.room.free_bytes)


def test_a_marked_state_is_evicted_after_states_that_are_as_useful() -> None:
    kept = small("recurrent", 5 * 8192)
    keep(kept, [1], marked=True)
    for later in range(2, 12):
        keep(kept, [later])
    assert kept.holds(prefix_of([1], 1))
    assert not kept.holds(prefix_of([2], 1))


def test_a_state_of_many_uses_stays_until_the_clock_has_passed_it() -> None:
    kept = small("recurrent", 5 * 8192)
    keep(kept, [1])
    for _ in range(5):
        use(kept, [1])
    later = 0
    while kept.holds(prefix_of([1], 1)):
        later += 1
        keep(kept, [1 + later])
    assert 5 * 3 < later < 5 * 6


def test_attention_alone_loses_its_last_blocks_and_stays_useful_up_to_there() -> None:
    kept = small("attention", 12 * PAGE_ALIGN_BYTES)
    keep(kept, [1] * 30)
    assert kept.pin(prefix_of([1] * 30, 12)) is not None
    keep(kept, [2] * 22)  # three blocks are free, and three of the first state go
    assert kept.evictions == 3
    assert kept.holds(prefix_of([1] * 30, 20))
    assert not kept.holds(prefix_of([1] * 30, 24))
    assert kept.reserve(prefix_of([3] * 24, 24)) is not None
    assert kept.holds(prefix_of([1] * 30, 12))
    assert not kept.holds(prefix_of([1] * 30, 16))


def test_of_a_state_the_blocks_that_another_one_shares_stay() -> None:
    kept = small("attention", 11 * PAGE_ALIGN_BYTES)
    keep(kept, [1] * 24)
    keep(kept, [1] * 12 + [2] * 12)
    use(kept, [1] * 12 + [2] * 12)
    keep(kept, [3] * 16)
    assert kept.evictions == 3
    assert kept.holds(prefix_of([1] * 12 + [2] * 12, 24))
    assert not kept.holds(prefix_of([1] * 24, 16))
    assert len(kept) == 2


def returned(other_uses: int) -> float:
    """Evict a state and keep it again; return its uses. Another state has ``other_uses``."""
    kept = small("recurrent", 3 * 8192)
    for tokens in (1, 2, 3):
        keep(kept, [tokens])
    assert not kept.holds(prefix_of([1], 1))
    for _ in range(other_uses):
        use(kept, [3])
    keep(kept, [1])
    assert uses(kept, [3]) == [other_uses]
    return uses(kept, [1])[0]


def test_a_return_after_an_eviction_counts_as_more_uses_if_pieces_often_return() -> None:
    assert returned(other_uses=0) > 5 * returned(other_uses=50) > 0


def test_uses_of_long_ago_do_not_make_returns_count_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("restow.agents.store.kept.RECENT_USES", 100)
    assert returned(other_uses=1000) > returned(other_uses=100) / 4


@pytest.mark.parametrize(("name", "blocks"), [("attention", 119), ("windows", 108)])
@pytest.mark.parametrize("seed", range(5))
def test_states_with_false_hashes_can_all_be_evicted(name: str, blocks: int, seed: int) -> None:
    random, kept = Random(seed), small(name, 120 * PAGE_ALIGN_BYTES)  # noqa: S311
    whole = prefix_of([9] * blocks * BLOCK, blocks * BLOCK)
    hashes = whole.hashes[:5]
    for _ in range(100):
        some = tuple(random.sample(hashes, random.randrange(2, 5)))
        reserved = kept.reserve(Prefix(whole.form, BLOCK * len(some), some))
        if reserved is not None:
            kept.commit(reserved.pinned)
    assert kept.reserve(replace(whole, salt="other")) is not None


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


@pytest.mark.parametrize(("position_tokens", "end"), [(8, b""), (7, b"x" * 8)])
def test_a_chain_with_a_hash_twice_is_refused(position_tokens: int, end: bytes) -> None:
    """Check that no state has a piece twice, of which one page would be lost."""
    hashes = (b"x" * 8,) * (position_tokens // 4)
    with pytest.raises(ChainInvalidError, match="has a hash twice"):
        SHAPES["hybrid"].check(Prefix(HashForm("any", 4, 8), position_tokens, hashes, end))


def test_states_of_another_salt_are_others() -> None:
    kept = small("hybrid")
    keep(kept, [1] * 10)
    reserved = kept.reserve(prefix_of([1] * 10, 10, salt="other"))
    assert reserved is not None
    assert reserved.pinned.held_tokens == 0
    assert not kept.holds(prefix_of([1] * 10, 8, salt="other"))


def test_states_of_another_revision_are_others_and_are_dropped_alone() -> None:
    kept = small("hybrid")
    keep(kept, [1] * 10)
    old = prefix_of([1] * 10, 10)
    new = replace(old, revision="v2")
    reserved = kept.reserve(new)
    assert reserved is not None
    assert reserved.pinned.held_tokens == 0
    kept.commit(reserved.pinned)
    pinned = kept.pin(new)
    assert pinned is not None
    kept.forget_revision("v2")
    assert len(kept) == 1
    assert kept.holds(new)  # its pages stay while they are read
    kept.give_up(pinned)
    assert (kept.holds(new), kept.holds(old)) == (False, True)


@pytest.mark.parametrize("name", SHAPES)
def test_a_state_that_is_dropped_while_it_is_read_stays_if_it_is_wanted(name: str) -> None:
    kept = small(name)
    keep(kept, [1] * 10)
    state = prefix_of([1] * 10, 10)
    for wanted in (True, False):
        pinned = kept.pin(state)
        assert pinned is not None
        kept.evict(state)
        if wanted:
            kept.use(state)
            kept.use(state)
        kept.give_up(pinned)
        assert (kept.holds(state), len(kept)) == (wanted, wanted)


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
    store = Store(SHAPES["attention"], 40 * PAGE_ALIGN_BYTES)
    right = prefix_of(list(range(12)), 12)
    wrong = replace(right, hashes=(b"\1" * 32, b"\2" * 32, right.hashes[2]))
    for prefix in (right, wrong):
        assert store.reserve(prefix)
        store.commit(store.written[0])
    store.kept.forget_revision("")
    assert not store.told
    assert store.kept.room.free_bytes == store.kept.room.usable_bytes


def scattered() -> tuple[Kept, list[Prefix]]:
    """Return a store in which a large page fits only if small pages move, and its states."""
    size_bytes = PAGE_ALIGN_BYTES
    groups = (PieceGroup("small", BLOCK), PieceGroup("large", 0))
    shape = Shape(groups, {"small": size_bytes, "large": 4 * size_bytes})
    kept = Kept(shape, Room(shape.page_bytes, 22 * 4 * size_bytes))
    states = []
    for number in range(12):
        state = replace(prefix_of([number] * 12, 12), revision="old" if number % 2 else "")
        reserved = kept.reserve(state)
        assert reserved is not None
        kept.commit(reserved.pinned)
        states.append(state)
    kept.forget_revision("old")
    for number in range(20, 26):
        keep(kept, [number] * 4)
    return kept, states[::2]


def test_free_pages_that_lie_apart_are_brought_together_before_anything_is_evicted() -> None:
    kept, _ = scattered()
    reserved = kept.reserve(prefix_of([30] * 4, 4))
    assert reserved is not None
    assert [move.group for move in reserved.moves] == ["small"]
    assert kept.evictions == 0


def test_pages_that_are_read_or_written_stay_in_place() -> None:
    kept, states = scattered()
    pinned = [kept.pin(state) for state in states]
    reserved = kept.reserve(prefix_of([30] * 4, 4))
    assert reserved is not None
    assert (reserved.moves, kept.evictions) == ((), 1)
    for read in pinned:
        assert read is not None
        kept.give_up(read)
    kept.commit(reserved.pinned)


def test_the_tokens_that_are_held_end_with_the_state() -> None:
    kept = small("hybrid")
    keep(kept, [1] * 16)
    assert keep(kept, [1] * 8).held_tokens == 8  # its snapshot alone is missing
