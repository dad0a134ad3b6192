"""What waits to be asked for: the oldest first, each once, and no more than there is room for."""

from __future__ import annotations

from restow.agents.store.requests import Waiting
from restow.broker.client import HashForm, Prefix

FORM = HashForm("any", 1, 8)


def prefix(number: int, hashes: int = 1) -> Prefix:
    named = [b"%08d" % (1000 * number + one) for one in range(hashes)]
    return Prefix(FORM, hashes, tuple(named))


def test_who_came_first_is_first_and_each_is_there_once() -> None:
    waiting = Waiting()
    for number in (1, 2, 1, 3, 2):
        waiting.add(prefix(number))
    assert len(waiting) == 3
    assert [waiting.take() for _ in range(4)] == [prefix(1), prefix(2), prefix(3), None]


def test_of_too_many_the_oldest_are_dropped_and_long_ones_count_more() -> None:
    waiting = Waiting(max_hashes=20)
    for number in range(12):
        waiting.add(prefix(number))
    assert (len(waiting), waiting.dropped) == (10, 2)
    waiting.add(prefix(20, hashes=15))
    assert (len(waiting), waiting.dropped) == (3, 10)
    assert [waiting.take() for _ in range(3)] == [prefix(10), prefix(11), prefix(20, 15)]
    waiting.add(prefix(21, hashes=40))  # more than there is room for
    waiting.add(prefix(22))
    assert (waiting.take(), waiting.dropped) == (prefix(22), 11)
