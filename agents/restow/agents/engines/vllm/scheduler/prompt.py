"""`content` names what a state is computed from; `truncate` cuts P's prompt to where it stops."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from restow.agents.engines.vllm.scheduler.lora_adapters import LoraRequest
from restow.broker.client import content_of

TRUNCATED = "_p_side_truncated"
"""vLLM's own mark in ``kv_transfer_params`` of a prompt that was cut already, kept over
preemptions."""
FEATURES_HASH = "_restow_hash"
"""An attribute of an image's processed features."""


class Request(Protocol):
    """What is needed of a vLLM request (`v1/request.py`)."""

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
        """Note for metrics that something has happened to it now."""

    def take_events(self) -> list[Any] | None:
        """What was noted, for the client's side to count once."""

    def take_prefill_stats(self) -> Any:
        """How much of the prompt was found, for the client's side to count once."""

    def update_block_hashes(self) -> None:
        """Hash blocks that are full by now."""

    @property
    def trace_headers(self) -> Mapping[str, str] | None:
        """Those that the request came with; `traceparent` names its trace."""

    def get_skip_reading_prefix_cache(self) -> bool:
        """Whether all of the prompt must be computed here, as for prompt logprobs."""


def content(request: Request, position: int, adapter: str, sampling: bytes = b"") -> bytes:
    """Name what the state at ``position`` is computed from, for P and D alike.

    ``adapter`` is the word of the request's (`LoraAdapters`); ``sampling`` what decides the token
    behind it, where P samples that for D (`sampling_word`).
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

    The hash is of what the model computes with: the processed features. vLLM's own identifier names
    the checkpoint by where it lies, so that it differs between engines of one model, and it may be
    a word of the client's, who may give it to two images. It stands in where the engine's core has
    no features (``mm_processor_cache_type="shm"``).
    """
    return [
        (one.mm_position.offset, _features_hash(one.data) or one.identifier.encode())
        for one in request.mm_features
    ]


def _features_hash(item: Any) -> bytes:
    """Return a hash of features as vLLM keeps them; empty where there are none.

    vLLM gives requests that name an image again the same item, which carries its hash.
    """
    if item is None or "address" in item:  # in shared memory, which workers alone read
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
    """Add nested tensors, each behind what tells its type and size."""
    if isinstance(value, list | tuple):
        hasher.update(f"list {len(value)}\0".encode())
        for one in value:
            _add(hasher, one)
    elif isinstance(value, torch.Tensor | np.ndarray):
        hasher.update(f"{value.dtype} {list(value.shape)}\0".encode())
        hasher.update(_bytes(value) if isinstance(value, torch.Tensor) else value.tobytes())
    else:  # a number or a word
        said = repr(value).encode()
        hasher.update(f"{type(value).__name__} {len(said)}\0".encode() + said)


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
