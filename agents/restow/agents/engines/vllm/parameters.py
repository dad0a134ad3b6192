"""`HandoffParameters` are a request's ``kv_transfer_params``: which side of which handoff it is.

Routers made for vLLM's own connectors send ``do_remote_decode`` to P, and hand P's answer on to D.
Others give both sides the same ``handoff_id`` at once; then the engine's role says the side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from restow.agents.engines.vllm.errors import ParametersError

HANDOFF_ID = "handoff_id"
TIMEOUT_MS = "timeout_ms"
CHOICES = "choices"
MAX_CHOICES = 128
"""Of one prompt: each is a handoff that P keeps until it is asked for."""
MAX_ID_BYTES = 1024
"""Of the id that a router gives; what vLLM adds to it is small."""
MAX_TIMEOUT_MS = 600_000
"""As brokers take it."""
MAX_SHOWN = 80
"""Characters of a word of the client's in an error's message."""
SIDES = ("do_remote_decode", "do_remote_prefill")
READERS = "readers"
MAX_READERS = 64
"""Of one publication, as brokers take it."""
SAMPLED_TOKEN = "sampled_token"  # noqa: S105 - a token of a model


@dataclass(frozen=True, slots=True)
class AnswerIndex:
    """Says which answer to which prompt of a client's request a request of the engine is.

    vLLM makes several requests of one that has many prompts or wants many answers (``n``), which
    all carry the same ``kv_transfer_params``. Each is a handoff of its own, whose id P and D derive
    alike from the id that the router gave. ``shared_id`` is what all answers to a prompt share.
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
    """Says what a request is to a handoff."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class HandoffParameters:
    """Names one side of one handoff."""

    side: HandoffSide
    handoff_id: str
    """As the router knows it."""
    timeout_ms: int = 0
    """How long D waits for this state; 0: as long as its engine commonly waits."""
    choices: int = 1
    """How many answers D gives to P's prompt: each reads P's state as a handoff of its own."""
    readers: int = 0
    """How many D's are to have the state, as the router told both sides; 0: one, and no other."""
    sampled_token: bool = False
    """Whether P computes the whole prompt, and D goes on behind the token that P samples."""

    def handoff_ids(self, index: AnswerIndex) -> list[str]:
        """Return the handoffs of the request with that index."""
        choices = range(self.choices) if self.choices > 1 else (index.choice,)
        return [replace(index, choice=choice).handoff_id(self.handoff_id) for choice in choices]

    def answer(self, engine_id: str, request_id: str, position_tokens: int) -> dict[str, Any]:
        """Return what P answers with, for the router to hand on to D."""
        said: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            HANDOFF_ID: self.handoff_id,
            "remote_engine_id": engine_id,
            "remote_request_id": request_id,
            "remote_num_tokens": position_tokens,
        }
        if self.readers:
            said[READERS] = self.readers
        if self.sampled_token:
            said[SAMPLED_TOKEN] = True
        return said


def parameters_of(
    params: object, kv_role: str, default_id: str, index: AnswerIndex
) -> HandoffParameters | None:
    """Return what the ``kv_transfer_params`` say; None where they say that there is no handoff.

    That is where they are empty, or name both sides with false and nothing else. ``default_id``
    names the handoff of a P that was given no name. Raises `ParametersError`.
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


def _handoff_id(said: object) -> str | None:
    if said is None:
        return None
    if not isinstance(said, str) or not said:
        raise ParametersError(f"handoff_id is {_shown(said)}; it must be a text")
    size_bytes = len(said.encode(errors="replace"))
    if size_bytes > MAX_ID_BYTES:
        raise ParametersError(
            f"handoff_id {_shown(said)} takes {size_bytes} bytes; it may take {MAX_ID_BYTES}"
        )
    return said


def _whole_number(params: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    said = params.get(name, default)
    if isinstance(said, bool) or not isinstance(said, int) or not least <= said <= most:
        raise ParametersError(f"{name} is {_shown(said)}; it must be from {least} to {most}")
    return said


def _flag(params: Mapping[str, Any], name: str) -> bool:
    said = params.get(name)
    if said is not None and not isinstance(said, bool):
        raise ParametersError(f"{name} is {_shown(said)}; it must be true or false")
    return bool(said)


def _shown(said: object) -> str:
    """Return the beginning of what a client said, however long it is."""
    words = repr(said)
    return words if len(words) <= MAX_SHOWN else f"{words[:MAX_SHOWN]}..."
