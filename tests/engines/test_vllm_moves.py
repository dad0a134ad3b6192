"""Replies end so that other engines go on with them: those that can, when that is ordered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engines.test_prefix_giving import Cached
from engines.test_vllm_asking import GROUPS, PROMPT
from engines.written_session import Request, Session
from restow.agents.engines.common.chains import RequestChains
from restow.agents.engines.common.prefix_sharing import PrefixOffers, PrefixSharing
from restow.agents.engines.common.registration import ConnectorSettings
from restow.agents.engines.vllm.scheduler.moves import (
    MOVED_REASON,
    MoveOrders,
    end_for_move,
    is_movable,
)
from restow.agents.engines.vllm.scheduler.scheduler_side import SchedulerSide
from restow.broker.client import Prefix, StateOrder, chain_of
from restow.broker.state_commands import Answer, Outcome, Verb


def replying(said_tokens: int = 3, **more: Any) -> Any:
    """Return a request whose reply has some tokens."""
    sampling = SimpleNamespace(stop=None, seed=None, temperature=1.0)
    request = Request([1, 2], {"movable": True}, sampling_params=sampling)
    request.output_token_ids = [7] * said_tokens
    for name, value in more.items():
        setattr(sampling, name, value)
    return request


def test_only_replies_that_depend_on_their_tokens_alone_move() -> None:
    assert is_movable(replying())
    others: list[dict[str, Any]] = [
        {"seed": 1},
        {"stop": ["end"]},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"min_tokens": 2},
        {"logprobs": 1},
        {"structured_outputs": {}},
    ]
    for more in others:
        assert not is_movable(replying(**more)), more
    for params in (None, {}, {"movable": 1}, "movable"):
        request = replying()
        request.kv_transfer_params = params
        assert not is_movable(request)


def test_a_reply_ends_behind_its_next_token_unless_it_ends_there_anyway() -> None:
    for said_tokens, ahead, max_tokens, moves in (
        (3, 0, 9, True),
        (3, 1, 9, True),
        (3, 0, 4, False),
    ):
        request = replying(said_tokens)
        request.max_tokens, request.stop_reason = max_tokens, None
        request.num_output_placeholders = ahead
        end_for_move(request)
        stop = said_tokens + ahead + 1
        assert request.max_tokens == (stop if moves else max_tokens)
        assert request.stop_reason == (MOVED_REASON if moves else None)


class Decoding:
    """An engine that decodes replies, and what it is ordered to move."""

    def __init__(self, parses: bool = False) -> None:
        self.session, self.woken = Session(), 0
        settings = ConnectorSettings.of({"prefix": "find+tell"})
        of_cache = RequestChains(16), GROUPS, Cached([]), PrefixOffers(lambda: None)
        sharing = PrefixSharing("E", self.session, settings, *of_cache)
        self.orders = MoveOrders(self._wake, parses)
        about = "E", "life", "kv_both", GROUPS, 0, self.session, settings, sharing
        self.side = SchedulerSide(*about, moves=self.orders)

    def _wake(self) -> None:
        self.woken += 1

    def reply(self, name: str, ids: list[int], movable: bool = True) -> Any:
        """Begin a reply to a prompt."""
        one = replying()
        request = Request(ids, {"movable": movable}, name, sampling_params=one.sampling_params)
        request.sampling_params.all_stop_token_ids = ()
        self.side.new_request(request)
        return request

    def order(self, prefix: Prefix, verb: Verb = Verb.MOVE) -> Answer:
        """Return the answer to a command."""
        self.orders.hear(StateOrder("c", verb, prefix))
        assert (self.woken, self.side.pending) == (1, True)
        self.side.step()
        assert not self.side.pending
        ((name, answer),) = self.session.answers
        assert name == "c"
        return answer


def test_replies_that_came_after_an_engine_was_told_to_leave_stay() -> None:
    # An idle engine takes no step: it may be told to stay again before a request comes.
    engine = Decoding()
    engine.orders.leave()
    one = engine.reply("one", PROMPT)
    engine.side.step()
    assert not moves(one)


def test_a_server_that_parses_replies_keeps_them() -> None:
    engine = Decoding(parses=True)
    one = engine.reply("one", PROMPT)
    engine.orders.leave()
    engine.side.step()
    assert not moves(one)


def moves(request: Any) -> bool:
    """Return whether a reply ends so that it moves."""
    return bool(getattr(request, "stop_reason", None) == MOVED_REASON)


PREFIX = chain_of(PROMPT).prefix(48)


def test_a_command_moves_the_replies_that_begin_with_its_tokens() -> None:
    engine = Decoding()
    there = [engine.reply("one", PROMPT), engine.reply("two", [*PROMPT[:48], 7, 8])]
    others = [
        engine.reply("short", PROMPT[:40]),
        engine.reply("other", PROMPT[::-1]),
        engine.reply("fixed", PROMPT, movable=False),
    ]
    ended = engine.reply("ended", PROMPT)
    engine.side.finished(ended, ([1], [2]), computed=False)
    assert engine.order(PREFIX) == Answer(Outcome.DONE, 48, "", "2 replies move")
    assert [moves(one) for one in (*there, *others, ended)] == [True] * 2 + [False] * 4


@pytest.mark.parametrize(
    ("prefix", "verb", "reason"),
    [
        (chain_of(PROMPT[::-1]).prefix(48), Verb.MOVE, "NO_REPLY"),
        (chain_of(PROMPT[:9], ends_tokens=[8]).prefix(8), Verb.MOVE, "NO_REPLY"),
        (chain_of(PROMPT, 8).prefix(48), Verb.MOVE, "CHAIN_FORM_DIFFERS"),
        (PREFIX, Verb.EVICT, "NO_STORE"),
    ],
)
def test_a_command_that_concerns_no_reply_moves_none(
    prefix: Prefix, verb: Verb, reason: str
) -> None:
    engine = Decoding()
    request = engine.reply("one", PROMPT)
    assert engine.order(prefix, verb).reason == reason
    assert not moves(request)


def test_all_replies_that_can_move_do_when_the_engine_is_told_to_leave() -> None:
    engine = Decoding()
    one, fixed = engine.reply("one", PROMPT), engine.reply("fixed", PROMPT, movable=False)
    engine.orders.leave()
    engine.side.step()
    assert (moves(one), moves(fixed)) == (True, False)
