"""Which states an engine would have kept when it leaves: what is held, the newest first."""

from __future__ import annotations

from restow.agents.engines.vllm.prefix.worth_keeping import MOST_STATES, WorthKeeping
from restow.broker.client import Prefix, chain_of


def ended(first: int, tokens: int = 32) -> Prefix:
    return chain_of(range(first, first + tokens)).prefix(tokens)


def inside(first: int) -> Prefix:
    return chain_of(range(first, first + 40), ends_tokens=[40]).prefix(40)


def everything(_: Prefix) -> bool:
    return True


def test_the_newest_comes_first_and_a_store_hears_of_each_once() -> None:
    worth = WorthKeeping()
    states = [ended(0), inside(1), ended(2)]
    for one in states:
        worth.note(one)
    assert worth.take_new(everything) == states
    assert worth.newest() == states[::-1]
    worth.note(states[0])
    assert worth.take_new(everything) == []
    assert worth.newest() == [states[0], states[2], states[1]]


def test_what_is_evicted_is_forgotten() -> None:
    worth = WorthKeeping()
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
    worth = WorthKeeping()
    shared, turn = ended(0), ended(1)
    for one in (shared, turn, shared):
        worth.begin(one)
    assert worth.take_new(everything) == [shared]
    worth.note(turn)
    worth.begin(shared)
    assert worth.take_new(everything) == [turn]
    assert worth.newest() == [shared, turn]


def test_no_more_are_known_than_so_many() -> None:
    worth = WorthKeeping()
    for number in range(MOST_STATES + 10):
        worth.note(ended(number))
        worth.begin(inside(number))
    worth.take_new(everything)
    assert len(worth.newest()) == MOST_STATES
    assert worth.newest()[-1] == ended(10)
    worth.begin(inside(0))
    assert worth.take_new(everything) == [], "the first one was too long ago"
