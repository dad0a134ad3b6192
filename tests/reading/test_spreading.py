"""When reads are shared out over threads."""

from __future__ import annotations

import pytest

from restow.agents.reading.same_host import (
    BUSY_READS,
    FIRST_PAUSE_READS,
    LAST_PAUSE_READS,
    Spreading,
)

GAINED, WAITED, SHORT = (0.018, 0.010), (0.010, 0.010), (0.0001, 0.001)
"""How long the threads of a read ran together, and how long it took."""


def pause_after(spreading: Spreading, read: tuple[float, float]) -> int:
    """How many reads are not shared out after one that is."""
    assert spreading.allows()
    spreading.saw(*read)
    return pause(spreading)


def pause(spreading: Spreading) -> int:
    """How many reads are not shared out from now on; the state stays as it is."""
    left = spreading._left_reads
    for _ in range(left):
        assert not spreading.allows()
    return left


def test_a_read_that_gains_is_followed_by_others() -> None:
    spreading = Spreading()
    assert [pause_after(spreading, GAINED) for _ in range(5)] == [0] * 5


@pytest.mark.parametrize("read", [(0.0304, 0.0238), (0.032, 0.0278)])
def test_one_thread_may_wait_for_a_while_if_both_together_gain(read: tuple[float, float]) -> None:
    """Of two shares one ran for 14 of 16 ms, the other for 16 of 24: one thread had taken 30."""
    spreading = Spreading()
    assert [pause_after(spreading, read) for _ in range(5)] == [0] * 5


def test_reads_that_gain_nothing_are_tried_ever_more_rarely() -> None:
    spreading = Spreading()
    pauses = [pause_after(spreading, WAITED) for _ in range(8)]
    assert pauses == [0, FIRST_PAUSE_READS, 4, 8, 16, 32, LAST_PAUSE_READS, LAST_PAUSE_READS]
    assert pause_after(spreading, GAINED) == 0
    assert [pause_after(spreading, WAITED) for _ in range(2)] == [0, FIRST_PAUSE_READS]


def test_one_read_that_waited_changes_nothing() -> None:
    spreading = Spreading()
    assert BUSY_READS == 2
    pauses = [pause_after(spreading, read) for read in (WAITED, GAINED, WAITED, GAINED)]
    assert pauses == [0] * 4


def test_short_reads_tell_nothing() -> None:
    spreading = Spreading()
    assert [pause_after(spreading, SHORT) for _ in range(5)] == [0] * 5
    pause_after(spreading, WAITED)
    assert pause_after(spreading, SHORT) == 0
    assert pause_after(spreading, WAITED) == FIRST_PAUSE_READS


def test_reads_from_before_a_pause_do_not_lengthen_it() -> None:
    spreading = Spreading()
    pause_after(spreading, WAITED)
    assert spreading.allows()
    for _ in range(4):
        spreading.saw(*WAITED)
    assert pause(spreading) == FIRST_PAUSE_READS
