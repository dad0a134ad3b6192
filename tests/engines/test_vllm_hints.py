"""KV hints of a request: what is carried out, and what is answered as not supported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from engines.written_session import Request
from restow.agents.engines.vllm.scheduler.hints import MAX_ACTIONS, MAX_SHOWN, KvHints
from restow.agents.engines.vllm.scheduler.requests import AnswerIndex, parameters_of

HASHES = [bytes([number] * 32) for number in (1, 2)]
OWN = [int.from_bytes(one[-8:]) for one in HASHES]


@dataclass
class Action:
    """An action as vLLM's envelope has it."""

    action_type: str
    payload: Any = field(default_factory=dict)
    action_version: str = "1.0"
    action_id: str = "a"


@dataclass
class Envelope:
    """vLLM's envelope."""

    actions: Sequence[Action]
    message_id: str = "m"
    protocol_version: str = "0.1"


def answered(
    hints: Any = None,
    params: Any = None,
    why_no_fetch: str = "",
    counts: Counter[str] | None = None,
) -> list[dict[str, Any]]:
    """Return what is said about the actions of a request."""
    answers = KvHints(Counter() if counts is None else counts)
    request = Request([1, 2, 3], params, block_hashes=HASHES, kv_hints=hints)
    answers.begin(request, why_no_fetch)
    answers.loaded("r", 2)
    said: list[dict[str, Any]] = answers.answer("r").get("kv_hints", {}).get("actions", [])
    assert answers.answer("r") == {}
    return said


@pytest.mark.parametrize("kind", ["kv.fetch", "kv.share", "kv.prefetch", "prefetch"])
def test_a_fetch_of_the_requests_own_prefix_is_carried_out(kind: str) -> None:
    for payload in ({}, {"block_hashes": OWN}, {"block_hashes": OWN[:1], "mode": "copy"}):
        (said,) = answered(Envelope([Action(kind, payload)]))
        assert said == {
            **{"action_id": "a", "action_type": kind},
            **{"outcome": "carried_out", "tokens": 2},
        }


@pytest.mark.parametrize(
    ("action", "why"),
    [
        (Action("kv.fetch", {"block_hashes": [*OWN, 7]}), "none of this prompt"),
        (Action("kv.fetch", {"block_hashes": [[], {}]}), "none of this prompt"),
        (Action("kv.fetch", {"block_hashes": 7}), "none of this prompt"),
        (Action("kv.fetch", {"mode": "move"}), "the source keeps its state"),
        (Action("kv.fetch", None), "no map"),
        (Action("kv.fetch", {}, "2.0"), "versions"),
        (Action("kv.demote"), "a store chooses"),
        (Action("kv.pin"), "kept in place"),
        (Action("kv.retain"), "priority"),
        (Action("kv.evict"), "vLLM alone"),
        (Action("kv.dream"), "does not know"),
    ],
)
def test_what_has_no_verb_is_answered_with_the_reason(action: Action, why: str) -> None:
    (said,) = answered(Envelope([action]))
    assert said["outcome"] == "not_supported"
    assert why in said["reason"]


def test_a_fetch_says_why_the_prefix_is_not_looked_for() -> None:
    (said,) = answered(Envelope([Action("kv.fetch")]), why_no_fetch="prefix is off")
    assert (said["outcome"], said["reason"]) == ("not_supported", "prefix is off")


def test_hints_of_dynamo_stand_among_the_parameters_and_make_no_handoff() -> None:
    action = {"action_id": "b", "action_type": "kv.pin", "action_version": "1.0", "payload": {}}
    params = {"kv_hint": {"message_id": "m", "actions": [action]}}
    assert parameters_of(params, "kv_both", "id", AnswerIndex()) is None
    (said,) = answered(params=params)
    assert (said["action_id"], said["outcome"]) == ("b", "not_supported")


@pytest.mark.parametrize("hints", [{}, {"actions": 7}, {"actions": [None]}, 7, "words"])
def test_hints_that_are_none_are_answered_too(hints: Any) -> None:
    (said,) = answered(params={"kv_hint": hints})
    assert said["outcome"] == "not_supported"


@pytest.mark.parametrize("params", [None, {}, [], {"handoff_id": "h"}])
def test_a_request_without_hints_has_no_answer(params: Any) -> None:
    assert answered(params=params) == []


def test_an_answer_is_bounded_and_everything_is_counted_by_kinds_alone() -> None:
    counts: Counter[str] = Counter()
    named = Action("kv." + "x" * 1000, action_id="y" * 1000)
    said = answered(Envelope([named, *[Action("kv.fetch")] * MAX_ACTIONS]), counts=counts)
    assert len(said) == MAX_ACTIONS
    assert len(said[0]["action_id"]) == len(said[0]["action_type"]) == MAX_SHOWN
    assert f"at most {MAX_ACTIONS} actions" in said[-1]["reason"]
    answered(Envelope([Action("kv.fetch"), Action("kv.retain")]), counts=counts)
    assert counts == {
        **{"other:not_supported": 1, "fetch:not_supported": MAX_ACTIONS - 1},
        **{"fetch:carried_out": 1, "retain:not_supported": 1},
    }
