"""The scheduler's side over the whole life of requests; the session's words are written down."""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from engines.test_vllm_parameters import replying
from engines.written_session import (
    BLOCKS,
    GROUPS,
    PROMPT,
    PUBLISHED,
    Request,
    Session,
    begun,
    chunk,
    computed,
    decode,
    prefill,
    side,
)
from restow.agents.engines.common.blocks import Group, UnwrittenTokens
from restow.agents.engines.common.registration import ConnectorSettings
from restow.agents.engines.vllm.scheduler.requests import MOVED_REASON
from restow.agents.engines.vllm.scheduler.scheduler_side import SchedulerSide
from restow.broker.client import BrokerCallError

NO_STATE = ([1, 2, 3], [0, 0, 0])
REGISTERED = {"held_blocks": 0, "registered": 1, "weights_known": 1}


def test_p_publishes_fences_and_holds_until_d_has_it() -> None:
    session = Session()
    p, request = side(session), prefill()
    p.new_request(request)
    assert session.take() == [("publish", "h", {}, 0, False)]
    assert [p.step(chunk(tokens)).fences for tokens in (4, 9, 9)] == [[], ["h"], []]
    given = computed(p, request)
    assert given is not None
    assert (given["handoff_id"], given["do_remote_prefill"]) == ("h", True)
    assert session.take() == [PUBLISHED]
    held = p.counted()
    assert held is not None
    assert (held["present"]["held_blocks"], held["states_sent"]) == (4, 0)
    assert p.step().sent == []
    session.end("h")
    assert [p.step().sent for _ in range(2)] == [["r"], []]
    sent = p.counted()
    assert sent is not None
    assert (sent["present"], sent["states_sent"]) == (REGISTERED, 1)
    assert p.counted() is None, "nothing has changed"


def test_an_engine_tells_that_it_is_registered_and_that_it_has_lost_its_broker() -> None:
    session = Session()
    p = side(session)
    for is_open in (True, False):
        session.is_open = is_open
        told = p.counted()
        assert told is not None
        assert told["present"] == REGISTERED | {"registered": int(is_open)}


def test_a_prompt_that_many_answers_are_wanted_to_is_published_for_each() -> None:
    session, request = Session(), prefill(choices=3)
    p, ids = side(session), ["h", "h/choice1", "h/choice2"]
    p.new_request(request)
    assert session.take() == [("publish", one, {}, 0, False) for one in ids]
    assert p.step(chunk(9)).fences == ids
    given = computed(p, request)
    assert given is not None
    assert given["handoff_id"] == "h"
    assert [said[1] for said in session.take()] == ids
    session.end("h/choice1")
    session.end("h", "FAILED", "PEER_LOST")
    assert p.step().sent == []
    session.end("h/choice2")
    assert p.step().sent == ["r"], "its pages are free when the last one has them"
    assert p.tally.take()["failures"] == {"prefill:PEER_LOST": 1}


def test_two_requests_of_one_handoff_both_have_their_pages_again() -> None:
    # The broker refuses the second request; vLLM must hear of both.
    session = Session()
    p = side(session)
    for name in ("a", "b"):
        request = prefill()
        request.request_id = name
        p.new_request(request)
        computed(p, request)
        session.end("h")
    assert sorted(p.step().sent) == ["a", "b"]


@pytest.mark.parametrize(
    ("state", "reason", "failures"),
    [
        ("CANCELLED", "DECLINED", {}),  # nobody needs the state
        ("FAILED", "MY_OWN", {"prefill:OTHER": 1}),  # a reason that an agent invents is no label
        ("FAILED", "PEER_LOST", {"prefill:PEER_LOST": 1}),
    ],
)
def test_how_p_s_handoffs_end_is_counted(
    state: str, reason: str, failures: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    session, p = begun(request := prefill())
    computed(p, request)
    session.end("h", state, reason)
    assert p.step().sent == ["r"]
    assert [one.levelname for one in caplog.records] == ["WARNING"] * len(failures)
    assert p.tally.empty == (not failures)
    assert p.tally.take()["failures"] == failures


def test_pages_that_the_broker_refuses_are_free_again() -> None:
    session, p = begun(request := prefill())
    computed(p, request)
    session.ends["h"].set_exception(BrokerCallError("ALREADY_EXISTS", "HANDOFF_OWNED", "taken"))
    assert p.step().sent == ["r"]
    assert p.tally.take()["failures"] == {"prefill:HANDOFF_OWNED": 1}


@pytest.mark.parametrize(("blocks", "done"), [(BLOCKS, False), (NO_STATE, True)])
def test_p_that_is_aborted_or_has_no_state_tells_d_and_holds_nothing(
    blocks: Any, done: bool
) -> None:
    session, p = begun(request := prefill(choices=2))
    request.num_computed_tokens = 9
    assert p.finished(request, blocks, computed=done) is None
    assert session.take() == [("cancel", "h"), ("cancel", "h/choice1")]
    assert p.step(chunk(9)).fences == []


def test_what_p_says_itself_is_not_part_of_keys_and_values_that_are_handed_over() -> None:
    session, request = Session(), prefill()
    groups, settings = (Group("group.0", 4),), ConnectorSettings()
    p = SchedulerSide("E", "life", "kv_producer", groups, 0, session, settings)
    p.new_request(request)
    assert request.num_prompt_tokens == len(PROMPT)
    session.take()
    computed(p, request, len(PROMPT) + 3, ([1, 2, 3, 4],))
    assert session.take() == [("publish", "h", {"group.0": [1, 2, 3, 4]}, len(PROMPT), True)]


def test_d_waits_and_goes_on_from_the_state() -> None:
    session, d = begun(request := decode())
    assert [d.loadable_tokens(request, held) for held in (0, 4, 8, 9, 10)] == [9, 5, 1, 0, 0]
    assert d.decides("r")
    d.allocated(request, BLOCKS, 5)
    assert session.take() == [("request", "h", PUBLISHED[2], 4, 9)]
    assert not d.decides("r")
    step = d.step()
    assert step.unwritten == [UnwrittenTokens("group.0", 3, 1, 4)]
    assert step.received == {}
    session.end("h")
    assert d.step().received == {"r": True}
    assert d.loadable_tokens(request, 0) == 0, "a state is loaded once, also after a preemption"
    d.allocated(request, BLOCKS, 0)
    assert d.finished(request, BLOCKS, computed=True) is None
    assert session.take() == []
    taken = d.tally.take()
    assert [0 <= waited_s < 60 for waited_s in taken["waits"]] == [True]
    assert (taken["transfers"], taken["external_tokens"]) == ([[100, 7e-06]], 5)


@pytest.mark.parametrize(
    ("state", "reason", "level"),
    [("EXPIRED", "NOT_PUBLISHED", "WARNING"), ("CANCELLED", "CANCELLED", "INFO")],
)
def test_a_load_that_failed_is_reported_as_one(
    state: str, reason: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    session, d = begun(request := decode())
    d.allocated(request, BLOCKS, 9)
    session.end("h", state, reason)
    with caplog.at_level("INFO", logger="restow.engine"):
        assert d.step().received == {"r": False}
    assert [one.levelname for one in caplog.records] == [level]
    assert d.loadable_tokens(request, 0) == 0, "the prompt is computed here, if at all"
    assert d.tally.take()["failures"] == {f"decode:{reason}": 1}


def test_d_that_needs_no_state_frees_p_at_once() -> None:
    # It holds all already, is never scheduled, computes the prompt for its parameters
    # (prompt_logprobs), or the prompt has one token.
    skipping = decode()
    skipping.skip = True
    one = Request([1], {"do_remote_prefill": True, "handoff_id": "h"})
    for request, tokens, scheduled in (
        (decode(), 9, True),
        (decode(), 9, False),
        (skipping, 0, True),
        (one, 0, True),
    ):
        session = Session()
        d = side(session)
        d.new_request(request)
        assert d.loadable_tokens(request, 0) == tokens
        if scheduled:
            d.allocated(request, BLOCKS, 0)
        d.finished(request, BLOCKS, computed=scheduled)
        assert session.take() == [("decline", "h")]


def test_an_abort_gives_up_the_requests_own_demand_and_no_other_of_that_handoff() -> None:
    session = Session()
    d, requests = side(session), [decode("r0"), decode("r1")]
    for request in requests:
        d.new_request(request)
        d.allocated(request, BLOCKS, 9)
    d.finished(requests[1], BLOCKS, computed=False)
    assert session.given_up == [1]


def test_d_that_is_aborted_while_it_loads_frees_its_blocks_when_the_read_has_ended() -> None:
    session, d = begun(request := decode())
    d.allocated(request, BLOCKS, 9)
    d.finished(request, BLOCKS, computed=False)
    assert session.take()[-1] == ("cancel", "h")
    assert d.step().received == {}
    session.end("h", "CANCELLED", "CANCELLED")
    assert d.step().received == {"r": False}


def test_d_without_a_block_for_the_state_fails_the_load() -> None:
    session, d = begun(request := decode())
    d.allocated(request, NO_STATE, 9)
    assert session.take() == [("decline", "h")]
    assert d.step().received == {"r": False}


def test_a_state_is_written_behind_the_step_that_has_asked_for_it() -> None:
    session = Session()
    d = side(session)
    steps = []
    for requests in ((0, 1), (), (2,)):
        for number in requests:
            request = decode(f"r{number}")
            d.new_request(request)
            d.allocated(request, BLOCKS, 9)
        steps.append(d.step().write_mark)
    assert session.given("write_mark") == [1, 1, 2]
    assert steps == [1, 0, 2], "workers are told in the steps in which it was asked for"


def test_the_token_that_d_computes_anew_has_its_window() -> None:
    # The last of 10 tokens sees tokens 6 to 8 beside itself, which begin in the middle of a block.
    hole, behind = UnwrittenTokens("group.0", 12, 0, 2), UnwrittenTokens("group.0", 13, 1, 4)
    for whole, holes in ((False, [hole, behind]), (True, [behind])):
        groups, settings = (Group("group.0", 4, None, 3, whole),), ConnectorSettings()
        session, request, asking = Session(), prefill(), decode()
        p = SchedulerSide("E", "life", "kv_producer", groups, 0, session, settings)
        p.new_request(request)
        assert request.num_prompt_tokens == len(PROMPT) - 1 == 9
        d = SchedulerSide("F", "life", "kv_consumer", groups, 0, session, settings)
        d.new_request(asking)
        assert d.loadable_tokens(asking, 0) == 9
        d.allocated(asking, ([0, 12, 13],), 9)
        assert d.step().unwritten == holes


def test_what_a_router_says_reaches_the_broker() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    said: list[tuple[dict[str, Any], dict[str, str] | None, tuple[int, int, str]]] = [
        ({}, None, (120_000, 0, "")),
        ({"timeout_ms": 500}, {}, (500, 0, "")),
        ({"readers": 2}, {"traceparent": parent}, (120_000, 2, parent)),
    ]
    for params, headers, wanted in said:
        timeout_ms, readers, trace = wanted
        p_request, d_request = prefill(**params), decode(**params)
        p_request.trace_headers = d_request.trace_headers = headers
        session, p = begun(p_request)
        assert session.given("trace_parent") == [trace]
        given = computed(p, p_request)
        assert session.given("readers") == [readers] * 2
        assert given is not None
        assert given.get("readers", 0) == readers
        session, d = begun(d_request)
        d.allocated(d_request, BLOCKS, 9)
        assert session.given("timeout_ms") == [timeout_ms]
        assert session.given("trace_parent") == [trace]
        declined, d = begun(decode(**params))
        d.allocated(decode(**params), BLOCKS, 0)
        assert session.given("readers") == declined.given("readers") == [readers]


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


def test_a_request_without_parameters_is_served_alone() -> None:
    session, both = begun(request := Request(list(PROMPT), None))
    assert both.loadable_tokens(request, 0) == 0
    assert not both.decides("r")
    assert both.finished(request, BLOCKS, computed=True) is None
    assert session.take() == []
    assert len(PROMPT) == request.num_prompt_tokens


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_parameters_that_are_no_use_are_a_load_that_fails_on_either_side(role: str) -> None:
    # What comes of the failure is vLLM's policy: an error, or a prompt that is computed here.
    for params in (
        {"do_remote_prefill": True},
        {"handoff_id": 7},
        {"do_remote_prefill": True, "remote_block_ids": [1], "remote_engine_id": "nixl"},
    ):
        session, one = begun(request := Request(list(PROMPT), params), role)
        assert one.loadable_tokens(request, 4) == len(PROMPT) - 4 > 0
        assert one.decides("r")
        one.allocated(request, BLOCKS, len(PROMPT) - 4)
        assert one.step().received == {"r": False}
        assert one.loadable_tokens(request, 0) == 0, "when it comes back it is computed"
        assert not one.decides("r")
        assert one.finished(request, BLOCKS, computed=True) is None
        assert session.take() == []
        where = "prefill" if role == "kv_producer" else "decode"
        assert one.tally.take()["failures"] == {f"{where}:PARAMETERS_INVALID": 1}


def test_a_refused_request_that_is_aborted_leaves_nothing() -> None:
    _, one = begun(request := Request(list(PROMPT), {"do_remote_prefill": True}))
    one.finished(request, ([], []), computed=False)
    assert not one.decides("r")


def of_adapter(request: Request) -> Request:
    request.lora_request = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="/a")
    return request


def test_p_publishes_a_state_of_an_adapter_when_workers_have_told_what_they_loaded() -> None:
    session, p = begun(request := of_adapter(prefill()))
    assert computed(p, request) is not None
    assert session.take() == []
    p.loaded({"a": "word"})
    assert session.take() == [PUBLISHED]
    assert p.step().sent == []


@pytest.mark.parametrize("known", [{"a": "before"}, {}])
def test_p_hands_nothing_on_where_the_last_step_may_have_had_another_adapter(
    known: dict[str, str],
) -> None:
    # The step that ends the request tells it: the adapter was loaded again, or its weights are
    # unknown.
    session = Session()
    p, request = side(session), of_adapter(prefill())
    p.loaded(known)
    p.new_request(request)
    session.take()
    computed(p, request)
    p.loaded({"a": "after"} if known else {})
    assert session.take() == [("cancel", "h")]
    assert p.step().sent == ["r"], "vLLM may have its pages again"
    assert p.step().sent == []


def test_d_asks_for_states_of_an_adapter_that_its_workers_have_loaded() -> None:
    session = Session()
    d, first, second = side(session), of_adapter(decode()), of_adapter(decode())
    d.new_request(first)
    assert d.loadable_tokens(first, 0) == 0
    assert session.take() == [("decline", "h")]
    d.finished(first, BLOCKS, computed=True)
    d.loaded({"a": "word"})
    d.new_request(second)
    assert d.loadable_tokens(second, 0) == 9
    d.loaded({"a": "other"})
    d.allocated(second, BLOCKS, 9)
    assert session.take() == [("decline", "h")]
    assert d.step().received == {"r": False}, "a failed load, as vLLM's policy says"


def test_replies_that_came_after_an_engine_was_told_to_leave_stay() -> None:
    told, settings = Event(), ConnectorSettings()
    one = SchedulerSide("E", "life", "kv_both", GROUPS, 0, Session(), settings, leaving=told)
    first, later = replying(), replying()
    first.request_id, later.request_id = "first", "later"
    told.set()  # it is idle, and may have been taken back long before a request comes
    one.new_request(first)
    one.step()
    assert first.max_tokens == 16
    told.set()
    one.step()
    one.new_request(later)
    one.step()
    assert (first.max_tokens, first.stop_reason) == (4, MOVED_REASON)
    assert later.max_tokens == 16
