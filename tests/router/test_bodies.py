"""What P and D are sent of a client's request, and what their answers mean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from restow.broker.router.bodies import (
    MAX_CHOICES,
    ONE_TOKEN,
    Progress,
    decode_body,
    event_data,
    handoff_failed,
    needs_whole_prompt,
    prefill_body,
    progress_of,
)
from router.fake_engine import COMPLETIONS, DONE


@pytest.mark.parametrize("path", ONE_TOKEN)
def test_p_computes_one_token_for_all_answers_and_d_is_told_what_the_client_said(path: str) -> None:
    body = {"prompt": "x", "n": 3, "min_tokens": 4, "max_tokens": 9, "logprobs": 1, "seed": 5}
    params = {"do_remote_decode": True, "handoff_id": "h", "choices": 3}
    rest = {**ONE_TOKEN[path], "stream": False, "kv_transfer_params": params}
    assert prefill_body(path, body, "h") == {"prompt": "x", "max_tokens": 9, "seed": 5} | rest
    params = {"do_remote_prefill": True, "handoff_id": "h"}
    assert decode_body(body, "h") == body | {"kv_transfer_params": params}


def test_p_is_told_nothing_that_contradicts_one_token() -> None:
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}, "echo": True}
    told = prefill_body(COMPLETIONS, {**body, "min_tokens": 7, "n": 2.5}, "h")
    params = {"do_remote_decode": True, "handoff_id": "h"}
    assert told == {"prompt": "x", "max_tokens": 1, "stream": False, "kv_transfer_params": params}


@pytest.mark.parametrize(
    ("more", "by_p"),
    [
        ({}, True),
        ({"stream": True, "logprobs": False, "n": 1, "min_tokens": 0, "seed": 5}, True),
        *(({key: 2}, False) for key in ("n", "best_of", "min_tokens", "logprobs", "top_logprobs")),
        ({"logprobs": 0}, False),
        ({"logprobs": True}, False),
    ],
)
def test_both_are_asked_alike_for_the_first_token(more: dict[str, Any], by_p: bool) -> None:
    body = {"prompt": "x", **more}
    for told in (prefill_body(COMPLETIONS, body, "h"), decode_body(body, "h")):
        assert told["kv_transfer_params"].get("sampled_token", False) == by_p


@pytest.mark.parametrize(
    ("body", "needs"),
    [
        ({"prompt_logprobs": 0}, True),
        ({"echo": True, "logprobs": 0}, True),
        ({"use_beam_search": True}, True),
        ({"previous_response_id": "r"}, True),
        ({"background": True}, True),
        ({"n": MAX_CHOICES + 1}, True),
        ({"n": MAX_CHOICES}, False),
        ({"echo": True, "logprobs": None, "prompt_logprobs": None}, False),
    ],
)
def test_some_requests_need_the_whole_prompt_at_d(body: dict[str, Any], needs: bool) -> None:
    assert needs_whole_prompt(body) is needs


def test_a_d_without_a_handoff_is_told_of_none() -> None:
    assert decode_body({"prompt": "x", "kv_transfer_params": {"handoff_id": "h"}}, None) == {
        "prompt": "x"
    }


def completed(output_tokens: int, status: str = "completed") -> dict[str, Any]:
    return {"status": status, "usage": {"output_tokens": output_tokens}}


@pytest.mark.parametrize(
    ("data", "progress"),
    [
        (None, Progress.NOTHING),
        ({"choices": [{"text": "", "finish_reason": None}]}, Progress.NOTHING),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, Progress.NOTHING),
        ({"choices": []}, Progress.NOTHING),
        ({"type": "response.created", "response": {"usage": None}}, Progress.NOTHING),
        ({"choices": [{"text": "stone"}]}, Progress.TOKEN),
        ({"choices": [{"text": ""}, {"delta": {"tool_calls": [{}]}}]}, Progress.TOKEN),
        ({"choices": [{"text": "", "finish_reason": "stop"}]}, Progress.TOKEN),
        ({"type": "response.output_text.delta", "delta": "stone"}, Progress.TOKEN),
        (DONE, Progress.END),
        ({"type": "response.completed", "response": completed(1)}, Progress.END),
        ({"type": "response.incomplete", "response": completed(1)}, Progress.END),
        ({"object": "response", **completed(1)}, Progress.END),
        ({"error": {"message": "no state"}}, Progress.FAILED),
        ({"type": "error"}, Progress.FAILED),
        ({"type": "response.failed"}, Progress.FAILED),
        ({"choices": [{"text": "", "finish_reason": "abort"}]}, Progress.FAILED),
        ({"choices": [{"text": "a"}, {"finish_reason": "error"}]}, Progress.FAILED),
        ({"type": "response.completed", "response": completed(0)}, Progress.FAILED),
        ({"object": "response", **completed(1, "cancelled")}, Progress.FAILED),
    ],
)
def test_answers_and_events_say_how_far_an_engine_is(data: Any, progress: Progress) -> None:
    assert progress_of(data) is progress


def test_the_data_of_an_event_is_read() -> None:
    assert event_data(b'event: response.completed\ndata: {"a": 1}') == {"a": 1}
    assert event_data(b"data: [DONE]") == DONE
    assert event_data(b": comment") is None
    assert event_data(b"data: {") is None


def test_an_error_of_d_may_say_that_no_state_came() -> None:
    assert handoff_failed(json.loads('{"error": {"handoff": {"reason": "AGENT_LOST"}}}'))
    for other in ({"error": {"message": "out of memory"}}, {"error": "text"}, None):
        assert not handoff_failed(other)
