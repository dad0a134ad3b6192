"""A hostile party in the midst of good engines, over many calls and streams."""

from __future__ import annotations

from hypothesis.stateful import run_state_machine_as_test

from fuzzing.house import quiet
from fuzzing.machine import HostileParty
from fuzzing.rounds import tried

RUNS = 60


def test_a_hostile_party() -> None:
    with quiet():
        run_state_machine_as_test(HostileParty, settings=tried(RUNS))
