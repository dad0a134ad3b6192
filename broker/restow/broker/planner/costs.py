"""What rows of a program cost when they are read: how many pieces, how many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from restow.broker.layout.rows import Int64s
from restow.broker.planner.cost_model import CostModel
from restow.broker.planner.program import Column, GroupPair
from restow.broker.planner.table import ITEM_BYTES, strided

Seconds: TypeAlias = npt.NDArray[np.float64]


def token_counts(pairs: Sequence[GroupPair], tokens: int) -> Int64s:
    """How often the rows of each pair repeat for a prompt of ``tokens``."""
    counts = [tokens - pair.first_token(0, tokens) if pair.per_token else 1 for pair in pairs]
    return np.array(counts, np.int64)


def page_counts(pairs: Sequence[GroupPair], tokens: int) -> Int64s:
    """Source pages of each pair that a prompt of ``tokens`` is read from."""
    return np.array([len(pair.src_pages(0, tokens)) for pair in pairs], np.int64)


def row_costs(rows: Int64s, pairs: Sequence[GroupPair], tokens: int) -> tuple[Int64s, Int64s]:
    """Descriptors and bytes of each row when read one by one for a prompt of ``tokens``.

    Pieces of neighbouring pages that could still be joined count apart.
    """
    page_tokens = np.array([[p.src.page_tokens, p.dst.page_tokens] for p in pairs], np.int64)
    page_tokens = page_tokens.reshape(-1, 2)[rows[:, Column.GROUP_PAIR]]
    per_token = page_tokens[:, 0] > 0
    repeats = token_counts(pairs, tokens)[rows[:, Column.GROUP_PAIR]]
    item = ITEM_BYTES[rows[:, Column.SRC_DTYPE]]
    row_bytes = rows[:, Column.COUNT] * item
    contiguous = rows[:, Column.SRC_STEP_BYTES] == item
    contiguous &= rows[:, Column.DST_STEP_BYTES] == item
    # A run, and also single elements of a strided row, may go on from token to token.
    length = np.where(contiguous, row_bytes, item)
    joined = per_token & (rows[:, Column.SRC_TOKEN_STRIDE_BYTES] == length)
    joined &= rows[:, Column.DST_TOKEN_STRIDE_BYTES] == length
    sizes = np.maximum(page_tokens, 1)
    edges = -(-repeats[:, None] // sizes)
    stretches = edges.sum(axis=1) - -(-repeats // np.lcm(sizes[:, 0], sizes[:, 1]))
    pieces = np.where(contiguous, 1, rows[:, Column.COUNT])
    return pieces * np.where(joined, stretches, repeats), row_bytes * repeats


def copy_seconds(
    rows: Int64s, pairs: Sequence[GroupPair], tokens: int, costs: CostModel
) -> Seconds:
    """What copying each row once costs, on one side of staging."""
    descriptors, sizes = row_costs(rows, pairs, tokens)
    spread = strided(rows)
    # However many elements a strided row has, it is one piece to copy.
    pieces = np.where(spread, descriptors // rows[:, Column.COUNT], descriptors)
    elements = np.where(spread, sizes // ITEM_BYTES[rows[:, Column.SRC_DTYPE]], 0)
    seconds: Seconds = sizes / costs.copy_bytes_per_second
    return seconds + pieces * costs.seconds_per_copy + elements * costs.seconds_per_element


def wire_bytes(rows: Int64s, pairs: Sequence[GroupPair], tokens: int) -> Int64s:
    """Bytes that packed rows send: the narrower of two types travels."""
    counts = token_counts(pairs, tokens)[rows[:, Column.GROUP_PAIR]]
    items = ITEM_BYTES[rows[:, [Column.SRC_DTYPE, Column.DST_DTYPE]]].min(axis=1)
    sizes: Int64s = rows[:, Column.COUNT] * items * counts
    return sizes
