"""Which side of which handoff a request is, and where its prompt is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines.written_session import Request
from restow.agents.engines.common.adapter_errors import ParametersError, SettingsError
from restow.agents.engines.common.blocks import backoff_tokens, position_tokens
from restow.agents.engines.common.registration import ConnectorSettings
from restow.agents.engines.vllm.scheduler.requests import (
    AnswerIndex,
    HandoffParameters,
    HandoffSide,
    answer_index,
    marks_of,
    parameters_of,
    truncate,
)
from restow.broker.client import Credentials

ALONE = AnswerIndex()


def said(
    params: object, kv_role: str, default_id: str, index: AnswerIndex = ALONE
) -> HandoffParameters | None:
    return parameters_of(params, kv_role, default_id, index)


def test_routers_made_for_vllm_say_the_side_by_themselves() -> None:
    assert said({"do_remote_decode": True}, "kv_both", "P/1/r") == HandoffParameters(
        HandoffSide.PREFILL, "P/1/r"
    )
    given = HandoffParameters(HandoffSide.PREFILL, "P/1/r").answer("P", "r", 99)
    assert said(given, "kv_both", "D/1/q") == HandoffParameters(HandoffSide.DECODE, "P/1/r")


@pytest.mark.parametrize(
    ("role", "side"), [("kv_producer", HandoffSide.PREFILL), ("kv_consumer", HandoffSide.DECODE)]
)
def test_a_handoff_id_alone_is_enough_where_the_role_says_the_side(
    role: str, side: HandoffSide
) -> None:
    assert said({"handoff_id": "h"}, role, "other") == HandoffParameters(side, "h")


def test_a_transfer_id_names_the_handoff_where_no_handoff_id_does() -> None:
    params = {"do_remote_prefill": True, "transfer_id": "tx1", "remote_engine_id": "10.0.0.1:6301"}
    assert said(params, "kv_both", "id") == HandoffParameters(HandoffSide.DECODE, "tx1")
    asked = {"do_remote_decode": True, "transfer_id": "tx1"}
    assert said(asked, "kv_both", "id") == HandoffParameters(HandoffSide.PREFILL, "tx1")
    both = {**params, "handoff_id": "h"}
    assert said(both, "kv_both", "id") == HandoffParameters(HandoffSide.DECODE, "h")


def test_a_router_may_say_how_long_d_waits() -> None:
    params = {"handoff_id": "h", "timeout_ms": 500}
    assert said(params, "kv_consumer", "other") == HandoffParameters(HandoffSide.DECODE, "h", 500)
    assert said(params, "kv_producer", "other") == HandoffParameters(HandoffSide.PREFILL, "h")
    assert said({"do_remote_prefill": True, **params}, "kv_both", "other") == HandoffParameters(
        HandoffSide.DECODE, "h", 500
    )


def test_a_router_may_name_several_readers() -> None:
    given = said({"do_remote_decode": True, "handoff_id": "h", "readers": 3}, "kv_both", "id")
    assert given == HandoffParameters(HandoffSide.PREFILL, "h", readers=3)
    handed_on = given.answer("P", "r", 99)
    assert handed_on["readers"] == 3
    asked = said(handed_on, "kv_both", "D/1/q")
    assert asked == HandoffParameters(HandoffSide.DECODE, "h", readers=3)


def test_a_request_without_parameters_has_no_part() -> None:
    for params in (None, {}, {"do_remote_decode": False, "do_remote_prefill": False}):
        assert said(params, "kv_both", "id") is None


@pytest.mark.parametrize(
    "params",
    [
        {"handoff_id": ""},
        {"handoff_id": 7},
        {"handoff_id": "h"},
        {"do_remote_decode": True, "handoff_id": "h", "timeout_ms": -1},
        {"do_remote_decode": True, "handoff_id": "h", "timeout_ms": 1.5},
        {"do_remote_decode": True, "handoff_id": "h", "timeout_ms": True},
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "P"},
        {"do_remote_decode": True, "handoff_id": "h", "choices": 0},
        {"do_remote_decode": True, "handoff_id": "h", "choices": True},
        {"do_remote_decode": True, "handoff_id": "h", "choices": 129},
        {"do_remote_decode": True, "handoff_id": "h", "timeout_ms": 600_001},
        {"do_remote_decode": True, "do_remote_prefill": True, "handoff_id": "h"},
        {"do_remote_decode": "yes"},
        {"do_remote_decode": False, "remote_engine_id": "P"},
        {"unknown": 1},
        {"do_remote_decode": True, "handoff_id": "h", "readers": -1},
        {"do_remote_decode": True, "handoff_id": "h", "readers": True},
        {"do_remote_prefill": True, "handoff_id": "h", "readers": 65},
        "h",
        [1],
    ],
)
def test_parameters_that_name_no_side_or_no_handoff_are_refused(params: object) -> None:
    with pytest.raises(ParametersError):
        said(params, "kv_both", "id")


def test_what_a_client_said_is_quoted_in_part() -> None:
    for params in ({"handoff_id": "x" * 20_000}, {"handoff_id": ["x" * 20_000]}):
        with pytest.raises(ParametersError) as refused:
            said({"do_remote_decode": True, **params}, "kv_both", "id")
        assert len(refused.value.message) < 200
    longest = "ä" * 512
    given = said({"do_remote_decode": True, "handoff_id": longest}, "kv_both", "id")
    assert given is not None
    assert given.handoff_id == longest


def test_a_list_of_prompts_needs_an_id_of_the_router_s() -> None:
    # P's answer has one `kv_transfer_params` for all of its prompts.
    index = answer_index("cmpl-x-1-0123abcd")
    with pytest.raises(ParametersError, match="list of prompts"):
        said({"do_remote_decode": True}, "kv_producer", "P/1/x", index)
    named = said({"do_remote_decode": True, "handoff_id": "h"}, "kv_producer", "P/1/x", index)
    assert named is not None
    assert named.handoff_ids(index) == ["h/prompt1"]


@pytest.mark.parametrize(
    ("recurrent", "windows", "lookahead", "tokens"),
    [(0, 0, 0, 0), (1, 0, 0, 1), (0, 1, 0, 1), (1, 1, 0, 1), (1, 0, 4, 3), (0, 1, 4, 3)],
)
def test_what_d_computes_anew(recurrent: int, windows: int, lookahead: int, tokens: int) -> None:
    assert backoff_tokens(bool(recurrent), bool(windows), lookahead) == tokens


def test_a_prompt_is_cut_once_however_often_it_comes_back() -> None:
    request = Request(list(range(10)), {"do_remote_decode": True})
    for _ in range(3):
        truncate(request, 1)
    assert request.prompt_token_ids == request._all_token_ids == list(range(9))
    assert (request.num_prompt_tokens, request.max_tokens) == (9, 1)
    assert position_tokens(10, 1) == request.num_prompt_tokens


def test_embeddings_are_cut_like_tokens() -> None:
    request = Request(None, {"do_remote_decode": True}, prompt_embeds=torch.arange(10))
    truncate(request, 1)
    assert request.prompt_embeds.tolist() == list(range(9))
    assert (request.num_prompt_tokens, len(request._all_token_ids)) == (9, 9)


@pytest.mark.parametrize(
    "request_", [Request([1], {}), Request([1, 2], None), Request([1, 2], {}, skip=True)]
)
def test_prompts_that_are_left_alone(request_: Request) -> None:
    before = list(request_._all_token_ids)
    truncate(request_, 1)
    assert request_._all_token_ids == before
    assert request_.max_tokens == 16


def test_keys_and_values_alone_keep_the_whole_prompt() -> None:
    request = Request([1, 2, 3], {"do_remote_decode": True})
    truncate(request, backoff_tokens(recurrent=False, lookahead_tokens=0))
    assert request.num_prompt_tokens == position_tokens(3, 0) == 3


def test_settings_are_read_and_checked() -> None:
    assert ConnectorSettings.of({}) == ConnectorSettings()
    made = ConnectorSettings.of({"broker": "h:1", "connect_timeout_s": 5, "lease_ms": 1000})
    assert (made.broker, made.connect_timeout_s, made.lease_ms) == ("h:1", 5.0, 1000)
    several = ConnectorSettings.of({"broker": ["h:1", "i:2"]})
    assert several == ConnectorSettings.of({"broker": "h:1,i:2"})
    uses = [ConnectorSettings.of({"prefix": one}) for one in ("off", "find", "find+tell")]
    assert [(one.finds, one.tells) for one in uses] == [(False, False), (True, False), (True, True)]


def test_settings_say_what_is_shown_to_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ConnectorSettings.of({}).credentials() == Credentials()
    monkeypatch.setenv("RESTOW_TLS_CA", "/env/ca.pem")
    monkeypatch.setenv("RESTOW_TOKEN_FILE", "/env/token")
    assert ConnectorSettings.of({"token_file": "/own/token"}).credentials() == Credentials(
        Path("/env/ca.pem"), token_file=Path("/own/token")
    )
    given = {"tls_ca": "/ca.pem", "tls_cert": "/cert.pem", "tls_key": "/key.pem"}
    monkeypatch.delenv("RESTOW_TOKEN_FILE")
    assert ConnectorSettings.of(given).credentials() == Credentials(*map(Path, given.values()))


@pytest.mark.parametrize(
    "extra",
    [
        {"brokr": "h:1"},
        {"broker": 7},
        {"lease_ms": 0},
        {"hold_ms": "x"},
        {"hold_ms": True},
        {"prefix": "tell"},
        {"prefix": True},
    ],
)
def test_settings_that_say_nothing_sensible_name_the_key(extra: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=next(iter(extra))):
        ConnectorSettings.of(extra)


@pytest.mark.parametrize(
    "marks", [[0], [101], [-1], ["1"], [True], [1.0], 5, "all", [*range(1, 66)]]
)
def test_marks_outside_of_the_prompt_and_other_things_are_no_marks(marks: object) -> None:
    with pytest.raises(ParametersError, match="mark"):
        marks_of({"marks": marks}, 100)


def test_marks_rise_and_stand_beside_a_handoff_or_alone() -> None:
    params = {"marks": [100, 5, 5]}
    assert marks_of(params, 100) == [5, 100]
    assert marks_of({}, 100) == []
    for alone in (params, {"movable": True}, {"moved": True}):
        assert said(alone, "kv_both", "P/1/r") is None
    assert said({**params, "do_remote_decode": True}, "kv_both", "P/1/r") is not None
