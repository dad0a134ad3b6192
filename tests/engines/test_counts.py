"""The ends of handoffs, what an engine counts in an interval, and how counts are added up."""

from __future__ import annotations

import copy
from concurrent.futures import Future

import pytest

from restow.agents.engines.common.handoff_ends import (
    AgentTally,
    HandoffEnd,
    HandoffEnds,
    HandoffTally,
    joined_counts,
    no_counts,
)
from restow.agents.link.settings import AgentFigures
from restow.agents.memory.staging import PoolFigures
from restow.agents.reading.lane import ReadCounts
from restow.broker.client import HandoffEnded


def figures(used: tuple[int, int] = (0, 0), given_up: int = 0, **nixl: int) -> AgentFigures:
    reads = {"nixl": ReadCounts(**nixl), "process_vm_readv": ReadCounts()}
    gather, scatter = (PoolFigures(100, one) for one in used)
    return AgentFigures(1, 1, gather, scatter, 1, given_up, reads)


def test_a_worker_tells_what_is_new_and_staging_until_none_is_used() -> None:
    tally = AgentTally()
    assert tally.take(figures()) is None
    told = tally.take(figures((64, 0), reads=2, read_bytes=10))
    assert told is not None
    assert told["reads"] == {"nixl": [2, 10, 0]}
    assert told["staging_used_bytes"] == {"gather": 64, "scatter": 0}
    told = tally.take(figures((64, 0), 1, reads=2, read_bytes=10, errors=1))
    assert told is not None
    assert (told["reads"], told["lanes_given_up"]) == ({"nixl": [0, 0, 1]}, 1)
    told = tally.take(figures((0, 0), 1, reads=2, read_bytes=10, errors=1))
    assert told is not None
    assert (told["reads"], told["staging_used_bytes"]) == ({}, {"gather": 0, "scatter": 0})
    assert tally.take(figures((0, 0), 1, reads=2, read_bytes=10, errors=1)) is None


def test_two_sides_are_added_and_neither_is_changed() -> None:
    one, other = AgentTally(), AgentTally()
    first = one.take(figures((64, 0), reads=2, read_bytes=10))
    second = other.take(figures((32, 128), 1, reads=1, read_bytes=5, errors=1))
    assert first is not None
    assert second is not None
    before = copy.deepcopy((first, second))
    ranks = joined_counts(first, second)
    assert (first, second) == before
    assert ranks["reads"] == {"nixl": [3, 15, 1]}
    assert ranks["staging_used_bytes"] == {"gather": 64, "scatter": 128}
    assert ranks["lanes_given_up"] == 1
    scheduler = HandoffTally(present={"held_blocks": 3}).take()
    whole = joined_counts(ranks, scheduler)
    assert (whole["present"], whole["reads"]) == ({"held_blocks": 3}, ranks["reads"])
    assert whole.keys() == no_counts().keys()


def test_a_demand_has_ended_when_its_pages_are_free() -> None:
    ends, told, pages_free = HandoffEnds(), Future[HandoffEnded](), Future[None]()
    ends.watch("r", "h", told, pages_free)
    told.set_result(HandoffEnded("h", "DONE", "", "", 10, 20))
    assert ends.empty
    pages_free.set_result(None)
    assert [(end.reason, end.bytes, end.transfer_us) for end in ends.take()] == [("", 10, 20)]
    cancelled = Future[HandoffEnded]()
    ends.watch("r", "h", cancelled)
    cancelled.cancel()
    assert [end.reason for end in ends.take()] == ["CANCELLED"]


def test_a_schedulers_counts_begin_anew_with_each_interval() -> None:
    tally = HandoffTally()
    tally.received(HandoffEnd("r", "h", "", "", 10, 2_000_000, 3.0, 48))
    tally.received(HandoffEnd("r", "h", "", "", 20, 2_000_000, 1.0, 16))
    tally.sent(HandoffEnd("r", "h"))
    first = tally.take()
    assert first == no_counts() | {
        "transfers": [[10, 2.0], [20, 2.0]],
        "waits": [1.0, 0.0],
        "external_tokens": 64,
        "states_sent": 1,
    }
    assert tally.take() == no_counts()
    tally.refused("decode", "TOO_LATE")
    refused = joined_counts(first, tally.take())
    tally.refused("decode", "TOO_LATE")
    tally.refused("prefill", "FULL")
    whole = joined_counts(refused, tally.take())
    assert whole == first | {"failures": {"decode:TOO_LATE": 2, "prefill:FULL": 1}}


@pytest.mark.parametrize("swapped", [False, True])
def test_an_interval_without_events_adds_nothing(swapped: bool) -> None:
    counts = AgentTally().take(figures((64, 0), reads=2, read_bytes=10))
    assert counts is not None
    sides = (counts, no_counts()) if swapped else (no_counts(), counts)
    assert joined_counts(*sides) == counts
