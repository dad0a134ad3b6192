"""Which share of D's bytes are right after a peer's copies, by the ids of elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from peers.pages import NO_STATE, Page

POISON, OUTSIDE = -2, -3
"""What D's pages hold before, and what lies behind the end of every page."""


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
    """Of the bytes of one part that a rank of D needs: how many it has right."""

    right_bytes: int
    due_bytes: int

    @property
    def whole(self) -> bool:
        """Whether all are right."""
        return self.right_bytes == self.due_bytes


@dataclass(frozen=True, slots=True)
class Score:
    """The shares of every part, one entry a rank of D, and what landed outside of D's pages."""

    shares: dict[str, tuple[Share, ...]]
    outside_bytes: int = 0

    @property
    def whole(self) -> bool:
        """Whether everything is right."""
        shares = [share for part in self.shares.values() for share in part]
        return self.outside_bytes == 0 and all(share.whole for share in shares)


def score(sources: Sequence[Page], wanted: Sequence[Page], copies: Sequence[Copy]) -> Score:
    """Execute the copies on poisoned pages, and compare with what the ranks of D need."""
    margin = max((copy.length_bytes for copy in copies), default=0)
    memory = [np.append(page.ids, np.full(margin, OUTSIDE)) for page in sources]
    arrived = [np.full(len(page.ids), POISON) for page in wanted]
    outside_bytes = 0
    for copy in copies:
        page = arrived[copy.dst_rank]
        kept_bytes = min(max(len(page) - copy.dst_offset_bytes, 0), copy.length_bytes)
        outside_bytes += copy.length_bytes - kept_bytes
        start = min(copy.src_offset_bytes, len(memory[copy.src_rank]) - kept_bytes)
        there = slice(copy.dst_offset_bytes, copy.dst_offset_bytes + kept_bytes)
        page[there] = memory[copy.src_rank][start : start + kept_bytes]
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
