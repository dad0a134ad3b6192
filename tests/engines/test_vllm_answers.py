"""Answers and prompts of one request, and requests of one handoff, at the scheduler's side."""

from __future__ import annotations

from engines.written_session import BLOCKS, Session, decode, nothing, prefill, side


def test_a_prompt_that_many_answers_are_wanted_to_is_published_for_each() -> None:
    session = Session()
    p, request = side(session), prefill()
    request.kv_transfer_params = {"do_remote_decode": True, "handoff_id": "h", "choices": 3}
    ids = ["h", "h/choice1", "h/choice2"]
    p.new_request(request)
    assert session.take() == [("publish", one, {}, 0, False) for one in ids]
    assert p.step(iter([("r", 9)])).fences == ids
    request.num_computed_tokens = 9
    given = p.finished(request, BLOCKS, computed=True)
    assert given is not None
    assert given["handoff_id"] == "h"
    assert [said[1] for said in session.take()] == ids
    session.end("h/choice1")
    session.end("h", "FAILED", "PEER_LOST")
    assert p.step(nothing()).sent == []
    session.end("h/choice2")
    assert p.step(nothing()).sent == ["r"], "its pages are free when the last one has them"
    assert p.tally.take()["failures"] == {"prefill:PEER_LOST": 1}


def test_a_prompt_that_is_given_up_is_given_up_for_all_its_answers() -> None:
    session = Session()
    p, request = side(session), prefill()
    request.kv_transfer_params = {"do_remote_decode": True, "handoff_id": "h", "choices": 2}
    p.new_request(request)
    session.take()
    p.finished(request, BLOCKS, computed=False)
    assert session.take() == [("cancel", "h"), ("cancel", "h/choice1")]


def test_answers_and_prompts_of_one_request_are_handoffs_of_their_own_on_both_sides() -> None:
    names = {
        "cmpl-x-0-0123abcd": "h",
        "0_cmpl-x-0-0123abcd": "h",
        "1_cmpl-x-0-0123abcd": "h/choice1",
        "cmpl-x-2-0123abcd": "h/prompt2",
        "3_cmpl-x-2-0123abcd": "h/prompt2/choice3",
        "1_chatcmpl-x-2-0123abcd": "h/choice1",
        "cmpl-x-1": "h/prompt1",
    }
    for request_id, handoff_id in names.items():
        session = Session()
        for role, request in (("kv_consumer", decode()), ("kv_producer", prefill())):
            one, request.request_id = side(session, role), request_id
            one.new_request(request)
            one.allocated(request, BLOCKS, 9)
        assert [said[1] for said in session.take()] == [handoff_id] * 2, request_id


def test_two_requests_of_one_handoff_both_have_their_pages_again() -> None:
    # The broker refuses the second request; vLLM must hear of both.
    session = Session()
    p = side(session)
    for name in ("a", "b"):
        request = prefill()
        request.request_id, request.num_computed_tokens = name, 9
        p.new_request(request)
        p.finished(request, BLOCKS, computed=True)
        session.end("h")
    assert sorted(p.step(nothing()).sent) == ["a", "b"]
