"""Several brokers over a model of etcd, whatever goes wrong: no pool has two owners at once."""

from __future__ import annotations

import os

import pytest

from owners_simulation.mutations import MUTATIONS
from owners_simulation.world import Report, World

HISTORIES = int(os.environ.get("RESTOW_SIMULATED", "300")) // 3
UNTIL_CAUGHT = 1000
LONGEST_S = 1.0
"""In simulated time: for which a pool may be nobody's when brokers come and go in peace."""

AFTER_FAULTS_S = 7.0
"""The same once all is well again: leases have to end, and what was late may come still."""


def reports(count: int, *, faults: bool = True) -> list[Report]:
    return [World(seed, faults=faults).run() for seed in range(count)]


def test_no_pool_has_two_owners_and_all_are_owned_when_it_is_calm() -> None:
    found = reports(HISTORIES)
    broken = [f"seed {one.seed}: {one.violation} {one.faults}" for one in found if one.violation]
    assert not broken
    assert sum(one.granted for one in found) > 300 * HISTORIES
    assert sum(one.refused for one in found) > HISTORIES
    assert max(one.longest_without_s for one in found) < AFTER_FAULTS_S
    assert {fault.split()[1] for one in found for fault in one.faults} == {
        kind.__name__ for kind in World(0).kinds
    }


def test_brokers_that_come_and_go_leave_no_pool_alone_for_long() -> None:
    found = reports(HISTORIES // 3, faults=False)
    assert not [one for one in found if one.violation]
    assert {fault.split()[1] for one in found for fault in one.faults} == {"join", "leave"}
    assert max(one.longest_without_s for one in found) < LONGEST_S


def test_a_seed_replays() -> None:
    assert reports(5) == reports(5)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_missing_law_is_found(mutation: str) -> None:
    for seed in range(UNTIL_CAUGHT):
        world = World(seed)
        with MUTATIONS[mutation](world):
            if world.run().violation:
                return
    pytest.fail(f"{UNTIL_CAUGHT} histories without {mutation}: nothing was found")
