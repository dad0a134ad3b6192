"""Broker, agents and engines as they are, over a simulated network, clock and NIXL."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from restow.broker.core.common.pair import DigestMode, Digests
from restow.broker.state_commands import Verb
from simulation_harness.history import Report
from simulation_harness.main import histories
from simulation_harness.misplaced import MISPLACED
from simulation_harness.mutations import MUTATIONS

pytestmark = pytest.mark.sampled

HISTORIES = int(os.environ.get("RESTOW_SIMULATED", "100"))
UNTIL_CAUGHT = 1000


def all_reports(count: int, *, faults: bool = True) -> dict[int, Report]:
    """Return the reports of the first ``count`` seeds, by seed."""
    return {one.seed: one for played in histories(0, count, faults=faults) for one in played}


def test_no_promise_is_broken() -> None:
    found = all_reports(HISTORIES)
    broken = [f"seed {seed}: {one.violation}" for seed, one in found.items() if one.violation]
    assert not broken, "./run simulate --seed N replays one"
    assert sum(one.ended["D DONE"] for one in found.values()) > 3 * HISTORIES
    assert sum(len(one.faults) for one in found.values()) > HISTORIES
    struck = {fault.split()[1] for one in found.values() for fault in one.faults}
    assert {"replace_worker", "restart_alike"} <= struck
    # While every promise is kept, no page changes between the two digests.
    assert sum(one.checks.checked for one in found.values()) > HISTORIES / 4
    assert not any(one.checks.mismatches for one in found.values())
    # States are found by their content; and some that are found are not held any more.
    offers = sum((one.offers for one in found.values()), Counter[str]())
    assert offers["made"] > HISTORIES
    assert offers["not held"] > HISTORIES / 100
    # Commands about states are carried out, and some of them can't be.
    commands = sum((one.commands for one in found.values()), Counter[str]())
    assert all(commands[f"{verb} DONE"] > HISTORIES / 20 for verb in Verb), commands
    assert commands["prefetch MISSING NOT_HELD"] > HISTORIES / 20
    assert commands["COMMAND_CONFLICT"] > HISTORIES / 100


def test_without_faults_nothing_is_lost() -> None:
    found = all_reports(50, faults=False)
    assert not any(one.violation or one.faults for one in found.values())
    ends = {end for one in found.values() for end in one.ended}
    assert not {end for end in ends if "LOST" in end or "MISSING" in end}


def test_a_seed_replays() -> None:
    assert all_reports(50) == all_reports(50)


@pytest.mark.parametrize("mutation", sorted(MUTATIONS.keys() - MISPLACED.keys()))
def test_a_missing_promise_is_found(mutation: str) -> None:
    for reports in histories(0, UNTIL_CAUGHT, mutation):
        if any(one.violation for one in reports):
            return
    pytest.fail(f"{UNTIL_CAUGHT} histories without {mutation}: nothing was found")


@pytest.mark.parametrize("fault", MISPLACED)
def test_bytes_in_the_wrong_place_are_seen_at_d(fault: str) -> None:
    # D itself must find the fault, and not another promise that breaks with it.
    reports = [one for played in histories(0, 25, fault, faults=False) for one in played]
    seen = "where nothing was to arrive" if fault == "tail" else "is DONE with"
    broken = [one.violation for one in reports if one.violation]
    assert len(broken) > 20
    assert not [violation for violation in broken if seen not in violation]


def test_what_the_wire_spoils_is_found_by_digests() -> None:
    found = [
        one
        for reports in histories(0, 100, "wire", digests=Digests(DigestMode.ALL))
        for one in reports
    ]
    assert not [f"seed {one.seed}: {one.violation}" for one in found if one.violation]
    assert sum(one.checks.mismatches for one in found) > 20
    assert sum(one.checks.checked - one.checks.mismatches for one in found) > 100
