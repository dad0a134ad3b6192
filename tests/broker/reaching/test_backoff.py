"""How long is waited before another try."""

from __future__ import annotations

import pytest

from restow.broker.client.connection.brokers import (
    FIRST_S,
    HELD_S,
    JITTER,
    LAST_S,
    LONGEST_S,
    Backoff,
)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def waits(
    backoff: Backoff, clock: Clock, tries: int, takes_s: float, works_s: float
) -> list[float]:
    """Return the waits after tries that take ``takes_s`` each, and then work for ``works_s``."""
    found = []
    for _ in range(tries):
        clock.now_s += takes_s
        if works_s:
            backoff.began()
            clock.now_s += works_s
        found.append(backoff.wait_s())
        clock.now_s += found[-1]
    return found


@pytest.mark.parametrize("takes_s", [0.0, 60.0])
def test_waits_double_while_nothing_works_however_long_a_try_takes(takes_s: float) -> None:
    clock = Clock()
    backoff = Backoff(clock)
    for number, wait_s in enumerate(waits(backoff, clock, 20, takes_s, 0.0)):
        middle_s = min(FIRST_S * 2**number, LAST_S)
        assert (1 - JITTER) * middle_s <= wait_s <= (1 + JITTER) * middle_s <= LONGEST_S


def test_a_wire_that_breaks_every_second_or_so_is_used_between() -> None:
    clock = Clock()
    backoff = Backoff(clock)
    waits(backoff, clock, 20, 0.0, 0.0)
    assert max(waits(backoff, clock, 20, 0.0, 1.01 * HELD_S)) <= FIRST_S * (1 + JITTER)


def test_who_is_let_in_and_thrown_out_again_comes_less_and_less_often() -> None:
    clock = Clock()
    found = waits(Backoff(clock), clock, 20, 0.0, HELD_S / 2)
    assert min(found[10:]) >= LAST_S * (1 - JITTER)
