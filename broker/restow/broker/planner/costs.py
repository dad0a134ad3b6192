"""What rows of a program cost when they are read: how many pieces, how many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from restow.broker.layout.dtype import ITEM_BYTES
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.cost_model import CostModel
from restow.broker.planner.program import Column, GroupPair, cut_shared, moved_tokens
from restow.broker.planner.program.rows import strided

Seconds: TypeAlias = npt.NDArray[np.float64]

UNCACHED = 1.8
"""Bytes that are packed take so many times what they were measured to take.

A source that has just been asked finds neither its pages nor its staging in a cache, and the reader
that has just read them neither. What a piece costs beside its bytes grows little. Fitted on pieces
of 256 bytes to 4 KiB (docs/benchmarks.md).
"""


def token_counts(pairs: Sequence[GroupPair], tokens: int) -> Int64s:
    """How often the rows of each pair repeat for a prompt of ``tokens``."""
    counts = [moved_tokens(pair, 0, tokens) if pair.per_token else 1 for pair in pairs]
    return np.array(counts, np.int64)


def row_costs(rows: Int64s, pairs: Sequence[GroupPair], tokens: int) -> tuple[Int64s, Int64s]:
    """Pieces and bytes of each row for a prompt of ``tokens``, when each piece is taken alone."""
    page_tokens, joined, length = _joined(rows, pairs)
    repeats = token_counts(pairs, tokens)[rows[:, Column.GROUP_PAIR]]
    row_bytes = rows[:, Column.COUNT] * ITEM_BYTES[rows[:, Column.SRC_DTYPE]]
    sizes = np.maximum(page_tokens, 1)
    stretches = _stretches(sizes, pairs, tokens, rows[:, Column.GROUP_PAIR])
    for number, pair in enumerate(pairs):
        if not pair.alike and len(mine := np.flatnonzero(rows[:, Column.GROUP_PAIR] == number)):
            stretches[mine] = len(cut_shared(pair, 0, tokens, (pair.src, pair.dst))[0])
    pieces = np.where(length == row_bytes, 1, rows[:, Column.COUNT])
    return pieces * np.where(joined, stretches, repeats), row_bytes * repeats


def _stretches(sizes: Int64s, pairs: Sequence[GroupPair], tokens: int, pair: Int64s) -> Int64s:
    """How many pieces the pages of both sides, of ``sizes`` ``[rows, 2]``, cut what moves into."""
    ends = [(p.first_token(0, tokens), tokens) if p.per_token else (0, 1) for p in pairs]
    first, stop = np.array(ends, np.int64).reshape(-1, 2)[pair].T
    steps = np.column_stack([sizes, np.lcm(sizes[:, 0], sizes[:, 1])])
    cuts = (stop - 1)[:, None] // steps - first[:, None] // steps
    found: Int64s = np.where(first < stop, 1 + cuts[:, 0] + cuts[:, 1] - cuts[:, 2], 0)
    return found


def descriptors(rows: Int64s, pairs: Sequence[GroupPair], tokens: int) -> Seconds:
    """Descriptors of each row when it is read into place.

    A run of rows (`page_runs`) is one descriptor in every whole page, of which each row counts its
    share. Whole pages that follow each other count apart.
    """
    counts = row_costs(rows, pairs, tokens)[0].astype(np.float64)
    run = page_runs(rows, pairs)
    members = np.bincount(run, minlength=len(rows))[run]
    pair = rows[:, Column.GROUP_PAIR]
    cut = np.array([one.window_tokens > 0 and not one.dst.whole_blocks for one in pairs], bool)
    size = np.array([max(one.src.page_tokens, 1) for one in pairs], np.int64)
    # A window begins anywhere in its first page.
    before = np.where(cut, size - 1, 0)
    full = (np.maximum(token_counts(pairs, tokens) - before, 0) // size)[pair]
    return counts - np.where(members > 1, full * (1 - 1 / members), 0.0)


def page_runs(rows: Int64s, pairs: Sequence[GroupPair]) -> Int64s:
    """A number for each row, equal for those that are one piece in whole pages of both sides.

    Such are the heads of a page, where both sides have as many tokens in one, and the same ones.
    """
    run = np.arange(len(rows))
    page_tokens, joined, length = _joined(rows, pairs)
    alike = np.array([pair.alike for pair in pairs], np.bool_)[rows[:, Column.GROUP_PAIR]]
    index = np.flatnonzero(joined & alike & (page_tokens[:, 0] == page_tokens[:, 1]))
    if len(index) < 2:
        return run
    order = index[np.lexsort((rows[index, Column.SRC_OFFSET_BYTES], *rows[index][:, _SAME].T))]
    mine = rows[order]
    reach = length[order] * page_tokens[order, 0]
    follows = (mine[1:, _SAME] == mine[:-1, _SAME]).all(axis=1)
    follows &= reach[1:] == reach[:-1]  # as agents join them
    for offset in (Column.SRC_OFFSET_BYTES, Column.DST_OFFSET_BYTES):
        follows &= mine[1:, offset] == mine[:-1, offset] + reach[:-1]
    begins = np.concatenate([[True], ~follows])
    run[order] = order[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    return run


_SAME = [Column.SRC_RANK, Column.GROUP_PAIR, Column.SRC_REGION, Column.DST_REGION]


def _joined(rows: Int64s, pairs: Sequence[GroupPair]) -> tuple[Int64s, Bools, Int64s]:
    """Tokens of a page on both sides; rows that go on from token to token; bytes of their pieces.

    A run goes on so, and single elements of a strided row may.
    """
    page_tokens = np.array([[p.src.page_tokens, p.dst.page_tokens] for p in pairs], np.int64)
    page_tokens = page_tokens.reshape(-1, 2)[rows[:, Column.GROUP_PAIR]]
    item = ITEM_BYTES[rows[:, Column.SRC_DTYPE]]
    contiguous = rows[:, Column.SRC_STEP_BYTES] == item
    contiguous &= rows[:, Column.DST_STEP_BYTES] == item
    length = np.where(contiguous, rows[:, Column.COUNT] * item, item)
    joined = page_tokens[:, 0] > 0
    joined &= rows[:, Column.SRC_TOKEN_STRIDE_BYTES] == length
    joined &= rows[:, Column.DST_TOKEN_STRIDE_BYTES] == length
    return page_tokens, joined, length


@dataclass(frozen=True)
class PricedRows:
    """Rows, and what each of them costs for a prompt of ``tokens``, found once for all ways."""

    rows: Int64s
    pairs: Sequence[GroupPair]
    tokens: int
    costs: CostModel

    @property
    def casts(self) -> Bools:
        """Mask of the rows that change the type of their elements."""
        mask: Bools = self.rows[:, Column.SRC_DTYPE] != self.rows[:, Column.DST_DTYPE]
        return mask

    @cached_property
    def wire_bytes(self) -> Int64s:
        """Bytes that packed rows send: the narrower of two types travels."""
        counts = token_counts(self.pairs, self.tokens)[self.rows[:, Column.GROUP_PAIR]]
        items = ITEM_BYTES[self.rows[:, [Column.SRC_DTYPE, Column.DST_DTYPE]]].min(axis=1)
        sizes: Int64s = self.rows[:, Column.COUNT] * items * counts
        return sizes

    @cached_property
    def read_s(self) -> Seconds:
        """What reading the bytes of each row costs, without descriptors."""
        _, sizes = self._alone
        seconds: Seconds = sizes / self.costs.read_bytes_per_second
        return seconds

    @cached_property
    def into_place_s(self) -> Seconds:
        """What reading each row into place costs."""
        counts = descriptors(self.rows, self.pairs, self.tokens)
        return counts * self.costs.seconds_per_descriptor + self.read_s

    @cached_property
    def copy_s(self) -> Seconds:
        """What copying each row once costs, on one side of staging."""
        pieces, sizes = self._alone
        spread = strided(self.rows)
        # However many elements a strided row has, it is one piece to copy.
        pieces = np.where(spread, pieces // self.rows[:, Column.COUNT], pieces)
        elements = np.where(spread, sizes // ITEM_BYTES[self.rows[:, Column.SRC_DTYPE]], 0)
        seconds: Seconds = sizes / self.costs.copy_bytes_per_second
        seconds += pieces * self.costs.seconds_per_copy
        return seconds + elements * self.costs.seconds_per_element

    @cached_property
    def packing_s(self) -> Seconds:
        """What copying each row once costs at a source that packs it, and again at its reader."""
        _, sizes = self._alone
        return self.copy_s + (UNCACHED - 1) * sizes / self.costs.copy_bytes_per_second

    @cached_property
    def _alone(self) -> tuple[Int64s, Int64s]:
        return row_costs(self.rows, self.pairs, self.tokens)
