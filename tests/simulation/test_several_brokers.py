"""Several brokers over a model of etcd, with the engines and agents that hang on them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from simulation_harness.history import History, Report
from simulation_harness.main import histories
from simulation_harness.several.etcd import HOST
from simulation_harness.several.faults import FleetFaults

HISTORIES = int(os.environ.get("RESTOW_SIMULATED", "300")) // 4
AT_S, BACK_S = 8.0, 45.0
"""When a fault strikes, and when it is over: later than D's patience."""


def all_reports(
    count: int, *, faults: bool = True, prepare: Callable[[History], object]
) -> list[Report]:
    played = histories(0, count, faults=faults, prepare=prepare)
    return [one for reports in played for one in reports]


def befalls(fault: Callable[[History], None], history: History) -> None:
    """Let the fault happen to a history of several brokers, and nothing else."""
    history.be_several()
    history.unhindered.looks = True
    history.loop.call_later(AT_S, fault, history)


def cut_off(history: History) -> None:
    """Cut the leader off from etcd alone; it reaches all others."""
    if (life := history.brokers.leader) is not None:
        history.network.cut(life.process.host, HOST)
        history.loop.call_later(BACK_S, history.network.heal, life.process.host, HOST)


def one_leaves(history: History) -> None:
    if (life := history.brokers.leader) is not None:
        history.brokers.leave(life)


def two_join(history: History) -> None:
    for address in history.brokers.missing()[:2]:
        history.brokers.start(address)


def test_no_promise_is_broken_and_nothing_fails_without_need() -> None:
    found = all_reports(HISTORIES, prepare=History.be_several)
    broken = [f"seed {one.seed}: {one.violation}" for one in found if one.violation]
    assert not broken, "./run simulate --several --seed N replays one"
    assert sum(one.acts for one in found) > 40 * HISTORIES
    struck = {fault.split()[1] for one in found for fault in one.faults}
    of_brokers = {name for name in struck if not name.startswith("store_")}
    assert of_brokers == {kind.__name__ for kind in FleetFaults(History(0)).kinds}
    ends = sum((one.unhindered for one in found), Counter[str]())
    assert ends["DONE"] > 3 * HISTORIES


@pytest.mark.parametrize("fault", [cut_off, one_leaves, two_join])
def test_what_etcd_alone_or_a_broker_by_itself_does_costs_no_handoff(
    fault: Callable[[History], None],
) -> None:
    found = all_reports(25, faults=False, prepare=partial(befalls, fault))
    assert not [one.violation for one in found if one.violation]
    assert set().union(*(one.unhindered for one in found)) == {"DONE"}
