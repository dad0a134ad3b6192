"""What is reported of a cache, once and only while it is so, and what a store should keep."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from engines.chained import TOKENS, prompt
from restow.agents.engines.common.blocks import Group
from restow.agents.engines.common.chains import RequestChains
from restow.agents.engines.common.holdings import (
    MAX_STATES,
    CacheChanges,
    CacheHoldings,
    EvictedBlocks,
    HeldBlocks,
    StatesToKeep,
)
from restow.broker.client import Prefix, chain_of, content_of

GROUPS = {0: Group("full", 8), 1: Group("states", 16, scratch_blocks=0), 2: Group("more", 8)}
FULL, STATES, MORE = (group.to_bytes(4, "big") for group in GROUPS)


class Cache:
    """Keys that are cached, and who tells of them."""

    def __init__(self) -> None:
        self.chains = RequestChains(8)
        self.holdings = CacheHoldings(GROUPS, self.chains.named, self.chains.before)
        self.cached: set[bytes] = set()

    def has(self, *keys: bytes) -> None:
        """Cache these keys, and evict all others."""
        touched = self.cached ^ set(keys)
        self.cached = set(keys)
        self.holdings.changed(
            sorted(touched, key=[*keys, *touched].index), self.cached.__contains__
        )


def test_blocks_of_a_chain_are_told_as_one_run_and_evicted_by_their_hashes() -> None:
    cache, request = Cache(), prompt(TOKENS)
    cache.chains.begin("r", request)
    names = [content_of(TOKENS, end) for end in range(8, 41, 8)]
    own = request.block_hashes
    cache.has(*(one + FULL for one in own[:3]))
    assert cache.holdings.changes() == CacheChanges((), (HeldBlocks("full", tuple(names[:3])),))
    assert cache.holdings.changes() == CacheChanges()
    cache.has(*(one + FULL for one in own), own[1] + STATES, own[4] + STATES)
    assert cache.holdings.changes() == CacheChanges(
        (),
        (
            HeldBlocks("full", tuple(names[3:]), names[2]),
            HeldBlocks("states", (names[1],)),
            HeldBlocks("states", (names[4],)),
        ),
    )
    cache.has(*(one + FULL for one in own[:4]))
    changes = cache.holdings.changes()
    assert changes.held == ()
    assert {(one.group, frozenset(one.hashes)) for one in changes.evicted} == {
        ("full", frozenset(names[4:])),
        ("states", frozenset((names[1], names[4]))),
    }


def test_blocks_that_do_not_follow_each_other_are_told_apart() -> None:
    cache, request = Cache(), prompt(TOKENS)
    cache.chains.begin("r", request)
    names, own = [content_of(TOKENS, end) for end in range(8, 41, 8)], request.block_hashes
    cache.has(own[0] + FULL, own[2] + FULL, own[3] + MORE, own[4] + MORE)
    assert cache.holdings.changes().held == (
        HeldBlocks("full", (names[0],)),
        HeldBlocks("full", (names[2],), names[1]),
        HeldBlocks("more", (names[3], names[4]), names[2]),
    )


def test_a_key_that_neither_came_nor_went_changes_nothing() -> None:
    cache, request = Cache(), prompt(TOKENS)
    cache.chains.begin("r", request)
    key, other = (one + FULL for one in request.block_hashes[:2])
    cache.has(key)
    assert cache.holdings.changes().held
    unknown = (request.block_hashes[2] + bytes(3) + b"\7", b"unknown" + FULL)
    cache.cached |= {*unknown}
    cache.holdings.changed([key, other, *unknown], cache.cached.__contains__)
    assert cache.holdings.changes() == CacheChanges()


def test_a_block_that_is_filled_in_part_is_a_run_of_its_own() -> None:
    chains = RequestChains(8)
    holdings = CacheHoldings({0: Group("full", 16)}, chains.named, chains.before)
    request = prompt(TOKENS)
    chains.begin("r", request)
    keys = [request.block_hashes[at] + FULL for at in (1, 2)]
    holdings.changed(keys, set(keys).__contains__)
    assert holdings.changes().held == (
        HeldBlocks("full", (content_of(TOKENS, 16),)),
        HeldBlocks("full", (content_of(TOKENS, 24),)),
    )


def test_what_came_and_went_or_went_and_came_is_not_told() -> None:
    cache, request = Cache(), prompt(TOKENS)
    cache.chains.begin("r", request)
    key, other = (one + FULL for one in request.block_hashes[:2])
    cache.has(key)
    assert cache.holdings.changes() != CacheChanges()
    cache.has(key, other)
    cache.has()
    cache.has(key)
    assert cache.holdings.changes() == CacheChanges()


def test_all_that_is_cleared_is_evicted_and_may_come_again() -> None:
    cache, request = Cache(), prompt(TOKENS)
    cache.chains.begin("r", request)
    keys = [one + FULL for one in request.block_hashes]
    names = [content_of(TOKENS, end) for end in range(8, 41, 8)]
    cache.has(*keys)
    assert cache.holdings.changes().held == (HeldBlocks("full", tuple(names)),)
    cache.holdings.cleared()
    cache.cached.clear()
    assert not cache.holdings.keys("full")
    cache.has(*keys[:2])
    changes = cache.holdings.changes()
    assert changes.held == ()
    assert [(one.group, set(one.hashes)) for one in changes.evicted] == [("full", {*names[2:]})]


def test_a_place_with_two_keys_is_held_until_both_are_gone() -> None:
    # A place has two keys where an adapter's weights were loaded under two names.
    cache = Cache()
    one = prompt(TOKENS[:8], adapter="the same weights")
    other = replace(one, block_hashes=[b"another's name"])
    for number, request in enumerate((one, other)):
        cache.chains.begin(f"r{number}", request)
    name = content_of(TOKENS, 8, adapter="the same weights")
    keys = [request.block_hashes[0] + FULL for request in (one, other)]
    cache.has(keys[0])
    assert cache.holdings.changes().held == (HeldBlocks("full", (name,)),)
    cache.has(*keys)
    assert cache.holdings.changes() == CacheChanges()
    assert cache.holdings.keys("full") == {name: tuple(keys)}
    cache.has(keys[1])
    assert cache.holdings.changes() == CacheChanges()
    cache.has()
    assert cache.holdings.changes() == CacheChanges((EvictedBlocks("full", (name,)),))


@given(st.lists(st.frozensets(st.integers(0, 9)), max_size=8))
def test_changes_add_up_to_what_is_cached(histories: list[set[int]]) -> None:
    cache, request = Cache(), prompt(list(range(80)))
    cache.chains.begin("r", request)
    told: set[bytes] = set()
    for cached in histories:
        cache.has(*(request.block_hashes[index] + FULL for index in sorted(cached)))
        changes = cache.holdings.changes()
        gone = {name for one in changes.evicted for name in one.hashes}
        come = {name for one in changes.held for name in one.hashes}
        assert gone <= told
        assert not come & told
        told = told - gone | come
        assert told == {content_of(list(range(80)), 8 * index + 8) for index in cached}


def ended(first: int, tokens: int = 32) -> Prefix:
    return chain_of(range(first, first + tokens)).prefix(tokens)


def inside(first: int) -> Prefix:
    return chain_of(range(first, first + 40), ends_tokens=[40]).prefix(40)


def everything(_: Prefix) -> bool:
    return True


def test_the_newest_comes_first_and_a_store_hears_of_each_once() -> None:
    worth = StatesToKeep()
    states = [ended(0), inside(1), ended(2)]
    for one in states:
        worth.note(one)
    assert worth.take_new(everything) == states
    assert worth.newest() == states[::-1]
    worth.note(states[0])
    assert worth.take_new(everything) == []
    assert worth.newest() == [states[0], states[2], states[1]]


def test_what_is_evicted_is_forgotten() -> None:
    worth = StatesToKeep()
    first, second, third = ended(0), inside(1), ended(2)
    for one in (first, second, third):
        worth.note(one)
    assert worth.newest() == [], "nobody has looked whether they are held"
    assert worth.take_new(lambda one: one != third) == [first, second]
    worth.forget([second.end_hash, first.hashes[0]])  # the last hash names a state
    assert worth.newest() == [first]
    worth.note(second)
    assert worth.take_new(everything) == [second], "it was computed anew"


def test_a_state_that_two_requests_begin_with_is_worth_keeping() -> None:
    worth = StatesToKeep()
    shared, turn = ended(0), ended(1)
    for one in (shared, turn, shared):
        worth.begin(one)
    assert worth.take_new(everything) == [shared]
    worth.note(turn)
    worth.begin(shared)
    assert worth.take_new(everything) == [turn]
    assert worth.newest() == [shared, turn]


def test_a_state_that_was_not_held_has_to_be_used_twice_again() -> None:
    worth, state = StatesToKeep(), ended(0)
    worth.begin(state)
    worth.begin(state)
    assert worth.take_new(lambda _: False) == []
    worth.begin(state)
    assert worth.take_new(everything) == []
    worth.begin(state)
    assert worth.take_new(everything) == [state]


def test_no_more_are_known_than_so_many() -> None:
    worth = StatesToKeep()
    for number in range(MAX_STATES + 10):
        worth.note(ended(number))
        worth.begin(inside(number))
    worth.take_new(everything)
    assert len(worth.newest()) == MAX_STATES
    assert worth.newest()[-1] == ended(10)
    worth.begin(inside(0))
    assert worth.take_new(everything) == [], "the first one was too long ago"
