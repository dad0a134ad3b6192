"""What an engine's agents count in an interval, and how counts are added up."""

from __future__ import annotations

import copy

from restow.agents.engines.common.handoff_ends import (
    AgentTally,
    HandoffTally,
    joined_counts,
    no_counts,
)
from restow.agents.link.settings import AgentFigures
from restow.agents.memory.staging import PoolFigures
from restow.agents.reading.lane import ReadCounts


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
