"""The scheduler's side over the whole life of requests; the session's words are written down."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engines.test_vllm_parameters import Request
from engines.written_session import BLOCKS, PROMPT, Session, decode, nothing, prefill, side
from restow.agents.engines.common.blocks import Group, UnwrittenTokens
from restow.agents.engines.common.registration import ConnectorSettings
from restow.agents.engines.vllm.scheduler.scheduler_side import SchedulerSide
from restow.broker.client import BrokerCallError


def test_p_publishes_fences_and_holds_until_d_has_it() -> None:
    session = Session()
    p, request = side(session), prefill()
    p.new_request(request)
    assert session.take() == [("publish", "h", {}, 0, False)]
    assert p.step(iter([("r", 4)])).fences == []
    assert p.step(iter([("r", 9)])).fences == ["h"]
    assert p.step(iter([("r", 9)])).fences == []
    request.num_computed_tokens = 9
    given = p.finished(request, BLOCKS, computed=True)
    assert given is not None
    assert (given["handoff_id"], given["do_remote_prefill"]) == ("h", True)
    blocks = {"group.0": [1, 2, 3], "group.1": [5]}
    assert session.take() == [("publish", "h", blocks, 9, True)]
    assert p.step(nothing()).sent == []
    session.end("h")
    assert p.step(nothing()).sent == ["r"]
    assert p.step(nothing()).sent == []
    assert p.tally.take()["states_sent"] == 1
    assert p.tally.empty


def test_d_waits_as_long_as_the_router_says() -> None:
    for said, patience_ms in (({}, 120_000), ({"timeout_ms": 500}, 500)):
        session, request = Session(), decode()
        d = side(session)
        request.kv_transfer_params = {"do_remote_prefill": True, "handoff_id": "h", **said}
        d.new_request(request)
        d.allocated(request, BLOCKS, 9)
        assert session.patience_ms == [patience_ms]


def test_a_state_is_written_behind_the_step_that_has_asked_for_it() -> None:
    session = Session()
    d = side(session)
    steps = []
    for requests in ((0, 1), (), (2,)):
        for number in requests:
            request = decode(f"r{number}")
            d.new_request(request)
            d.allocated(request, BLOCKS, 9)
        steps.append(d.step(nothing()).write_mark)
    assert session.write_marks == [1, 1, 2]
    assert steps == [1, 0, 2], "workers are told in the steps in which it was asked for"


def test_d_that_computes_the_whole_prompt_for_its_parameters_frees_p_at_once() -> None:
    session, request = Session(), decode()
    request.skip = True  # prompt_logprobs
    d = side(session)
    d.new_request(request)
    assert session.take() == [("decline", "h")]
    assert d.loadable_tokens(request, 0) == 0
    d.finished(request, BLOCKS, computed=True)
    assert session.take() == []


def test_the_number_of_readers_reaches_the_broker() -> None:
    named = {"handoff_id": "h", "readers": 2}
    session, request = Session(), prefill()
    p = side(session)
    request.kv_transfer_params = {"do_remote_decode": True, **named}
    p.new_request(request)
    request.num_computed_tokens = 9
    given = p.finished(request, BLOCKS, computed=True)
    assert session.readers == [2, 2]
    for tokens in (9, 0):
        session, request = Session(), decode()
        d, request.kv_transfer_params = side(session), given
        d.new_request(request)
        d.allocated(request, BLOCKS, tokens)
        assert session.readers == [2]


def test_the_requests_trace_reaches_the_broker() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for headers, said in (({"traceparent": parent}, parent), ({}, ""), (None, "")):
        for request in (prefill(), decode()):
            session = Session()
            one, request.trace_headers = side(session), headers
            one.new_request(request)
            one.allocated(request, BLOCKS, 9)
            assert session.traces[0] == said


def test_p_whose_state_nobody_needs_is_no_failure() -> None:
    session = Session()
    p, request = side(session), prefill()
    p.new_request(request)
    request.num_computed_tokens = 9
    p.finished(request, BLOCKS, computed=True)
    session.end("h", "CANCELLED", "DECLINED")
    assert p.step(nothing()).sent == ["r"]
    assert p.tally.empty


def test_what_p_says_itself_is_not_part_of_keys_and_values_that_are_handed_over() -> None:
    session = Session()
    groups, settings = (Group("group.0", 4),), ConnectorSettings()
    p = SchedulerSide("E", "life", "kv_producer", groups, 0, session, settings)
    request = prefill()
    p.new_request(request)
    assert request.num_prompt_tokens == len(PROMPT)
    request.num_computed_tokens = len(PROMPT) + 3
    session.take()
    p.finished(request, ([1, 2, 3, 4],), computed=True)
    assert session.take() == [("publish", "h", {"group.0": [1, 2, 3, 4]}, len(PROMPT), True)]


def test_the_token_that_d_computes_anew_has_its_window() -> None:
    # The last of 10 tokens sees tokens 6 to 8 beside itself, which begin in the middle of a block.
    hole, behind = UnwrittenTokens("group.0", 12, 0, 2), UnwrittenTokens("group.0", 13, 1, 4)
    for whole, holes in ((False, [hole, behind]), (True, [behind])):
        groups, settings = (Group("group.0", 4, None, 3, whole),), ConnectorSettings()
        session = Session()
        p = SchedulerSide("E", "life", "kv_producer", groups, 0, session, settings)
        request = prefill()
        p.new_request(request)
        assert request.num_prompt_tokens == len(PROMPT) - 1 == 9
        d = SchedulerSide("F", "life", "kv_consumer", groups, 0, session, settings)
        asking = decode()
        d.new_request(asking)
        assert d.loadable_tokens(asking, 0) == 9
        d.allocated(asking, ([0, 12, 13],), 9)
        assert d.step(nothing()).unwritten == holes


def test_p_that_is_aborted_tells_d_and_holds_nothing() -> None:
    session = Session()
    p, request = side(session), prefill()
    p.new_request(request)
    session.take()
    assert p.finished(request, BLOCKS, computed=False) is None
    assert session.take() == [("cancel", "h")]
    assert p.step(iter([("r", 9)])).fences == []


def test_p_without_a_state_block_tells_d() -> None:
    session = Session()
    p, request = side(session), prefill()
    p.new_request(request)
    session.take()
    request.num_computed_tokens = 9
    assert p.finished(request, ([1, 2, 3], [0, 0, 0]), computed=True) is None
    assert session.take() == [("cancel", "h")]


def test_pages_that_the_broker_refuses_are_free_again() -> None:
    session = Session()
    p, request = side(session), prefill()
    p.new_request(request)
    request.num_computed_tokens = 9
    p.finished(request, BLOCKS, computed=True)
    session.ends["h"].set_exception(BrokerCallError("ALREADY_EXISTS", "HANDOFF_OWNED", "taken"))
    assert p.step(nothing()).sent == ["r"]
    assert p.tally.take()["failures"] == {"prefill:HANDOFF_OWNED": 1}


def test_d_waits_and_goes_on_from_the_state() -> None:
    session = Session()
    d, request = side(session), decode()
    d.new_request(request)
    assert session.take() == []
    assert [d.loadable_tokens(request, held) for held in (0, 4, 8, 9, 10)] == [9, 5, 1, 0, 0]
    assert d.decides("r")
    d.allocated(request, BLOCKS, 5)
    blocks = {"group.0": [1, 2, 3], "group.1": [5]}
    assert session.take() == [("request", "h", blocks, 4, 9)]
    assert not d.decides("r")
    step = d.step(nothing())
    assert step.unwritten == [UnwrittenTokens("group.0", 3, 1, 4)]
    assert step.received == {}
    session.end("h")
    assert d.step(nothing()).received == {"r": True}
    assert d.loadable_tokens(request, 0) == 0, "a state is loaded once, also after a preemption"
    d.allocated(request, BLOCKS, 0)
    assert d.finished(request, BLOCKS, computed=True) is None
    assert session.take() == []
    taken = d.tally.take()
    assert (taken["transfers"], taken["external_tokens"]) == ([[100, 7e-06]], 5)


def test_a_load_that_failed_is_reported_as_one() -> None:
    session = Session()
    d, request = side(session), decode()
    d.new_request(request)
    d.allocated(request, BLOCKS, 9)
    session.end("h", "EXPIRED", "NOT_PUBLISHED")
    assert d.step(nothing()).received == {"r": False}
    assert d.loadable_tokens(request, 0) == 0, "the prompt is computed here, if at all"
    assert d.tally.take()["failures"] == {"decode:NOT_PUBLISHED": 1}


def test_d_that_holds_all_already_frees_p_at_once() -> None:
    session = Session()
    d, request = side(session), decode()
    d.new_request(request)
    d.allocated(request, BLOCKS, 0)
    assert session.take() == [("decline", "h")]
    d.finished(request, BLOCKS, computed=True)
    assert session.take() == []


def test_d_that_is_never_scheduled_frees_p_at_once() -> None:
    session = Session()
    d, request = side(session), decode()
    d.new_request(request)
    d.finished(request, ([], []), computed=False)
    assert session.take() == [("decline", "h")]


def test_an_abort_gives_up_the_requests_own_demand_and_no_other_of_that_handoff() -> None:
    session = Session()
    d, requests = side(session), [decode(), decode()]
    for number, request in enumerate(requests):
        request.request_id = f"r{number}"
        d.new_request(request)
        d.allocated(request, BLOCKS, 9)
    d.finished(requests[1], BLOCKS, computed=False)
    assert session.given_up == [1]


def test_d_that_is_aborted_while_it_loads_frees_its_blocks_when_the_read_has_ended() -> None:
    session = Session()
    d, request = side(session), decode()
    d.new_request(request)
    d.allocated(request, BLOCKS, 9)
    d.finished(request, BLOCKS, computed=False)
    assert session.take()[-1] == ("cancel", "h")
    assert d.step(nothing()).received == {}
    session.end("h", "CANCELLED", "CANCELLED")
    assert d.step(nothing()).received == {"r": False}


def test_d_without_a_block_for_the_state_fails_the_load() -> None:
    session = Session()
    d, request = side(session), decode()
    d.new_request(request)
    d.allocated(request, ([1, 2, 3], [0, 0, 0]), 9)
    assert session.take() == [("decline", "h")]
    assert d.step(nothing()).received == {"r": False}


def test_a_prompt_of_one_token_is_computed_by_d_itself() -> None:
    session = Session()
    d = side(session)
    request = Request([1], {"do_remote_prefill": True, "handoff_id": "h"})
    d.new_request(request)
    assert d.loadable_tokens(request, 0) == 0
    d.allocated(request, BLOCKS, 0)
    assert session.take() == [("decline", "h")]


def test_a_request_without_parameters_is_served_alone() -> None:
    session = Session()
    both, request = side(session), Request(list(PROMPT), None)
    both.new_request(request)
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
        session = Session()
        one, request = side(session, role), Request(list(PROMPT), params)
        one.new_request(request)
        assert one.loadable_tokens(request, 4) == len(PROMPT) - 4 > 0
        assert one.decides("r")
        one.allocated(request, BLOCKS, len(PROMPT) - 4)
        assert one.step(nothing()).received == {"r": False}
        assert one.loadable_tokens(request, 0) == 0, "when it comes back it is computed"
        assert not one.decides("r")
        assert one.finished(request, BLOCKS, computed=True) is None
        assert session.take() == []
        where = "prefill" if role == "kv_producer" else "decode"
        assert one.tally.take()["failures"] == {f"{where}:PARAMETERS_INVALID": 1}


def test_a_refused_request_that_is_aborted_leaves_nothing() -> None:
    one, request = side(Session()), Request(list(PROMPT), {"do_remote_prefill": True})
    one.new_request(request)
    one.finished(request, ([], []), computed=False)
    assert not one.decides("r")


ADAPTER = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="/a")


def of_adapter(request: Request) -> Request:
    request.lora_request = ADAPTER
    return request


def test_p_publishes_a_state_of_an_adapter_when_workers_have_told_what_they_loaded() -> None:
    session = Session()
    p, request = side(session), of_adapter(prefill())
    p.new_request(request)
    session.take()
    request.num_computed_tokens = 9
    assert p.finished(request, BLOCKS, computed=True) is not None
    assert session.take() == []
    p.loaded({"a": "word"})
    assert [said[:2] for said in session.take()] == [("publish", "h")]
    assert p.step(nothing()).sent == []


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
    request.num_computed_tokens = 9
    p.finished(request, BLOCKS, computed=True)
    p.loaded({"a": "after"} if known else {})
    assert session.take() == [("cancel", "h")]
    assert p.step(nothing()).sent == ["r"], "vLLM may have its pages again"
    assert p.step(nothing()).sent == []


def test_d_asks_for_states_of_an_adapter_that_its_workers_have_loaded() -> None:
    session = Session()
    d, first, second = side(session), of_adapter(decode()), of_adapter(decode())
    d.new_request(first)
    assert d.loadable_tokens(first, 0) == 0
    assert [said[:2] for said in session.take()] == [("decline", "h")]
    d.finished(first, BLOCKS, computed=True)
    d.loaded({"a": "word"})
    d.new_request(second)
    assert d.loadable_tokens(second, 0) == 9
    d.loaded({"a": "other"})
    d.allocated(second, BLOCKS, 9)
    assert [said[:2] for said in session.take()] == [("decline", "h")]
    assert d.step(nothing()).received == {"r": False}, "a failed load, as vLLM's policy says"
