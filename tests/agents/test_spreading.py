"""Reads are shared out while there are cores for it, and tried again where there were none."""

from __future__ import annotations

from restow.agents.spreading import FIRST_PAUSE_READS, Spreading


def pause_after(spreading: Spreading, ran_s: float, elapsed_s: float) -> int:
    """How many reads go unshared after one that was."""
    spreading.saw(ran_s, elapsed_s)
    reads = 0
    while not spreading.allows():
        reads += 1
    return reads


def test_threads_that_run_all_the_time_go_on() -> None:
    spreading = Spreading()
    assert spreading.allows()
    assert pause_after(spreading, 0.009, 0.010) == 0


def test_threads_that_wait_for_cores_pause_ever_longer() -> None:
    spreading = Spreading()
    pauses = [pause_after(spreading, 0.005, 0.010) for _ in range(7)]
    assert pauses == [2, 4, 8, 16, 32, 64, 64]
    assert pause_after(spreading, 0.010, 0.010) == 0
    assert pause_after(spreading, 0.005, 0.010) == FIRST_PAUSE_READS


def test_a_short_share_tells_nothing() -> None:
    spreading = Spreading()
    assert pause_after(spreading, 0.0001, 0.001) == 0


def test_all_shares_of_a_read_count_once() -> None:
    spreading = Spreading()
    spreading.saw(0.005, 0.010)
    spreading.saw(0.010, 0.010)
    assert pause_after(spreading, 0.001, 0.010) == FIRST_PAUSE_READS
