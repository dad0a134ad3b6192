"""What the connector reads of a vLLM request: the content of its state, and how it samples.

P and D compute the same word for the content of a state: its tokens, attachments, salt and adapter,
and whatever decides the next token where P samples that token for D.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from restow.agents.engines.common.chains import FollowedPrompt
from restow.broker.client import content_of

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
        request._all_token_ids,
        adapter,
        request.cache_salt or "",
        attachments_of(request),
        stop_token_ids=(sampling and sampling.all_stop_token_ids) or (),
        block_hashes=request.block_hashes,
        limit_tokens=request.num_prompt_tokens if cut else None,
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
        request._all_token_ids[:position],
        position,
        adapter=adapter,
        salt=request.cache_salt or "",
        attachments=attachments,
    )


def attachments_of(request: Request) -> list[tuple[int, bytes]]:
    """Return the images, videos and sounds of a prompt: where each begins, and a hash of it.

    The hash is of the processed features, which the model computes with. vLLM's own identifier does
    not do: it names the checkpoint by its path, so it differs between engines of one model, and it
    may be a word of the client's, who may give it to two images. It stands in where the engine's
    core has no features (``mm_processor_cache_type="shm"``).
    """
    return [
        (one.mm_position.offset, _features_hash(one.data) or one.identifier.encode())
        for one in request.mm_features
    ]


def _features_hash(item: Any) -> bytes:
    """Return a hash of features as vLLM keeps them; empty where there are none.

    vLLM gives requests that name an image again the same item, so the item carries its hash.
    """
    if item is None or "address" in item:  # in shared memory, which only workers read
        return b""
    found: bytes | None = getattr(item, FEATURES_HASH, None)
    if found is None:
        hasher = hashlib.sha256(b"restow features 1\0")
        for key in sorted(item):
            _add(hasher, key)
            _add(hasher, item[key].data)
        found = hasher.digest()
        setattr(item, FEATURES_HASH, found)
    return found


def _add(hasher: hashlib._Hash, value: Any) -> None:
    """Add nested tensors to a hash, each after its type and size."""
    if isinstance(value, list | tuple):
        hasher.update(f"list {len(value)}\0".encode())
        for one in value:
            _add(hasher, one)
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
    del request._all_token_ids[-backoff:]
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
"""Parameters by which a token depends on those that were sampled before it."""
_OF_EACH_TOKEN = (
    *("logprobs", "prompt_logprobs", "logprob_token_ids"),
    *("structured_outputs", "thinking_token_budget", "repetition_detection"),
    "trace_decode_token_ids",
)
"""Parameters for which D would have to know more of a token than its id."""


def sampling_word(request: Request) -> bytes:
    """Return a hash of the parameters that decide the next token.

    P's token is D's first if both have the same hash. Neither stop tokens decide it, nor a seed at
    temperature 0.
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
