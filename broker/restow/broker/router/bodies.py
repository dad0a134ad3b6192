"""What P and D are sent of a client's request, and what their answers mean. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

Body = dict[str, Any]
DONE: Final = "[DONE]"
ONE_TOKEN: Final[Mapping[str, Body]] = MappingProxyType(
    {
        "/v1/completions": {"max_tokens": 1},
        "/v1/chat/completions": {"max_tokens": 1, "max_completion_tokens": 1},
        "/v1/responses": {"max_output_tokens": 1, "store": False},
    }
)
"""By path: how P is told to generate no more than it must."""
MAX_CHOICES: Final = 128
"""Answers to one prompt for which P keeps its state, a handoff for each."""
NOT_AT_P: Final = frozenset(
    {
        *("n", "best_of", "min_tokens", "stream_options", "echo"),
        *("logprobs", "top_logprobs", "prompt_logprobs"),
    }
)
"""Fields about an answer that P does not give, and which may contradict its one token."""
Said = Enum("Said", ["NOTHING", "TOKEN", "END", "FAILED"])
"""What an event of a stream, or a whole answer, says of an engine's work."""


def needs_whole_prompt(body: Body) -> bool:
    """Return whether D must compute the whole prompt itself, so that no state of P's is of use.

    It must for probabilities of the prompt's tokens, for beams, for answers that it remembers, and
    for more answers than P keeps its state for.
    """
    return bool(
        body.get("prompt_logprobs") is not None
        or (body.get("echo") and body.get("logprobs") is not None)
        or body.get("use_beam_search")
        or _choices(body) > MAX_CHOICES
        or body.get("previous_response_id")
        or body.get("background")
    )


def prefill_body(path: str, body: Body, handoff_id: str) -> Body:
    """Return what P is sent: one token, and a state for each answer that D is to give."""
    params = {"do_remote_decode": True, "handoff_id": handoff_id, **_sampled(body)}
    if (choices := _choices(body)) > 1:
        params["choices"] = choices
    kept = {name: value for name, value in body.items() if name not in NOT_AT_P}
    return {**kept, **ONE_TOKEN[path], "stream": False, "kv_transfer_params": params}


def decode_body(body: Body, handoff_id: str | None) -> Body:
    """Return what D is sent: the client's own words; without an id it computes the prompt."""
    kept = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    if handoff_id is None:
        return kept
    params = {"do_remote_prefill": True, "handoff_id": handoff_id, **_sampled(body)}
    return {**kept, "kv_transfer_params": params}


def _sampled(body: Body) -> Body:
    """Ask for P's sample of the first token, unless it depends on fields that P is not sent."""
    asked = (body.get(name) for name in ("logprobs", "top_logprobs"))
    tells_more = any(one is not None and one is not False for one in asked)  # 0 asks, too
    if tells_more or body.get("min_tokens") or _choices(body) > 1 or body.get("best_of", 1) != 1:
        return {}
    return {"sampled_token": True}


def _choices(body: Body) -> int:
    """Return how many answers are wanted. D itself refuses an ``n`` that is no number."""
    return count if isinstance(count := body.get("n"), int) else 1


def as_bytes(body: Any) -> bytes:
    """Return a value as JSON."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def event_data(event: bytes) -> Any:
    """Return the JSON of a stream's event, ``DONE``, or None."""
    said = next((line[5:] for line in event.splitlines() if line.startswith(b"data:")), b"")
    return DONE if said.strip() == DONE.encode() else json_of(said)


def json_of(said: bytes) -> Any:
    """Return JSON as a value, and None for what is none."""
    try:
        return json.loads(said)
    except ValueError:
        return None


def meaning(data: Any) -> Said:
    """Return what an event, or a whole answer, says of an engine's work.

    An engine that is told to end answers 200 with what it has, often nothing: its choices end by
    "abort", and of ``/v1/responses`` no token is counted.
    """
    if not isinstance(data, dict):
        return Said.END if data == DONE else Said.NOTHING
    kind = str(data.get("type", ""))
    if data.get("error") or kind in ("error", "response.failed"):
        return Said.FAILED
    if choices := data.get("choices"):
        reasons = [one.get("finish_reason") for one in choices]
        if "abort" in reasons or "error" in reasons:
            return Said.FAILED
        deltas = [{**(one.get("delta") or {}), "role": one.get("text")} for one in choices]
        spoken = any(reasons) or any(any(one.values()) for one in deltas)
        return Said.TOKEN if spoken else Said.NOTHING
    if kind in ("response.completed", "response.incomplete") or data.get("object") == "response":
        cut = data.get("response", data).get("status") in ("cancelled", "failed")
        return Said.FAILED if cut or _usage(data).get("output_tokens") == 0 else Said.END
    return Said.TOKEN if kind.endswith(".delta") else Said.NOTHING


def cached_details(data: Any) -> Body:
    """Return what an answer's usage says of how much of the prompt was cached, by field."""
    names = ("prompt_tokens_details", "input_tokens_details")
    return {name: told for name in names if (told := _usage(data).get(name)) is not None}


def with_cached(data: Any, of_p: Body) -> Any:
    """Correct D's usage: to D all that P computed is cached; P knows what it had before."""
    _usage(data).update({name: of_p.get(name) for name in cached_details(data)})
    return data


def _usage(data: Any) -> Body:
    told = data if isinstance(data, dict) else {}
    return (told.get("response") or told).get("usage") or {}


def with_data(event: bytes, data: Any) -> bytes:
    """Return a stream's event with other data."""
    lines = [line for line in event.splitlines() if not line.startswith(b"data:")]
    return b"\n".join([*lines, b"data: " + as_bytes(data)])
