"""Make the requests for P and D from a client's request, and read the answers. Pure functions."""

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
"""The fields, by path, that make P generate only one token."""
MAX_CHOICES: Final = 128
"""The most answers to one prompt for which P keeps its state; each answer is a handoff."""
NOT_FOR_P: Final = frozenset(
    {
        *("n", "best_of", "min_tokens", "stream_options", "echo"),
        *("logprobs", "top_logprobs", "prompt_logprobs"),
    }
)
"""Fields that describe the answer. P gives no answer, and they may contradict its one token."""
MOVED: Final = "restow_moved"
"""The ``stop_reason`` of a reply that an engine which leaves has ended, for another to go on."""
NOT_MOVABLE: Final = frozenset(
    {"best_of", "echo", "logprobs", "top_logprobs", "suffix", "tools", "functions"}
)
"""Fields of a request whose reply no other engine can go on with."""
DEFAULT_TOKENS: Final = 16
"""Tokens of a completion that names no number, as in OpenAI's API."""
Progress = Enum("Progress", ["NOTHING", "TOKEN", "END", "FAILED"])
"""What a whole answer, or an event of a stream, says about an engine's work."""


def needs_whole_prompt(body: Body) -> bool:
    """Return whether D must compute the whole prompt itself, because P's state is of no use.

    D must do so for probabilities of the prompt's tokens, for beam search, for a request that
    refers to an answer which D remembers, and for more answers than P keeps its state for.
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
    """Return P's request: generate one token, and hand over a state for each answer of D."""
    params = {"do_remote_decode": True, "handoff_id": handoff_id, **_first_token(body)}
    own = body.get("kv_transfer_params")
    if isinstance(own, dict) and "marks" in own:
        params["marks"] = own["marks"]
    if (choices := _choices(body)) > 1:
        params["choices"] = choices
    kept = {name: value for name, value in body.items() if name not in NOT_FOR_P}
    return {**kept, **ONE_TOKEN[path], "stream": False, "kv_transfer_params": params}


def decode_body(body: Body, handoff_id: str | None, movable: bool = False) -> Body:
    """Return D's request: the client's. Without a handoff id D computes the prompt itself.

    A ``movable`` reply may be ended by an engine that leaves: `MovedReply` has it go on elsewhere.
    """
    kept = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    params: Body = {}
    if handoff_id is not None:
        params = {"do_remote_prefill": True, "handoff_id": handoff_id, **_first_token(body)}
    if movable:
        kept["return_token_ids"] = params["movable"] = True
    return {**kept, "kv_transfer_params": params} if params else kept


def is_movable(path: str, body: Body) -> bool:
    """Return whether another engine could go on with a reply: it is one text of known tokens.

    A reply that calls tools is not: the engine that goes on has not parsed its beginning.
    """
    if path == "/v1/completions":
        prompt = body.get("prompt")
        of_tokens = isinstance(prompt, list) and all(type(one) is int for one in prompt)
        known = isinstance(prompt, str) or of_tokens
    else:
        messages: Any = body.get("messages")
        # vLLM takes no token ids in place of messages with images.
        known = path == "/v1/chat/completions" and isinstance(messages, list)
        known = known and all(
            isinstance(one, dict) and isinstance(one.get("content"), str | None) for one in messages
        )
    return known and _choices(body) == 1 and not any(map(body.get, NOT_MOVABLE))


class MovedReply:
    """A reply that may go on at another engine, as its client sees it: one reply, of one engine."""

    def __init__(self, body: Body) -> None:
        """Begin with the client's request."""
        self.moved = False
        """Whether the engine has ended the reply so that another goes on with it."""
        self._body = body
        self._prompt: list[int] = []
        self._tokens: list[int] = []
        self._named: Body = {}
        self._text = ""

    @property
    def rest(self) -> Body:
        """The request with which another engine goes on behind the last token."""
        self.moved = False
        rest: Body = {**self._body, "return_token_ids": True}
        params: Body = {"movable": True, "moved": True}
        if "messages" in rest:
            # vLLM takes the ids in place of the messages.
            params["prompt_token_ids"] = self._all
        else:
            rest = {"max_tokens": DEFAULT_TOKENS, **rest, "prompt": self._all}
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(rest.get(name), int):
                rest[name] -= len(self._tokens)
        return {**rest, "kv_transfer_params": params}

    @property
    def _all(self) -> list[int]:
        return [*self._prompt, *self._tokens]

    def goes_on(self, data: Any) -> bool:
        """Return whether the first part of the next engine follows the last token."""
        ids = _prompt_ids(data) if isinstance(data, dict) else []
        return not ids or ids == self._all

    def part(self, data: Any) -> Any:
        """Return an event's data as the client gets it; None: the client is not sent it.

        After the end of a part that has moved, nothing more of that engine counts.
        """
        if not isinstance(data, dict) or self.moved:
            return None if self.moved else data
        goes_on, choices = bool(self._tokens), data.get("choices") or ()
        if not self._named:
            self._named = {name: data[name] for name in ("id", "created") if name in data}
        self._prompt = self._prompt or _prompt_ids(data)
        data = {**data, **self._named}
        self._give_ids(data)
        for choice in choices:
            self._give_ids(choice)
            self._read(choice)
        if usage := data.get("usage"):
            prompt, tokens = len(self._prompt), len(self._tokens)
            counted = {"prompt_tokens": prompt, "completion_tokens": tokens}
            data["usage"] = {**usage, **counted, "total_tokens": prompt + tokens}
        # An engine that goes on with a chat names the role again.
        if self.moved or (goes_on and any("role" in _delta(one) for one in choices)):
            return data if any(_delta(one).get(_key(one)) for one in choices) else None
        return data

    def whole(self, data: Any) -> Any:
        """Return a whole answer, with the text of the parts before it."""
        answer = self.part(data) or {}
        for choice in data.get("choices") or ():
            place, key = _delta(choice), _key(choice)
            self._text += place.get(key) or ""
            place[key] = self._text
            if "token_ids" in choice:
                choice["token_ids"] = self._tokens
        return answer

    def _read(self, choice: Body) -> None:
        """Take a choice's tokens, and note whether the reply moves."""
        self._tokens += choice.get("token_ids") or []
        if not self._body.get("return_token_ids"):
            choice.pop("token_ids", None)
        if choice.get("stop_reason") == MOVED:
            self.moved = choice.get("finish_reason") == "length"
            choice["stop_reason"] = None
            if self.moved:
                choice["finish_reason"] = None

    def _give_ids(self, place: Body) -> None:
        """Give the client the prompt's ids if it has asked for them."""
        if place.get("prompt_token_ids"):
            place["prompt_token_ids"] = self._prompt
        if not self._body.get("return_token_ids"):
            place.pop("prompt_token_ids", None)


def _prompt_ids(data: Body) -> list[int]:
    """Return the ids of a prompt from an answer or an event: of a chat, or of a completion."""
    places = (data, *(data.get("choices") or ()))
    return next((one["prompt_token_ids"] for one in places if one.get("prompt_token_ids")), [])


def _delta(choice: Body) -> Body:
    """Return where a choice has its text: in an event of a chat, a chat, or a completion."""
    return choice.get("delta") or choice.get("message") or choice


def _key(choice: Body) -> str:
    return "text" if "text" in choice else "content"


def _first_token(body: Body) -> Body:
    """Ask for P's sample of the first token, unless it depends on fields that P is not sent."""
    asked = (body.get(name) for name in ("logprobs", "top_logprobs"))
    wants_logprobs = any(
        value is not None and value is not False for value in asked
    )  # 0 asks for them too
    one_answer = _choices(body) == 1 and body.get("best_of", 1) == 1
    d_samples = wants_logprobs or body.get("min_tokens") or not one_answer
    return {} if d_samples else {"sampled_token": True}


def _choices(body: Body) -> int:
    """Return how many answers are wanted. D itself refuses an ``n`` that is not a number."""
    return count if isinstance(count := body.get("n"), int) else 1


def parse_json(text: bytes) -> Any:
    """Return the value of a JSON text, or None if the text is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def event_data(event: bytes) -> Any:
    """Return the data of a stream's event: a JSON value, ``DONE``, or None."""
    data = next((line[5:] for line in event.splitlines() if line.startswith(b"data:")), b"")
    return DONE if data.strip() == DONE.encode() else parse_json(data)


def progress_of(data: Any) -> Progress:
    """Return what a whole answer, or the data of an event, says about an engine's work.

    An engine that is shut down answers 200 with the tokens that it has, often none: its choices
    end with "abort", and `/v1/responses` counts no output token.
    """
    if not isinstance(data, dict):
        return Progress.END if data == DONE else Progress.NOTHING
    kind = str(data.get("type", ""))
    if data.get("error") or kind in ("error", "response.failed"):
        return Progress.FAILED
    if choices := data.get("choices"):
        if any(choice.get("finish_reason") in ("abort", "error") for choice in choices):
            return Progress.FAILED
        return Progress.TOKEN if any(map(_has_token, choices)) else Progress.NOTHING
    if kind in ("response.completed", "response.incomplete") or data.get("object") == "response":
        answer = data.get("response", data)
        lost = (answer.get("usage") or {}).get("output_tokens") == 0
        cut = answer.get("status") in ("cancelled", "failed")
        return Progress.FAILED if cut or lost else Progress.END
    return Progress.TOKEN if kind.endswith(".delta") else Progress.NOTHING


def _has_token(choice: Body) -> bool:
    """Return whether a choice carries a text, a field other than a role, or its end."""
    delta = {**(choice.get("delta") or {}), "role": None}
    return bool(choice.get("finish_reason") or choice.get("text") or any(delta.values()))


def error_body(code: int, message: str, kind: str = "invalid_request_error") -> Body:
    """Return an error in the form of OpenAI's API."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_of(data: Any) -> Any:
    """Return the error that an engine answered, or None."""
    return data.get("error") if isinstance(data, dict) else None


def handoff_failed(data: Any) -> bool:
    """Return whether D answered that no state came: then P failed, not D."""
    return isinstance(error := error_of(data), dict) and bool(error.get("handoff"))
