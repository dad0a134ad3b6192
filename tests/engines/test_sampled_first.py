"""P computes the whole prompt and says what it sampled, or stops before the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engines.written_session import (
    BLOCKS,
    GROUPS,
    PROMPT,
    Request,
    Session,
    chunk,
    computed,
    decode,
    prefill,
    side,
)
from restow.agents.engines.common.registration import ConnectorSettings
from restow.agents.engines.vllm.scheduler.requests import why_not_handed_on
from restow.agents.engines.vllm.scheduler.scheduler_side import SchedulerSide

PLAIN = {"seed": None, "temperature": 0.0}
TOKEN = 7


def params(**more: Any) -> SimpleNamespace:
    """Return vLLM's `SamplingParams` with some parameters set."""
    return SimpleNamespace(**{**PLAIN, **more})


def begun(lookahead_tokens: int = 0, **more: Any) -> tuple[Session, Any, Request]:
    session, request = Session(), prefill(sampled_token=True)
    p = side(session, lookahead_tokens=lookahead_tokens)
    request.sampling_params = params(**more)
    p.new_request(request)
    session.take()
    return session, p, request


def test_p_publishes_the_whole_prompt_and_its_token() -> None:
    session, p, request = begun()
    assert (request.num_prompt_tokens, request.max_tokens) == (10, 1)
    assert [p.step(chunk(tokens)).fences for tokens in (9, 10)] == [[], ["h"]]
    request.output_token_ids = [TOKEN]
    given = computed(p, request, 10)
    assert session.take() == [("publish", "h", {"group.0": [1, 2, 3], "group.1": [5]}, 10, True)]
    assert session.given("sampled_token") == [None, TOKEN]
    assert given is not None
    assert (given["sampled_token"], given["remote_num_tokens"]) == (True, 10)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"seed": 1, "temperature": 0.5}, "seed"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": -0.1}, "frequency_penalty"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"logprobs": 0}, "logprobs"),
        ({"structured_outputs": object()}, "structured_outputs"),
    ],
)
def test_p_stops_before_the_end_where_d_must_sample(more: dict[str, Any], why: str) -> None:
    session, p, request = begun(**more)
    assert (request.num_prompt_tokens, request.max_tokens) == (9, 1)
    request.output_token_ids = [TOKEN]
    given = computed(p, request)
    assert session.given("sampled_token") == [None, None]
    assert given is not None
    assert "sampled_token" not in given
    assert why_not_handed_on(Request(list(PROMPT), None, sampling_params=params(**more))) == why


def named(role: str, **more: Any) -> bytes:
    """Return the content by which P or D names the state of a request with these parameters."""
    session = Session()
    request = prefill(sampled_token=True) if role == "P" else decode(sampled_token=True)
    request.sampling_params = params(**more)
    waits: list[tuple[object, object]] = []
    waiting: Any = SimpleNamespace(wait=lambda *told: waits.append(told), finish=lambda *_: None)
    settings = ConnectorSettings()
    one = SchedulerSide("E", "life", "kv_both", GROUPS, 0, session, settings, sampled=waiting)
    one.new_request(request)
    request.output_token_ids = [TOKEN]
    if role == "P":
        computed(one, request, 10)
    else:
        one.allocated(request, BLOCKS, 10)
        assert waits == [(request, session.ends["h"])]
        assert session.given("takes_sampled_token") == [True]
    content: bytes = session.given("content")[-1]
    return content


def test_p_and_d_name_the_state_alike_where_they_were_told_the_same_of_the_token() -> None:
    assert named("P") == named("D", max_tokens=9, stop_token_ids=[1], skip_special_tokens=False)
    alike = {"logit_bias": {3: 1.0, 2: 2.0}, "allowed_token_ids": [5, 4]}
    again = {"logit_bias": {2: 2.0, 3: 1.0}, "allowed_token_ids": [4, 5, 5]}
    assert named("P", **alike) == named("D", **again)


@pytest.mark.parametrize(
    "more",
    [
        {"allowed_token_ids": [1, 2]},
        {"logit_bias": {1: -100.0}},
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"top_k": 4},
        {"min_p": 0.1},
        {"repetition_penalty": 1.5},
    ],
)
def test_what_decides_a_token_is_compared(more: dict[str, Any]) -> None:
    assert named("P") != named("D", **more)
    assert named("P", **more) != named("D")


def test_a_seed_that_draws_nothing_is_none() -> None:
    request = Request(list(PROMPT), None, sampling_params=params(seed=1))
    assert why_not_handed_on(request) == ""


@pytest.mark.parametrize("more", [{"prompt_embeds": [0] * 10}, {"resumable": True}])
def test_a_prompt_that_is_not_of_tokens_or_goes_on_later_is_d_s(more: dict[str, Any]) -> None:
    request = Request(list(PROMPT), None, sampling_params=params(), **more)
    assert why_not_handed_on(request)


def test_who_drafts_ahead_samples_for_nobody() -> None:
    _, _, request = begun(lookahead_tokens=4)
    assert request.num_prompt_tokens == 7


@pytest.mark.parametrize("said", [[], [1, 2]])
def test_a_p_that_has_not_sampled_once_gives_up(said: list[int]) -> None:
    session, p, request = begun()
    request.output_token_ids = said
    assert computed(p, request, 10) is None
    assert session.take() == [("cancel", "h")]


def test_without_the_routers_word_p_stops_before_the_end() -> None:
    request = prefill()
    request.sampling_params = params()
    side(Session()).new_request(request)
    assert request.num_prompt_tokens == 9
