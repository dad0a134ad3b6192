"""P publishes and fences leading tokens of a prompt that it computes in several steps."""

from __future__ import annotations

from typing import Any

from engines.written_session import PUBLISHED, Session, chunk, computed, prefill, side
from restow.agents.engines.common.blocks import Group
from restow.agents.engines.common.prefill_decode import early_groups
from restow.agents.engines.vllm.scheduler.scheduler_side import SchedulerSide


def begun() -> tuple[Session, SchedulerSide, Any]:
    session, request = Session(), prefill()
    p = side(session)
    p.new_request(request)
    assert session.take() == [("publish", "h", {}, 0, False)]
    assert "r" in p.computing
    return session, p, request


def test_each_step_publishes_the_blocks_of_tokens_that_it_adds_and_fences_these() -> None:
    session, p, request = begun()
    assert p.step(chunk(4, 1)).early_fences == {"h": 4}
    assert session.take() == [("publish", "h", {"group.0": (1,)}, 0, False)]
    assert p.step(chunk(7, 2)).early_fences == {"h": 7}
    assert p.step(chunk(8)).early_fences == {"h": 8}
    assert session.take() == [("publish", "h", {"group.0": (2,)}, 0, False)]
    assert session.given("first_blocks")[-1] == {"group.0": 1}
    last = p.step(chunk(9, 3))
    assert (last.early_fences, last.fences) == ({}, ["h"])
    assert "r" not in p.computing
    assert computed(p, request) is not None
    assert session.take() == [PUBLISHED]


def test_every_handoff_of_a_prompt_is_published_and_fenced_early() -> None:
    session = Session()
    p = side(session)
    p.new_request(prefill(choices=2))
    names = [name for _, name, *_ in session.take()]
    assert len(set(names)) == 2
    assert p.step(chunk(4, 1)).early_fences == dict.fromkeys(names, 4)
    published = [("publish", name, {"group.0": (1,)}, 0, False) for name in names]
    assert session.take() == published


def test_a_prompt_of_one_step_is_published_once() -> None:
    session, p, _ = begun()
    step = p.step(chunk(9, 1, 2, 3))
    assert (step.early_fences, step.fences) == ({}, ["h"])
    assert session.take() == []


def test_a_prompt_that_is_preempted_is_taken_back_and_published_whole_when_it_is_computed() -> None:
    session, p, request = begun()
    p.step(chunk(4, 1))
    session.take()
    assert not p.step((), {"r", "another"}).early_fences
    assert session.take() == [("take back", "h")]
    assert not p.step(chunk(4, 7)).early_fences
    assert not p.step((), {"r"}).early_fences
    assert session.take() == []
    assert p.step(chunk(9, 8)).fences == ["h"]
    assert computed(p, request) is not None
    assert session.take() == [PUBLISHED]


def test_one_that_is_preempted_before_goes_on() -> None:
    session, p, _ = begun()
    assert p.step((), {"r"}).early_fences == {}
    assert session.take() == []
    assert p.step(chunk(4, 7)).early_fences == {"h": 4}


def test_nothing_is_early_where_tokens_leave_a_window_or_drafts_lag_behind() -> None:
    window = Group("group.0", 4, None, 8), Group("group.1", 4, 0)
    for groups in (window, (Group("group.0", 4, None, 0, True),)):
        assert not early_groups(groups)
    session = Session()
    p = side(session, lookahead_tokens=1)
    p.new_request(prefill())
    session.take()
    assert p.step(chunk(4, 1)).early_fences == {}
    assert session.take() == []
