"""When reads are shared out over threads."""

from __future__ import annotations

from restow.agents.spreading import BUSY_READS, FIRST_PAUSE_READS, LAST_PAUSE_READS, Spreading

RAN, WAITED, SHORT = (0.010, 0.010), (0.005, 0.010), (0.0001, 0.001)
"""How long a share's thread ran, of how long."""


def pause_after(spreading: Spreading, *shares: tuple[float, float]) -> int:
    """How many reads are not shared out after one that is."""
    assert spreading.allows()
    for ran_s, elapsed_s in shares:
        spreading.saw(ran_s, elapsed_s)
    return pause(spreading)


def pause(spreading: Spreading) -> int:
    """How many reads are not shared out from now on; the state stays as it is."""
    left = spreading._left_reads
    for _ in range(left):
        assert not spreading.allows()
    return left


def test_a_read_that_waits_for_no_core_is_followed_by_others() -> None:
    spreading = Spreading()
    assert [pause_after(spreading, RAN, RAN) for _ in range(5)] == [0] * 5


def test_reads_that_wait_for_cores_are_tried_ever_more_rarely() -> None:
    spreading = Spreading()
    pauses = [pause_after(spreading, WAITED, RAN) for _ in range(8)]
    assert pauses == [0, FIRST_PAUSE_READS, 4, 8, 16, 32, LAST_PAUSE_READS, LAST_PAUSE_READS]
    assert pause_after(spreading, RAN, RAN) == 0
    assert [pause_after(spreading, WAITED, WAITED) for _ in range(2)] == [0, FIRST_PAUSE_READS]


def test_one_read_that_waited_changes_nothing() -> None:
    spreading = Spreading()
    assert BUSY_READS == 2
    assert [pause_after(spreading, WAITED, WAITED), pause_after(spreading, RAN, RAN)] == [0, 0]
    assert [pause_after(spreading, RAN, WAITED), pause_after(spreading, RAN, RAN)] == [0, 0]


def test_short_shares_tell_nothing() -> None:
    spreading = Spreading()
    assert [pause_after(spreading, SHORT, SHORT) for _ in range(5)] == [0] * 5
    pause_after(spreading, WAITED)
    assert pause_after(spreading, SHORT) == 0
    assert pause_after(spreading, WAITED) == FIRST_PAUSE_READS


def test_shares_of_reads_before_a_pause_do_not_lengthen_it() -> None:
    spreading = Spreading()
    pause_after(spreading, WAITED)
    assert spreading.allows()
    for _ in range(4):
        spreading.saw(*WAITED)
    assert pause(spreading) == FIRST_PAUSE_READS
