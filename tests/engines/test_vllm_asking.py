"""Requests ask who holds more of their prompts: once, not for long, and load what that is worth."""

from __future__ import annotations

import time
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from engines.test_prefix_giving import Cached
from engines.test_vllm_content import Lora
from engines.written_session import Request, Session
from restow.agents.engines.common import prefix_sharing
from restow.agents.engines.common.adapter_errors import SettingsError
from restow.agents.engines.common.blocks import Group
from restow.agents.engines.common.chains import RequestChains
from restow.agents.engines.common.prefix_sharing import (
    PATIENCE_MS,
    PrefixOffers,
    PrefixSharing,
)
from restow.agents.engines.common.registration import ConnectorSettings
from restow.agents.engines.vllm.scheduler.scheduler_side import SchedulerSide
from restow.broker.client import BrokerCallError, PrefixChain, PrefixHolder, chain_of

GROUPS = (Group("group.0", 32), Group("group.1", 32, 0))
PROMPT = list(range(100))
BLOCKS = ([1, 2, 3, 4], [0, 0, 0, 9])
PATIENT_MS = 600_000
"""A busy machine may take a test from its processor for longer than an engine waits."""


def finding(
    session: Session,
    role: str = "kv_both",
    cached_tokens: int | None = None,
    find_ms: int = PATIENT_MS,
) -> SchedulerSide:
    """Return a scheduler side that finds prefixes, and waits ``find_ms`` for each answer.

    ``cached_tokens`` are those of any request, keys and states alike; None: whatever vLLM counts.
    """
    settings = ConnectorSettings.of({"prefix": "find", "find_ms": find_ms})
    prefix = PrefixSharing("E", session, settings, RequestChains(32), GROUPS)
    told = None if cached_tokens is None else lambda _: cached_tokens or 0
    return SchedulerSide("E", "life", role, GROUPS, 0, session, settings, prefix, told)


def asking(
    computed_tokens: int, cached_tokens: int | None = None
) -> tuple[Session, SchedulerSide, Request]:
    """Return a side that has asked who holds the prompt of a new request."""
    session, request = Session(), plain()
    d = finding(session, cached_tokens=cached_tokens)
    d.new_request(request)
    assert d.loadable_tokens(request, computed_tokens) is None
    return session, d, request


def plain(tokens: int = 100, **more: Any) -> Request:
    return Request(list(PROMPT[:tokens]), None, **more)


def hold(*tokens: int, engine: str = "other") -> list[list[PrefixHolder]]:
    return [[PrefixHolder(engine, one, "", 0, False) for one in tokens]]


def test_what_another_engine_holds_is_asked_for_by_its_content() -> None:
    session, request = Session(), plain()
    d = finding(session)
    d.new_request(request)
    assert not session.questions, "nothing is known yet of what is cached here"
    assert d.loadable_tokens(request, 32) is None
    ((asked, answer),) = session.questions
    assert asked == PrefixChain(asked.form, chain_of(PROMPT).hashes[:6])
    assert d.loadable_tokens(request, 32) is None
    assert len(session.questions) == 1
    answer.set_result(hold(96, 64))
    assert d.loadable_tokens(request, 32) == 64
    assert d.decides("r")
    d.allocated(request, BLOCKS, 64)
    ((_, name, blocks, held, position),) = session.take()
    assert (blocks, held, position) == ({"group.0": [1, 2, 3, 4], "group.1": [9]}, 32, 96)
    assert session.given("prefix") == [chain_of(PROMPT).prefix(96)]
    assert session.given("content") == [b""]
    assert session.given("timeout_ms") == [PATIENCE_MS]
    # What a router says of a handoff that it names, nobody says of this one.
    assert session.given("position_tokens") == session.given("readers") == [0]
    assert session.given("takes_sampled_token") == [False]
    session.end(name)
    assert d.step().received == {"r": True}
    assert d.loadable_tokens(request, 0) == 0, "once, also after a preemption"
    assert d.finished(request, BLOCKS, computed=True) is None
    assert len(session.questions) == 1
    assert session.take() == []


def test_what_is_gone_meanwhile_is_computed() -> None:
    session, d, request = asking(0)
    session.questions[0][1].set_result(hold(96))
    assert d.loadable_tokens(request, 0) == 96
    d.allocated(request, BLOCKS, 96)
    session.end(session.take()[0][1], "CANCELLED", "NOT_HELD")
    assert d.step().received == {"r": False}
    assert d.loadable_tokens(request, 0) == 0
    assert d.tally.take()["failures"] == {"decode:NOT_HELD": 1}


@pytest.mark.parametrize(
    "holders",
    [[[]], hold(96, engine="E"), hold(32), hold(47)],
    ids=["nobody", "itself", "no more than here", "less than a quantum more"],
)
def test_what_is_not_worth_it_is_not_loaded(holders: list[list[PrefixHolder]]) -> None:
    session, d, request = asking(32)
    session.questions[0][1].set_result(holders)
    assert d.loadable_tokens(request, 32) == 0
    assert not d.decides("r")
    d.finished(request, BLOCKS, computed=True)
    assert session.take() == []


@pytest.mark.parametrize(("found", "keys"), [(96, 96), (64, 96), (64, 64)])
def test_a_state_among_the_keys_that_are_here_is_loaded_too(found: int, keys: int) -> None:
    # Restow asks vLLM to begin where the states are as well, and only for as long as that takes.
    session, d, request = asking(keys, cached_tokens=32)
    session.questions[0][1].set_result(hold(found))
    assert not d.wants_whole_hits
    assert d.loadable_tokens(request, keys) is None
    assert d.wants_whole_hits
    assert d.loadable_tokens(request, 32) == found - 32
    assert not d.wants_whole_hits
    d.allocated(request, BLOCKS, found - 32)
    ((_, _, _, held, position),) = session.take()
    assert (held, position) == (32, found)


def test_a_state_a_little_behind_the_keys_that_are_here_needs_no_other_beginning() -> None:
    session, d, request = asking(72, cached_tokens=32)
    session.questions[0][1].set_result(hold(80))
    assert d.loadable_tokens(request, 72) == 8


@pytest.mark.parametrize("found", [32, 47])
def test_keys_that_nobody_has_a_state_for_are_not_waited_for(found: int) -> None:
    session, d, request = asking(96, cached_tokens=32)
    session.questions[0][1].set_result(hold(found))
    assert d.loadable_tokens(request, 96) == 0
    assert not d.wants_whole_hits


def test_a_handoff_whose_keys_are_all_here_is_loaded_for_its_state() -> None:
    session, request = Session(), Request(PROMPT[:97], {"handoff_id": "h"})
    d = finding(session, "kv_consumer", cached_tokens=0)
    d.new_request(request)
    assert d.loadable_tokens(request, 96) is None
    assert d.wants_whole_hits
    assert d.finished(request, BLOCKS, computed=False) is None
    assert not d.wants_whole_hits, "the request has ended"
    session.take()
    d.new_request(request)
    assert d.loadable_tokens(request, 96) is None
    assert d.loadable_tokens(request, 0) == 96


def test_a_broker_that_is_silent_or_fails_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    session, requests = Session(), [plain(request_id=f"r{number}") for number in range(2)]
    d = finding(session, find_ms=ConnectorSettings().find_ms)
    for request in requests:
        d.new_request(request)
        assert d.loadable_tokens(request, 0) is None
    silent, failing = (answer for _, answer in session.questions)
    failing.set_exception(BrokerCallError("UNAVAILABLE", "BROKER_UNREACHABLE", "gone"))
    assert d.loadable_tokens(requests[1], 0) == 0
    until_s = time.monotonic() + 100 * ConnectorSettings().find_ms / 1e3
    while d.loadable_tokens(requests[0], 0) is None:
        assert time.monotonic() < until_s
    assert d.loadable_tokens(requests[0], 0) == 0
    assert silent.cancelled()
    said = [one.getMessage() for one in caplog.records]
    assert [words.partition("reason=")[2].split()[0] for words in said] == [
        "'BROKER_UNREACHABLE'",
        "'LATE'",
    ]


def test_who_cannot_be_helped_does_not_ask() -> None:
    session = Session()
    d = finding(session)
    handed = Request(list(PROMPT), {"do_remote_prefill": True, "handoff_id": "h"})
    for request, computed in (
        (plain(16), 0),  # a token at least is computed here
        (plain(100), 96),
        (plain(100, prompt_embeds=[0] * 100), 0),
        (plain(100, resumable=True), 0),
        (plain(100, skip=True), 0),
    ):
        d.new_request(request)
        assert d.loadable_tokens(request, computed) == 0
        d.finished(request, BLOCKS, computed=True)
    d.new_request(handed)
    assert d.loadable_tokens(handed, 0) == 99
    session.is_open = False
    d.new_request(plain(request_id="later"))
    assert d.loadable_tokens(plain(request_id="later"), 0) == 0
    assert not session.questions


def test_p_begins_its_own_prompt_with_what_others_hold() -> None:
    session = Session()
    p = finding(session, "kv_producer")
    request = Request(list(PROMPT[:98]), {"do_remote_decode": True, "handoff_id": "h"})
    p.new_request(request)
    assert p.loadable_tokens(request, 0) is None
    ((asked, answer),) = session.questions
    assert len(asked.hashes) == 6, "of a prompt cut to 97 tokens, one of which is computed here"
    answer.set_result(hold(96))
    assert p.loadable_tokens(request, 0) == 96
    p.allocated(request, BLOCKS, 96)
    assert [one[0] for one in session.take()] == ["publish", "request"]
    assert p.finished(request, BLOCKS, computed=False) is None
    assert [one[0] for one in session.take()] == ["cancel", "cancel"]


def test_prompts_of_an_adapter_that_nobody_knows_are_nobodys() -> None:
    lora = Lora("/a")
    for words, one, asks in (
        ([], lora, False),
        ([{"a": "word"}], lora, True),
        ([{"a": "word"}, {"a": "other"}], lora, False),
        ([], None, True),
    ):
        session, request = Session(), plain(lora_request=one)
        d = finding(session)
        for told in words:
            d.loaded(told)
        d.new_request(request)
        assert (d.loadable_tokens(request, 0) is None) == asks, words
        assert len(session.questions) == asks
        d.finished(request, BLOCKS, computed=True)


def test_a_prompt_whose_adapter_is_loaded_again_is_followed_no_longer() -> None:
    session, request = Session(), plain(lora_request=Lora("/a"))
    d = finding(session)
    d.loaded({"a": "word"})
    d.new_request(request)
    d.loaded({"a": "other"})
    assert d.loadable_tokens(request, 0) == 0
    assert not session.questions


def test_an_engine_of_weights_that_nobody_can_tell_from_others_uses_no_prefixes() -> None:
    for words in ("find", "find+tell"):
        settings = ConnectorSettings.of({"prefix": words})
        settings.check_weights("sha256-1")
        with pytest.raises(SettingsError, match="model_revision"):
            settings.check_weights("")
    ConnectorSettings().check_weights("")


def test_without_the_setting_nobody_is_asked() -> None:
    session, request = Session(), plain()
    d = SchedulerSide("E", "life", "kv_both", GROUPS, 0, session, ConnectorSettings())
    d.new_request(request)
    assert d.loadable_tokens(request, 0) == 0
    assert d.step().fences == []
    assert not d.pending
    assert not session.questions


def test_where_replies_ended_in_a_recurrent_models_prompt_is_asked_for_too() -> None:
    # D asks at the places before and behind the token that ended a reply: some engines compute a
    # step ahead.
    session = Session()
    d = finding(session)
    tokens = [*range(10, 50), 2, *range(60, 100), 3, *range(10, 20), 2]
    stops = SimpleNamespace(all_stop_token_ids={2, 3})
    request = Request(tokens, None, sampling_params=stops)
    d.new_request(request)
    assert d.loadable_tokens(request, 0) is None
    ((asked, answer),) = session.questions
    assert asked.ends == chain_of(tokens, ends_tokens=[40, 41, 81, 82, 92]).ends
    answer.set_result(hold(82))
    assert d.loadable_tokens(request, 32) == 50
    d.allocated(request, BLOCKS, 50)
    assert session.given("prefix") == [chain_of(tokens, ends_tokens=[82]).prefix(82)]


def test_a_reply_that_moves_waits_until_its_state_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    # The broker hears of the state after the client has heard of the move.
    patience_s = 600.0
    monkeypatch.setattr(prefix_sharing, "MOVED_S", patience_s)
    monkeypatch.setattr(prefix_sharing, "MOVED_AGAIN_S", 0.0)
    session = Session()
    d = finding(session)
    requests = [Request(PROMPT, {"moved": True}, name) for name in ("known later", "never known")]
    for request in requests:
        d.new_request(request)
        for _ in range(3):
            assert d.loadable_tokens(request, 0) is None
            session.questions[-1][1].set_result(hold(64))
    assert len(session.questions) == 6
    assert d.loadable_tokens(requests[0], 0) is None
    session.questions[-1][1].set_result(hold(64, 99))
    assert d.loadable_tokens(requests[0], 0) == 99
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + patience_s)
    assert d.loadable_tokens(requests[1], 0) == 64


def test_a_model_without_states_is_found_by_its_blocks_alone() -> None:
    session = Session()
    settings, groups = ConnectorSettings.of({"prefix": "find"}), (Group("group.0", 32),)
    prefix = PrefixSharing("E", session, settings, RequestChains(32), groups)
    d = SchedulerSide("E", "life", "kv_both", groups, 0, session, settings, prefix)
    request = plain(sampling_params=SimpleNamespace(all_stop_token_ids={40}))
    d.new_request(request)
    assert d.loadable_tokens(request, 0) is None
    assert session.questions[0][0].ends == ()


class Fork:
    """Two requests at an engine that caches, which begin with one state of another engine."""

    def __init__(self, held_tokens: int = 96) -> None:
        session = Session()
        settings = ConnectorSettings.of({"prefix": "find+tell", "find_ms": PATIENT_MS})
        of_cache = RequestChains(32), GROUPS, Cached([]), PrefixOffers(lambda: None)
        prefix = PrefixSharing("E", session, settings, *of_cache)
        self.d = SchedulerSide("E", "life", "kv_both", GROUPS, 0, session, settings, prefix)
        self.first, self.second = plain(request_id="first"), plain(request_id="second")
        for request in (self.first, self.second):
            self.d.new_request(request)
            assert self.d.loadable_tokens(request, 0) is None
        for _, answer in session.questions:
            answer.set_result(hold(held_tokens))
        assert self.d.loadable_tokens(self.first, 0) == held_tokens
        self.d.allocated(self.first, BLOCKS, held_tokens)


def test_a_state_with_which_two_requests_begin_is_read_once() -> None:
    fork = Fork()
    assert fork.d.loadable_tokens(fork.second, 0) is None
    assert fork.d.decides("first"), "vLLM tells when the request begins"
    assert fork.first.shared_prefix_boundary == 96, "vLLM keeps the state that is loaded"
    fork.d.allocated(fork.first, BLOCKS, 0)
    assert fork.d.loadable_tokens(fork.second, 0) is None, "vLLM caches states with the next step"
    fork.d.step()
    assert not fork.d.decides("first")
    assert fork.d.loadable_tokens(fork.second, 96) == 0
    assert not fork.d.decides("second")


@pytest.mark.parametrize("failed", ["load", "request", "weights"])
def test_a_request_that_waits_for_anothers_load_loads_the_state_if_that_fails(failed: str) -> None:
    fork = Fork()
    assert fork.d.loadable_tokens(fork.second, 0) is None
    if failed == "load":
        assert fork.d.loadable_tokens(fork.first, 0) == 0, "it asks once"
    elif failed == "request":
        fork.d.finished(fork.first, BLOCKS, computed=False)
    else:
        fork.d._replaced("v2")
        assert fork.d.loadable_tokens(fork.second, 0) == 0, "it begins without"
        return
    assert fork.d.loadable_tokens(fork.second, 0) == 96
    fork.d.allocated(fork.second, BLOCKS, 96)


def test_a_state_that_is_not_cached_when_it_is_loaded_is_read_by_each_request() -> None:
    # It stands between the ends of this engine's blocks.
    fork = Fork(80)
    assert fork.d.loadable_tokens(fork.second, 0) == 80
    assert fork.first.shared_prefix_boundary == 0
