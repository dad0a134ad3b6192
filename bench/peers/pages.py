"""What a page of a rank holds, byte for byte: which byte of which element of the whole layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from peers.kinds import CONV_ITEM_BYTES, KV_ITEM_BYTES, PAGE_TOKENS, STATE_ITEM_BYTES, Kind

from restow.broker.layout.rows import Int64s

NO_STATE = -1
"""The id of a byte that is no part of the state: rows for speculative tokens."""

WINDOW, STATE, KV = "conv", "state", "K and V"


@dataclass(frozen=True, slots=True)
class Form:
    """How an engine packs a layer.

    ``conv`` is DS (channels of rows) or SD (rows of channels); ``rows`` counts those for
    speculative tokens too. ``kv`` is HND (head, token, K beside V) or NHD (all K by token and head,
    then all V).
    """

    conv: str = "DS"
    rows: int = 0
    kv: str = "HND"


@dataclass(frozen=True, slots=True)
class Page:
    """``ids`` has one entry a byte, unique in the layer; ``parts`` says where each part ends."""

    ids: Int64s
    parts: dict[str, tuple[int, int]]


def pages(kind: Kind, form: Form, tp: int) -> list[Page]:
    """The page of every rank."""
    make = _attention if kind.family == "gqa" else _recurrent
    return [make(kind, form, tp, rank) for rank in range(tp)]


def _recurrent(kind: Kind, form: Form, tp: int, rank: int) -> Page:
    """The conv state, its live rows first, then the recurrent state."""
    channels = kind.channels(tp, rank)
    window = np.full((len(channels), form.rows), NO_STATE)
    window[:, : kind.taps] = channels[:, None] * kind.taps + np.arange(kind.taps)
    if form.conv == "SD":
        window = window.T
    conv = _bytes_of(window, CONV_ITEM_BYTES)
    count = kind.sizes["conv_kernel"] * (1 + int(kind.channels(1, 0)[-1]))
    state = _bytes_of(kind.state(tp, rank) + count, STATE_ITEM_BYTES)
    ids = np.concatenate([conv, state])
    return Page(ids, {WINDOW: (0, len(conv)), STATE: (len(conv), len(ids))})


def _attention(kind: Kind, form: Form, tp: int, rank: int) -> Page:
    """One page of tokens."""
    dim = kind.sizes["head_dim"]
    whole = np.arange(kind.sizes["kv_heads"] * PAGE_TOKENS * 2 * dim)
    held = whole.reshape(-1, PAGE_TOKENS, 2, dim)[kind.kv_heads(tp, rank)]
    ids = _bytes_of(held if form.kv == "HND" else held.transpose(2, 1, 0, 3), KV_ITEM_BYTES)
    return Page(ids, {KV: (0, len(ids))})


def _bytes_of(elements: Int64s, item_bytes: int) -> Int64s:
    """The ids of the bytes of elements: eight a element, of which small types use some."""
    ids = elements.reshape(-1, 1) * 8 + np.arange(item_bytes)
    ids[elements.ravel() == NO_STATE] = NO_STATE
    flat: Int64s = ids.ravel()
    return flat
