"""What of a client's request P and D are told. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

Body = dict[str, Any]

ONE_TOKEN: Final[Mapping[str, Body]] = MappingProxyType(
    {
        "/v1/completions": {"max_tokens": 1},
        "/v1/chat/completions": {"max_tokens": 1, "max_completion_tokens": 1},
        "/v1/responses": {"max_output_tokens": 1, "store": False},
    }
)
"""By path: how P is told to say no more than it must."""
NOT_AT_P: Final = frozenset(
    {
        *("n", "best_of", "min_tokens", "stream_options", "echo"),
        *("logprobs", "top_logprobs", "prompt_logprobs"),
    }
)
"""What says something of an answer that P does not give, and may contradict its one token."""


def needs_whole_prompt(body: Body) -> bool:
    """Whether D must compute all of the prompt itself, so that no state of P's is of use.

    Probabilities of the prompt's own tokens, beams, and what an engine remembers of its answers.
    """
    return bool(
        body.get("prompt_logprobs") is not None
        or (body.get("echo") and body.get("logprobs") is not None)
        or body.get("use_beam_search")
        or body.get("previous_response_id")
        or body.get("background")
    )


def prefill_body(path: str, body: Body, handoff_id: str) -> Body:
    """For P: one token, and a state for each answer that D is to give."""
    params = {"do_remote_decode": True, "handoff_id": handoff_id, **_sampled(body)}
    if (choices := _choices(body)) > 1:
        params["choices"] = choices
    kept = {key: value for key, value in body.items() if key not in NOT_AT_P}
    return {**kept, **ONE_TOKEN[path], "stream": False, "kv_transfer_params": params}


def decode_body(body: Body, handoff_id: str) -> Body:
    """For D: what the client said."""
    params = {"do_remote_prefill": True, "handoff_id": handoff_id, **_sampled(body)}
    return {**body, "kv_transfer_params": params}


def alone_body(body: Body) -> Body:
    """For D that computes the prompt itself."""
    return {key: value for key, value in body.items() if key != "kv_transfer_params"}


def _sampled(body: Body) -> Body:
    """Whether P samples D's first token: not where P is not told all that this depends on."""
    asked = (body.get(key) for key in ("logprobs", "top_logprobs"))
    tells_more = any(one is not None and one is not False for one in asked)  # 0 asks, too
    if tells_more or body.get("min_tokens") or _choices(body) > 1 or body.get("best_of", 1) != 1:
        return {}
    return {"sampled_token": True}


def _choices(body: Body) -> int:
    """How many answers are wanted. What is no count D refuses in its own words."""
    count = body.get("n")
    return count if isinstance(count, int) else 1
