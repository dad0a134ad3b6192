"""Read a vLLM request: which handoff it belongs to, what its state is computed from, its sampling.

Routers made for vLLM's own connectors send ``do_remote_decode`` to P, and pass P's answer on to D.
Other routers give both sides the same id at once, as ``handoff_id``, or as ``transfer_id`` if they
were made for connectors that write to D (MoRI-IO). If no side is named beside a ``handoff_id``, the
engine's role decides it.

P and D compute the same word for the content of a state: its tokens, attachments, salt and adapter,
and whatever decides the next token where P samples that token for D.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import torch

from restow.agents.engines.common.adapter_errors import ParametersError
from restow.agents.engines.common.chains import FollowedPrompt
from restow.agents.engines.vllm.private import token_ids
from restow.broker.client import content_of

HANDOFF_ID = "handoff_id"
TRANSFER_ID = "transfer_id"
"""The id in requests for other connectors. It counts if there is no `HANDOFF_ID`."""
TIMEOUT_MS = "timeout_ms"
CHOICES = "choices"
MAX_CHOICES = 128
"""Answers to one prompt. Each is a handoff that P keeps until it is asked for."""
MAX_ID_BYTES = 1024
"""Bytes of an id that a router gives. The suffixes that P and D append are small."""
MAX_TIMEOUT_MS = 600_000
"""The broker's limit."""
MAX_SHOWN = 80
"""Characters of a client's value that an error's message shows."""
SIDES = ("do_remote_decode", "do_remote_prefill")
READERS = "readers"
MAX_READERS = 64
"""The broker's limit for one publication."""
KV_HINT = "kv_hint"
"""Hints about the cache, for engines whose requests have no place of their own for them."""
MARKS = "marks"
"""Numbers of tokens of the prompt after which a state is worth keeping."""
MAX_MARKS = 64
MOVABLE = "movable"
"""Whether the router would have another engine go on with the reply, if this engine leaves."""
MOVED = "moved"
"""Whether the prompt ends with the beginning of a reply of another engine."""
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

    There is none if they are empty, or contain only hints, marks and the two sides, both false.
    ``default_id`` is the id at P of a handoff to which the router gave no id. Raises
    `ParametersError`.
    """
    if not params:
        return None
    if not isinstance(params, Mapping):
        raise ParametersError(f"kv_transfer_params are {type(params).__name__}; they must be a map")
    handoff_id = _handoff_id(params.get(HANDOFF_ID, params.get(TRANSFER_ID)))
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
                "have the router give handoff_id, or ask for each prompt by itself"
            )
        return prefill
    if prefilled_elsewhere:
        if handoff_id is None:
            raise ParametersError(
                "do_remote_prefill without handoff_id: the parameters are not those that a P with "
                "this connector answered with"
            )
        return replace(decode, handoff_id=handoff_id)
    if handoff_id is None and set(params) <= {*SIDES, KV_HINT, MARKS, MOVABLE, MOVED}:
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


def marks_of(params: Mapping[str, Any], prompt_tokens: int) -> list[int]:
    """Return the marks of a prompt, in rising order. Raises `ParametersError`."""
    given = params.get(MARKS)
    if given is None:
        return []
    whole = isinstance(given, list) and all(type(one) is int for one in given)
    if not whole or len(given) > MAX_MARKS:
        raise ParametersError(
            f"{MARKS} is {_shown(given)}; it must be a list of at most {MAX_MARKS} whole numbers"
        )
    for mark in given:
        if not 0 < mark <= prompt_tokens:
            raise ParametersError(
                f"a mark after token {mark} is outside of the prompt, which has {prompt_tokens} "
                f"tokens"
            )
    return sorted(set(given))


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


TRUNCATED = "_p_side_truncated"
"""vLLM's own mark in ``kv_transfer_params`` of a prompt that was cut. It outlives preemptions."""
FEATURES_HASH = "_restow_hash"
"""An attribute of an image's processed features."""


class LoraRequest(Protocol):
    """The part of vLLM's LoRA request that is read (`lora/request.py`)."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class Request(Protocol):
    """The part of a vLLM request that is read (`v1/request.py`)."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    max_tokens: int
    prompt_token_ids: list[int] | None
    prompt_embeds: Any
    mm_features: list[Any]
    lora_request: LoraRequest | None
    cache_salt: str | None
    block_hashes: Sequence[bytes]
    resumable: bool
    sampling_params: Any
    client_index: int
    output_token_ids: Sequence[int]
    _all_token_ids: list[int]

    def record_event(self, event_type: Any) -> None:
        """Note for metrics that something has happened to the request now."""

    def take_events(self) -> list[Any] | None:
        """Return the events noted so far, for the client's side to count once."""

    def take_prefill_stats(self) -> Any:
        """Return how much of the prompt was cached, for the client's side to count once."""

    def update_block_hashes(self) -> None:
        """Hash blocks that are full by now."""

    @property
    def trace_headers(self) -> Mapping[str, str] | None:
        """The headers that the request came with; `traceparent` names its trace."""

    def get_skip_reading_prefix_cache(self) -> bool:
        """Return whether all of the prompt must be computed here, as for prompt logprobs."""


def trace_parent(request: Request) -> str:
    """Return the parent of the request's trace; empty unless vLLM traces."""
    return (request.trace_headers or {}).get("traceparent", "")


def followed_prompt(request: Request, adapter: str) -> FollowedPrompt | None:
    """Return the prompt whose chain names a request's prefixes; None: it has no chain.

    ``adapter`` is the fingerprint of the request's LoRA adapter. Prompts of embeddings have no
    chain, and neither have sessions whose prompt grows, since they take back earlier hashes.
    """
    if request.prompt_embeds is not None or request.resumable:
        return None
    # vLLM hashed the prompt before its end was cut off, and may never hash that block again.
    cut = bool((request.kv_transfer_params or {}).get(TRUNCATED))
    sampling = request.sampling_params
    return FollowedPrompt(
        token_ids(request),
        adapter,
        request.cache_salt or "",
        attachments_of(request),
        stop_token_ids=(sampling and sampling.all_stop_token_ids) or (),
        block_hashes=request.block_hashes,
        limit_tokens=request.num_prompt_tokens if cut else None,
        moved=bool((request.kv_transfer_params or {}).get(MOVED)),
    )


def content(request: Request, position: int, adapter: str, sampling: bytes = b"") -> bytes:
    """Return a hash of what the state at ``position`` is computed from, alike on P and D.

    ``adapter`` is the fingerprint of the request's LoRA adapter; ``sampling`` the word of what
    decides the next token, where P samples that for D (`sampling_word`).
    """
    attachments = attachments_of(request)
    if request.prompt_embeds is not None:
        rows = request.prompt_embeds[:position]
        attachments.append((0, hashlib.sha256(_bytes(rows)).digest()))
    if sampling:
        attachments.append((0, b"sampling" + sampling))
    return content_of(
        token_ids(request)[:position],
        position,
        adapter=adapter,
        salt=request.cache_salt or "",
        attachments=attachments,
    )


def attachments_of(request: Request) -> list[tuple[int, bytes]]:
    """Return the images, videos and sounds of a prompt: where each begins, and a hash of it.

    The hash is of the processed features, which the model computes with. vLLM's own identifier is
    not enough: it names the checkpoint by its path, so it differs between engines of one model, and
    it may be a word of the client's, who may give it to two images. It is used only for an item
    that vLLM's core has without features, which `check_engine` excludes.
    """
    return [
        (feature.mm_position.offset, _features_hash(feature.data) or feature.identifier.encode())
        for feature in request.mm_features
    ]


def _features_hash(item: Any) -> bytes:
    """Return a hash of features as vLLM keeps them; empty where there are none.

    If a request names an image again, vLLM gives it the same item, so the item carries its hash.
    """
    if item is None:
        return b""
    digest: bytes | None = getattr(item, FEATURES_HASH, None)
    if digest is None:
        hasher = hashlib.sha256(b"restow features 1\0")
        for key in sorted(item):
            _add(hasher, key)
            _add(hasher, item[key].data)
        digest = hasher.digest()
        setattr(item, FEATURES_HASH, digest)
    return digest


def _add(hasher: hashlib._Hash, value: Any) -> None:
    """Add nested tensors to a hash, each after its type and size."""
    if isinstance(value, list | tuple):
        hasher.update(f"list {len(value)}\0".encode())
        for element in value:
            _add(hasher, element)
    elif isinstance(value, torch.Tensor | np.ndarray):
        hasher.update(f"{value.dtype} {list(value.shape)}\0".encode())
        hasher.update(_bytes(value) if isinstance(value, torch.Tensor) else value.tobytes())
    else:  # a number or a word
        text = repr(value).encode()
        hasher.update(f"{type(value).__name__} {len(text)}\0".encode() + text)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def truncate(request: Request, backoff: int) -> None:
    """Take the last tokens from P's prompt, once per request, however often it is preempted."""
    params = request.kv_transfer_params
    if (
        params is None
        or params.get(TRUNCATED)
        or not 0 < backoff < request.num_prompt_tokens
        or request.get_skip_reading_prefix_cache()
    ):
        return
    if request.prompt_token_ids is not None:
        del request.prompt_token_ids[-backoff:]
    elif request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-backoff]
    else:
        return
    del token_ids(request)[-backoff:]
    request.num_prompt_tokens -= backoff
    request.max_tokens = 1
    params[TRUNCATED] = True


# -- sampling -------------------------------------------------------------------------------------

_DECIDING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("logit_bias", "allowed_token_ids", "watermarking"),
)
"""Parameters on which the next token depends, where P may sample it."""
_LOOKING_BACK = ("presence_penalty", "frequency_penalty", "min_tokens", "bad_words")
"""Parameters by which a token depends on tokens that were sampled before it."""
_OF_EACH_TOKEN = (
    *("logprobs", "prompt_logprobs", "logprob_token_ids"),
    *("structured_outputs", "thinking_token_budget", "repetition_detection"),
    "trace_decode_token_ids",
)
"""Parameters with which D would have to know more of a token than its id."""


def sampling_word(request: Request) -> bytes:
    """Return a hash of the parameters that decide the next token.

    P's token is D's first if both have the same hash. Stop tokens do not decide the token, and a
    seed does not at temperature 0.
    """
    params = request.sampling_params
    given = {name: getattr(params, name, None) for name in _DECIDING}
    given["logit_bias"] = sorted((given["logit_bias"] or {}).items())
    given["allowed_token_ids"] = sorted(set(given["allowed_token_ids"] or ()))
    return hashlib.sha256(repr(sorted(given.items())).encode()).digest()


def why_not_handed_on(request: Request) -> str:
    """Return why P's token can't be D's first, in words; empty: it can.

    D must sample later tokens as if it had sampled the first, and D's worker takes it for a part of
    the prompt. P and D decide alike if they are given the same parameters (vLLM 0.32
    `sampling_params.py`).
    """
    params = request.sampling_params
    if request.prompt_token_ids is None or request.prompt_embeds is not None or request.resumable:
        return "the prompt is not given by tokens alone"
    if params is None:
        return "nothing is sampled"
    if params.seed is not None and params.temperature > 0:
        return "seed"
    for name in _LOOKING_BACK:
        if getattr(params, name, None):
            return name
    for name in _OF_EACH_TOKEN:
        if getattr(params, name, None) is not None:
            return name
    return ""
