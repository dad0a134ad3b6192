"""An engine asks who holds prefixes, tells what its cache holds, and hands that over when asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from engines.chained import TOKENS, prompt
from engines.written_session import Session
from restow.agents.engines.common.blocks import Group
from restow.agents.engines.common.chains import RequestChains
from restow.agents.engines.common.holdings import (
    CacheChanges,
    EvictedBlocks,
    HeldBlocks,
    StatesToKeep,
)
from restow.agents.engines.common.prefill_decode import DecodeSide
from restow.agents.engines.common.prefix_sharing import PrefixOffers, PrefixSharing
from restow.agents.engines.common.registration import ConnectorSettings
from restow.broker.client import (
    BrokerCallError,
    HashForm,
    Offer,
    Prefix,
    PrefixHolder,
    chain_of,
)

HYBRID = (Group("full", 16), Group("states", 16, 0))
ATTENTION = (Group("full", 16),)
STATE = chain_of(TOKENS, 8).prefix(32)


@dataclass
class Cached:
    """A prefix cache of which the test says what it holds."""

    held: list[Prefix]
    news: CacheChanges = field(default_factory=CacheChanges)
    pending: bool = False
    pinned_blocks: int = 0
    let_go_of: list[Prefix] = field(default_factory=list)
    keeps_replies: bool = True
    room: int = 100
    """How many states can be pinned."""
    done: list[str] = field(default_factory=list)

    def changes(self) -> CacheChanges:
        news, self.news = self.news, CacheChanges()
        return news

    def holds(self, prefix: Prefix) -> bool:
        return prefix in self.held

    def pin_state(self, prefix: Prefix) -> Any:
        if prefix not in self.held or not self.room:
            return None
        self.room -= 1
        return SimpleNamespace(blocks={"full": [1, 2]}, prefix=prefix)

    def let_go(self, pin: Any) -> None:
        self.let_go_of.append(pin.prefix)

    def replied(self, name: bytes, tokens: int, blocks: Mapping[str, Sequence[int]]) -> bool:
        self.done.append("replied")
        return self.keeps_replies

    def finished(self, request_id: str) -> None:
        self.done.append(request_id)

    def forget(self) -> None:
        self.done.append("forget")

    def forget_ends(self) -> None:
        self.done.append("forget ends")


@dataclass
class Engine:
    """An engine that tells and hands over, and the broker's words to it."""

    groups: Sequence[Group] = HYBRID
    session: Session = field(default_factory=Session)

    def __post_init__(self) -> None:
        self.cached = Cached([STATE])
        self.woken: list[str] = []
        self.offers = PrefixOffers(lambda: self.woken.append("woken"))
        self.kept = StatesToKeep()
        self.chains = RequestChains(8)
        settings = ConnectorSettings.of({"prefix": "find+tell"})
        of_cache = self.groups, self.cached, self.offers, self.kept
        self.sharing = PrefixSharing("E", self.session, settings, self.chains, *of_cache)

    def offer(self, prefix: Prefix, handoff_id: str = "h", within_ms: int = 60_000) -> None:
        self.offers.hear(Offer(handoff_id, prefix, b"content", within_ms))

    def request(self, begins_with: int = 0) -> None:
        """Have a request of all tokens come, which begins with a state that is cached here."""
        self.sharing.new_request("r", prompt(TOKENS), asks=False)
        decode = DecodeSide(self.session, 1)
        assert self.sharing.look("r", begins_with, len(TOKENS) - 1, decode, "")


def test_an_offer_waits_while_too_much_is_pinned() -> None:
    engine = Engine()
    engine.cached.room = 1
    for name in ("first", "second", "late"):
        engine.offer(STATE, name, within_ms=1 if name == "late" else 60_000)
    assert engine.sharing.step() == ["first"]
    assert engine.session.take() == [("publish", "first", {"full": [1, 2]}, 32, True)]
    assert engine.sharing.step() == []
    time.sleep(0.002)
    engine.session.end("first")
    engine.cached.room = 1
    assert engine.sharing.step() == ["second"]
    assert engine.session.take() == [("publish", "second", {"full": [1, 2]}, 32, True)]


def test_an_offered_state_stays_until_it_was_read() -> None:
    engine = Engine()
    assert not engine.sharing.pending
    engine.offer(STATE)
    assert engine.woken == ["woken"]
    assert engine.sharing.pending
    assert engine.sharing.step() == ["h"]
    assert engine.session.take() == [("publish", "h", {"full": [1, 2]}, 32, True)]
    assert engine.session.given("content") == [b"content"]
    assert engine.session.given("lease_ms") == [ConnectorSettings().lease_ms]
    assert engine.session.given("hold_ms") == [ConnectorSettings().hold_ms]
    engine.offer(STATE)
    assert engine.sharing.step() == []
    assert engine.session.take() == [("decline offer", "h")], "it is published already"
    assert not engine.sharing.pending
    engine.session.end("h")
    assert engine.woken == ["woken"] * 3
    assert engine.sharing.pending
    assert engine.cached.let_go_of == []
    assert engine.sharing.step() == []
    assert engine.cached.let_go_of == [STATE]
    engine.offer(STATE)
    assert engine.sharing.step() == ["h"], "of this name again"


@pytest.mark.parametrize(
    ("prefix", "within_ms", "declined"),
    [
        (chain_of(TOKENS, 8).prefix(16), 60_000, True),  # not held
        (replace(STATE, salt="s"), 60_000, True),
        (replace(STATE, form=HashForm("other", 8)), 60_000, True),
        (STATE, 0, False),  # it is over before it is heard
    ],
)
def test_other_offers_are_not_taken(prefix: Prefix, within_ms: int, declined: bool) -> None:
    engine = Engine()
    engine.cached.held += [replace(STATE, salt="s"), replace(STATE, form=HashForm("other", 8))]
    engine.offer(prefix, within_ms=within_ms)
    assert engine.sharing.step() == []
    assert engine.session.take() == [("decline offer", "h")] * declined


@pytest.mark.parametrize(("passed_s", "taken"), [(19.0, ["h"]), (21.0, [])])
def test_an_offer_is_open_for_as_long_as_it_says(
    passed_s: float, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("restow.agents.engines.common.prefix_sharing.time", clock)
    engine = Engine()
    engine.offer(STATE, within_ms=20_000)
    now_s[0] += passed_s
    assert engine.sharing.step() == taken


def test_what_the_broker_refuses_or_unknown_weights_have_computed_is_not_handed_over() -> None:
    class Closed(Session):
        def publish(self, *_: Any, **more: Any) -> Any:
            raise BrokerCallError("UNAVAILABLE", "X", "closed")

    engine = Engine(session=Closed())
    engine.offer(STATE)
    assert engine.sharing.step() == []
    assert engine.session.take() == [("decline offer", "h")]
    assert engine.cached.let_go_of == [STATE]
    engine = Engine()
    engine.cached.news = CacheChanges((), (HeldBlocks("full", (b"a",)),))
    engine.offer(STATE)
    assert engine.sharing.step(known=False) == []
    assert engine.session.take() == [("decline offer", "h")]


def test_what_came_and_went_is_told_before_what_a_store_should_have() -> None:
    engine = Engine()
    first, second = STATE.hashes[1], STATE.hashes[3]
    engine.kept.note(STATE)
    gone, come = EvictedBlocks("full", (first,)), HeldBlocks("full", (second,), first)
    engine.cached.news = CacheChanges((gone,), (come,))
    assert engine.sharing.step() == []
    told = [("evict", "full", (first,)), ("hold", "full", (second,), first), ("keep", STATE)]
    assert engine.session.take() == told
    engine.cached.news = CacheChanges((EvictedBlocks("full", (second,)),))
    engine.sharing.step()
    assert engine.kept.newest() == []


@pytest.mark.parametrize(
    ("groups", "tokens", "kept"),
    [
        (HYBRID, 37, [37]),
        (HYBRID, 32, [32]),
        (ATTENTION, 37, [32]),  # vLLM has cached the whole blocks itself
        (ATTENTION, 15, []),
    ],
)
def test_states_after_replies_are_worth_keeping(
    groups: Sequence[Group], tokens: int, kept: list[int]
) -> None:
    engine = Engine(groups)
    engine.request()
    name = chain_of(TOKENS, 8, ends_tokens=[37]).prefix(37).end_hash
    engine.sharing.replied("r", tokens, {}, name)
    engine.sharing.replied("unknown", tokens, {}, name)
    found = engine.kept.take_new(lambda prefix: True)
    assert found == [chain_of(TOKENS, 8, ends_tokens=[37]).prefix(one) for one in kept]
    engine.sharing.finished("r")
    assert engine.cached.done[-1] == "r"


def test_a_state_after_a_reply_that_was_not_kept_is_not_worth_keeping() -> None:
    engine = Engine()
    engine.cached.keeps_replies = False
    engine.request()
    engine.sharing.replied("r", 32, {}, b"")
    assert engine.kept.take_new(lambda prefix: True) == []


@pytest.mark.parametrize(
    ("groups", "begins_with", "kept"),
    [(HYBRID, 32, [32]), (HYBRID, 36, []), (HYBRID, 0, []), (ATTENTION, 32, [])],
)
def test_a_state_that_two_requests_begin_with_is_worth_keeping(
    groups: Sequence[Group], begins_with: int, kept: list[int]
) -> None:
    engine = Engine(groups)
    for _ in range(2):
        engine.request(begins_with)
        engine.sharing.finished("r")
    found = engine.kept.take_new(lambda prefix: True)
    assert found == [chain_of(TOKENS, 8).prefix(tokens) for tokens in kept]


def test_what_replaced_weights_have_computed_is_forgotten() -> None:
    engine = Engine()
    engine.kept.note(STATE)
    engine.request(begins_with=32)
    engine.sharing.forget()
    engine.sharing.forget_cached()
    assert engine.cached.done == ["forget ends", "forget"]
    engine.sharing.finished("r")
    engine.request(begins_with=32)
    engine.sharing.finished("r")
    assert engine.kept.take_new(lambda prefix: True) == []


class Finding:
    """An engine that only finds prefixes, and the questions of its requests."""

    def __init__(self) -> None:
        self.session = Session()
        settings = ConnectorSettings.of({"prefix": "find"})
        self.sharing = PrefixSharing("E", self.session, settings, RequestChains(8), HYBRID)
        self.decode = DecodeSide(self.session, 1)

    def ask(self, request_id: str = "r") -> None:
        """Have a new request ask who holds its prompt."""
        self.sharing.new_request(request_id, prompt(TOKENS), asks=True)
        assert not self.look(request_id)

    def look(self, request_id: str = "r") -> bool:
        return self.sharing.look(request_id, 8, len(TOKENS), self.decode, "")

    def answer(self, tokens: int) -> None:
        holder = PrefixHolder("other", tokens, "", 0, False)
        self.session.questions[-1][1].set_result([[holder]])

    @property
    def given_up(self) -> bool:
        """Whether the last question was given up."""
        return self.session.questions[-1][1].cancelled()


@pytest.mark.parametrize(("tokens", "found"), [(15, 0), (16, 16), (40, 40)])
def test_a_state_is_worth_it_that_stands_a_quantum_behind_what_is_here(
    tokens: int, found: int
) -> None:
    engine = Finding()
    engine.ask()
    engine.answer(tokens)
    assert engine.look()
    assert engine.decode.loadable_tokens("r", 0) == found


@pytest.mark.parametrize(("last_tokens", "hashes"), [(15, None), (16, 2), (31, 3), (40, 5)])
def test_a_question_is_of_the_tokens_that_may_be_loaded(
    last_tokens: int, hashes: int | None
) -> None:
    engine = Finding()
    engine.sharing.new_request("r", prompt(TOKENS), asks=True)
    waits = not engine.sharing.look("r", 8, last_tokens, engine.decode, "")
    assert waits == (hashes is not None)
    asked = [len(chain.hashes) for chain, _ in engine.session.questions]
    assert asked == ([] if hashes is None else [hashes])


def test_questions_end_with_their_requests_and_with_the_weights() -> None:
    engine = Finding()
    engine.ask()
    engine.sharing.finished("r")
    assert engine.given_up
    engine.ask()
    engine.sharing.forget()
    assert engine.given_up
    assert engine.look()
    assert not engine.decode.waits("r")
    engine.sharing.new_request("new", prompt(TOKENS), asks=True)
    engine.sharing.forget()
    assert engine.look("new"), "it does not ask any more"
    assert len(engine.session.questions) == 2


def test_questions_without_an_answer_are_logged_once_until_one_is_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Finding()
    for number, fails in enumerate((True, True, False, True)):
        engine.ask(f"r{number}")
        if fails:
            error = BrokerCallError("UNAVAILABLE", "BROKER_UNREACHABLE", "gone")
            engine.session.questions[-1][1].set_exception(error)
        else:
            engine.answer(0)
        assert engine.look(f"r{number}")
        assert len(caplog.records) == (1 if number < 3 else 2)


def test_an_engine_that_only_finds_tells_and_hands_over_nothing() -> None:
    sharing = Finding().sharing
    assert not sharing.pending
    assert sharing.step() == []
    assert sharing.pinned_blocks == 0
    telling = Engine()
    telling.cached.pinned_blocks = 3
    assert telling.sharing.pinned_blocks == 3


def test_a_prefix_whose_handoff_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = Engine()
    for handoff_id, end in (("done", ("DONE", "")), ("failed", ("FAILED", "AGENT_LOST"))):
        engine.offer(STATE, handoff_id)
        engine.sharing.step()
        engine.session.end(handoff_id, *end)
        engine.sharing.step()
    assert ["handoff='failed'" in record.getMessage() for record in caplog.records] == [True]
