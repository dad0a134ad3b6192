"""Read a request's ``kv_transfer_params``: which handoff it belongs to, and on which side.

Routers made for vLLM's own connectors send ``do_remote_decode`` to P, and pass P's answer on to D.
Other routers give both sides the same ``handoff_id`` at once; then the engine's role decides the
side.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from restow.agents.engines.common.adapter_errors import ParametersError

HANDOFF_ID = "handoff_id"
TIMEOUT_MS = "timeout_ms"
CHOICES = "choices"
MAX_CHOICES = 128
"""Answers to one prompt. Each is a handoff that P keeps until it is asked for."""
MAX_ID_BYTES = 1024
"""Bytes of an id that a router gives. What is appended to it is small."""
MAX_TIMEOUT_MS = 600_000
"""The broker's limit."""
MAX_SHOWN = 80
"""Characters of a client's value that an error's message shows."""
SIDES = ("do_remote_decode", "do_remote_prefill")
READERS = "readers"
MAX_READERS = 64
"""The broker's limit for one publication."""
SAMPLED_TOKEN = "sampled_token"  # noqa: S105 - a token of a model


@dataclass(frozen=True, slots=True)
class AnswerIndex:
    """The prompt and the answer of a client's request that an engine's request stands for.

    vLLM splits a request with many prompts or answers (``n``) into requests of its own, which all
    have the same ``kv_transfer_params``. Each is a handoff of its own, whose id P and D derive
    alike from the router's id. ``shared_id`` is the part of vLLM's id that all answers to a prompt
    share.
    """

    prompt: int = 0
    choice: int = 0
    shared_id: str = ""

    def handoff_id(self, given: str) -> str:
        """Return the handoff of this request, where the router gave ``given`` to all of them.

        >>> AnswerIndex(2, 1).handoff_id("h"), AnswerIndex().handoff_id("h")
        ('h/prompt2/choice1', 'h')
        """
        prompt = f"/prompt{self.prompt}" if self.prompt else ""
        return given + prompt + (f"/choice{self.choice}" if self.choice else "")


class HandoffSide(StrEnum):
    """The side of a handoff on which a request is."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class HandoffParameters:
    """A request's side of a handoff."""

    side: HandoffSide
    handoff_id: str
    """The id that the router gave."""
    timeout_ms: int = 0
    """How long D waits for this state; 0: the engine's own timeout."""
    choices: int = 1
    """The number of answers to P's prompt. Each reads P's state as a handoff of its own."""
    readers: int = 0
    """The number of D's that read the state, as the router told both sides; 0: exactly one."""
    sampled_token: bool = False
    """Whether P computes the whole prompt, and D goes on behind the token that P samples."""

    def handoff_ids(self, index: AnswerIndex) -> list[str]:
        """Return the handoffs of the request with that index."""
        choices = range(self.choices) if self.choices > 1 else (index.choice,)
        return [replace(index, choice=choice).handoff_id(self.handoff_id) for choice in choices]

    def answer(self, engine_id: str, request_id: str, position_tokens: int) -> dict[str, Any]:
        """Return the parameters that P answers with, for the router to pass on to D."""
        answer: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            HANDOFF_ID: self.handoff_id,
            "remote_engine_id": engine_id,
            "remote_request_id": request_id,
            "remote_num_tokens": position_tokens,
        }
        if self.readers:
            answer[READERS] = self.readers
        if self.sampled_token:
            answer[SAMPLED_TOKEN] = True
        return answer


def parameters_of(
    params: object, kv_role: str, default_id: str, index: AnswerIndex
) -> HandoffParameters | None:
    """Read the ``kv_transfer_params``; None: there is no handoff.

    That is so if they are empty, or contain only the two sides, both false. ``default_id`` is the
    id of a handoff to which the router gave none, at P. Raises `ParametersError`.
    """
    if not params:
        return None
    if not isinstance(params, Mapping):
        raise ParametersError(f"kv_transfer_params are {type(params).__name__}; they must be a map")
    handoff_id = _handoff_id(params.get(HANDOFF_ID))
    timeout_ms = _whole_number(params, TIMEOUT_MS, 0, 0, MAX_TIMEOUT_MS)
    choices = _whole_number(params, CHOICES, 1, 1, MAX_CHOICES)
    readers = _whole_number(params, READERS, 0, 0, MAX_READERS)
    sampled = _flag(params, SAMPLED_TOKEN)
    decodes_elsewhere, prefilled_elsewhere = (_flag(params, side) for side in SIDES)
    if decodes_elsewhere and prefilled_elsewhere:
        raise ParametersError(
            "do_remote_decode and do_remote_prefill are both true: a request is P's or D's part of "
            "a handoff"
        )
    prefill = HandoffParameters(
        *(HandoffSide.PREFILL, handoff_id or default_id),
        choices=choices,
        readers=readers,
        sampled_token=sampled,
    )
    decode = replace(prefill, side=HandoffSide.DECODE, timeout_ms=timeout_ms, choices=1)
    if decodes_elsewhere:
        if handoff_id is None and index.prompt:
            raise ParametersError(
                "a list of prompts without handoff_id: P's answer has room for one id of its own; "
                "have the router give one, or ask for each prompt by itself"
            )
        return prefill
    if prefilled_elsewhere:
        if handoff_id is None:
            raise ParametersError(
                "do_remote_prefill without handoff_id: the parameters are not those that a P with "
                "this connector answered with"
            )
        return replace(decode, handoff_id=handoff_id)
    if handoff_id is None and set(params) <= set(SIDES):
        return None
    if handoff_id is None:
        raise ParametersError(
            "kv_transfer_params name no handoff: neither handoff_id, do_remote_decode nor "
            "do_remote_prefill (are they another connector's?)"
        )
    if kv_role == "kv_both":
        raise ParametersError(
            f"handoff {handoff_id}: this engine is both P and D (kv_both), so the request must say "
            "do_remote_decode or do_remote_prefill"
        )
    if kv_role == "kv_producer":
        return prefill
    return replace(decode, handoff_id=handoff_id)


def _handoff_id(given: object) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str) or not given:
        raise ParametersError(f"handoff_id is {_shown(given)}; it must be a non-empty string")
    size_bytes = len(given.encode(errors="replace"))
    if size_bytes > MAX_ID_BYTES:
        raise ParametersError(
            f"handoff_id {_shown(given)} takes {size_bytes} bytes; at most {MAX_ID_BYTES} are "
            "allowed"
        )
    return given


def _whole_number(params: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    given = params.get(name, default)
    if isinstance(given, bool) or not isinstance(given, int) or not least <= given <= most:
        raise ParametersError(f"{name} is {_shown(given)}; it must be from {least} to {most}")
    return given


def _flag(params: Mapping[str, Any], name: str) -> bool:
    given = params.get(name)
    if given is not None and not isinstance(given, bool):
        raise ParametersError(f"{name} is {_shown(given)}; it must be true or false")
    return bool(given)


def _shown(given: object) -> str:
    """Return the beginning of a client's value, however long it is."""
    words = repr(given)
    return words if len(words) <= MAX_SHOWN else f"{words[:MAX_SHOWN]}..."


_CHOICE = re.compile(r"(\d+)_(.+)", re.DOTALL)
"""Ids made by `ParentRequest.get_child_info`; the first answer of several is number 0."""
_PROMPT = re.compile(r"cmpl-.*?-(\d+)(?:-[0-9a-f]{8})?", re.DOTALL)
"""Ids made by `OpenAIServingCompletion`, with the suffix of `InputProcessor.assign_request_id`."""


def answer_index(request_id: str) -> AnswerIndex:
    """Return the request's index, as vLLM 0.32 names requests.

    >>> answer_index("1_cmpl-ab-2-0123abcd")
    AnswerIndex(prompt=2, choice=1, shared_id='cmpl-ab-2-0123abcd')
    >>> answer_index("chatcmpl-ab-0123abcd")
    AnswerIndex(prompt=0, choice=0, shared_id='chatcmpl-ab-0123abcd')
    """
    choice, shared_id = 0, request_id
    if (child := _CHOICE.fullmatch(request_id)) is not None:
        choice, shared_id = int(child[1]), child[2]
    prompt = _PROMPT.fullmatch(shared_id)
    return AnswerIndex(int(prompt[1]) if prompt else 0, choice, shared_id)
