"""What an engine counts in an interval: P's states, what it holds, and its agents' reads."""

from __future__ import annotations

import copy

from engines.written_session import BLOCKS, Session, nothing, prefill, side
from restow.agents.engines.common.handoff_ends import OTHER, AgentTally, joined_counts, no_counts
from restow.agents.link.settings import AgentFigures
from restow.agents.memory.staging import PoolFigures
from restow.agents.reading.lane import ReadCounts

REGISTERED = {"held_blocks": 0, "registered": 1, "weights_known": 1}


def test_p_tells_what_it_holds_and_has_handed_over() -> None:
    session = Session()
    p, request = side(session), prefill()
    first = p.counted()
    assert first is not None
    assert first["present"] == REGISTERED
    assert p.counted() is None, "nothing has changed"
    p.new_request(request)
    request.num_computed_tokens = 9
    p.finished(request, BLOCKS, computed=True)
    held = p.counted()
    assert held is not None
    assert (held["present"]["held_blocks"], held["states_sent"]) == (4, 0)
    session.end("h")
    p.step(nothing())
    sent = p.counted()
    assert sent is not None
    assert (sent["present"], sent["states_sent"]) == (REGISTERED, 1)
    assert p.counted() is None


def test_an_engine_that_has_lost_its_broker_tells_so() -> None:
    session = Session()
    p = side(session)
    p.counted()
    session.is_open = False
    told = p.counted()
    assert told is not None
    assert told["present"]["registered"] == 0


def test_a_reason_that_an_agent_invents_is_no_label() -> None:
    session = Session()
    p, request = side(session), prefill()
    p.new_request(request)
    request.num_computed_tokens = 9
    p.finished(request, BLOCKS, computed=True)
    session.end("h", "FAILED", "MY_OWN")
    p.step(nothing())
    assert p.tally.take()["failures"] == {f"prefill:{OTHER}": 1}


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
    scheduler = side(Session()).counted()
    assert scheduler is not None
    whole = joined_counts(ranks, scheduler)
    assert (whole["present"], whole["reads"]) == (REGISTERED, ranks["reads"])
    assert whole.keys() == no_counts().keys()
