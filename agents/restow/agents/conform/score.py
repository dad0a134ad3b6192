"""Which share of D's bytes is right after copies, made on pages of ids.

A page has an id for each byte, which says which byte of which element of the whole layer it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from restow.agents.conform.rules import (
    CONV_ITEM_BYTES,
    KV_ITEM_BYTES,
    PAGE_TOKENS,
    STATE_ITEM_BYTES,
    Int64s,
    Kind,
)

NO_STATE = -1
"""The id of a byte that is not part of the state: rows for speculative tokens."""

WINDOW, STATE, KV = "conv", "state", "K and V"


@dataclass(frozen=True, slots=True)
class Form:
    """How an engine packs a layer.

    ``conv`` is DS (channels of rows) or SD (rows of channels); ``rows`` includes those for
    speculative tokens. ``kv`` is HND (head, token, K beside V) or NHD (all K by token and head,
    then all V).
    """

    conv: str = "DS"
    rows: int = 0
    kv: str = "HND"


@dataclass(frozen=True, slots=True)
class Page:
    """A page: ``ids`` has an entry for each byte, ``parts`` the span of each part."""

    ids: Int64s
    parts: dict[str, tuple[int, int]]


def pages(kind: Kind, form: Form, tp: int) -> list[Page]:
    """Return the page of every rank."""
    make = _attention if kind.family == "gqa" else _recurrent
    return [make(kind, form, tp, rank) for rank in range(tp)]


def _recurrent(kind: Kind, form: Form, tp: int, rank: int) -> Page:
    """Return the conv state, its live rows first, followed by the recurrent state."""
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
    """Return one page of tokens."""
    dim = kind.sizes["head_dim"]
    whole = np.arange(kind.sizes["kv_heads"] * PAGE_TOKENS * 2 * dim)
    held = whole.reshape(-1, PAGE_TOKENS, 2, dim)[kind.kv_heads(tp, rank)]
    ids = _bytes_of(held if form.kv == "HND" else held.transpose(2, 1, 0, 3), KV_ITEM_BYTES)
    return Page(ids, {KV: (0, len(ids))})


def _bytes_of(elements: Int64s, item_bytes: int) -> Int64s:
    """Return the ids of all bytes: eight per element, of which smaller types use some."""
    ids = elements.reshape(-1, 1) * 8 + np.arange(item_bytes)
    ids[elements.ravel() == NO_STATE] = NO_STATE
    flat: Int64s = ids.ravel()
    return flat


POISON, OUTSIDE = -2, -3
"""The ids of bytes that D holds before, and of those behind the end of every page."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One contiguous copy, from a page of P to a page of D."""

    src_rank: int
    dst_rank: int
    src_offset_bytes: int
    dst_offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """The bytes of one part that a rank of D needs, and how many of them are right."""

    right_bytes: int
    due_bytes: int

    @property
    def whole(self) -> bool:
        """Return whether all bytes are right."""
        return self.right_bytes == self.due_bytes


@dataclass(frozen=True, slots=True)
class Score:
    """The shares of every part, one per rank of D, and the bytes that landed outside of pages."""

    shares: dict[str, tuple[Share, ...]]
    outside_bytes: int = 0

    @property
    def whole(self) -> bool:
        """Return whether all bytes are right, and no byte was written outside."""
        shares = [share for part in self.shares.values() for share in part]
        return self.outside_bytes == 0 and all(share.whole for share in shares)


def score(sources: Sequence[Page], wanted: Sequence[Page], copies: Sequence[Copy]) -> Score:
    """Execute the copies on poisoned pages, and compare them with what the ranks of D need."""
    margin = max((copy.length_bytes for copy in copies), default=0)
    memory = [np.append(page.ids, np.full(margin, OUTSIDE)) for page in sources]
    arrived = [np.full(len(page.ids), POISON) for page in wanted]
    outside_bytes = 0
    for copy in copies:
        page = arrived[copy.dst_rank]
        kept_bytes = min(max(len(page) - copy.dst_offset_bytes, 0), copy.length_bytes)
        outside_bytes += copy.length_bytes - kept_bytes
        start = min(copy.src_offset_bytes, len(memory[copy.src_rank]) - kept_bytes)
        place = slice(copy.dst_offset_bytes, copy.dst_offset_bytes + kept_bytes)
        page[place] = memory[copy.src_rank][start : start + kept_bytes]
    shares = {
        part: tuple(
            _share(page.ids[slice(*page.parts[part])], got[slice(*page.parts[part])])
            for page, got in zip(wanted, arrived, strict=True)
        )
        for part in wanted[0].parts
    }
    return Score(shares, outside_bytes)


def _share(wanted: np.ndarray, arrived: np.ndarray) -> Share:
    due = wanted != NO_STATE
    return Share(int(((wanted == arrived) & due).sum()), int(due.sum()))
