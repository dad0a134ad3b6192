"""Bind rows that are copied: from pages or staging into pages or staging, with numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from restow.agents.binding.addresses import one_if_alike
from restow.agents.binding.alike_rows import alike_rows
from restow.agents.binding.operands import BoundOperand
from restow.agents.binding.pages import Tokens
from restow.broker.layout.dtype import ITEM_BYTES
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import Column, GroupPair


@dataclass(frozen=True, slots=True)
class Grid:
    """Strided copies: int64 arrays that broadcast to the shape of the addresses.

    ``src_dtype`` and ``dst_dtype`` are `DType` numbers; equal ones copy bytes unchanged.
    """

    src_address: Int64s
    dst_address: Int64s
    count: Int64s
    src_step_bytes: Int64s
    dst_step_bytes: Int64s
    src_dtype: Int64s
    dst_dtype: Int64s

    @property
    def size_bytes(self) -> int:
        """Bytes that are written."""
        sizes = self.count * ITEM_BYTES[self.dst_dtype]
        return int(np.broadcast_to(sizes, self.src_address.shape).sum())


@dataclass(frozen=True, slots=True)
class Copies:
    """All copies of one GATHER or SCATTER."""

    grids: tuple[Grid, ...] = ()

    def __len__(self) -> int:
        """How many rows of elements are copied."""
        return sum(grid.src_address.size for grid in self.grids)

    @property
    def size_bytes(self) -> int:
        """Bytes that are written."""
        return sum(grid.size_bytes for grid in self.grids)

    @classmethod
    def joined(cls, parts: Sequence[Copies]) -> Copies:
        """All copies of all parts, for one launch."""
        return cls(tuple(grid for part in parts for grid in part.grids))


def bind_copies(
    rows: Int64s, pairs: Sequence[GroupPair], src: BoundOperand, dst: BoundOperand, tokens: Tokens
) -> Copies:
    """Copies of all rows from one operand to the other, each grid ``[rows, stretches]``.

    Row by row, as they lie in a run: kernels then walk through it from end to end. Raises
    `PageCountError` and `PageRangeError`.
    """
    sides = [one.side for one in (src, dst) if one.side is not None]
    grids = []
    for alike in alike_rows(rows, pairs, sides):
        stretches, pair = alike.stretches(tokens), alike.pair
        src_pages, dst_pages = src.pages(pair, tokens), dst.pages(pair, tokens)
        if not len(stretches.first):
            continue
        some = rows.take(alike.index, axis=0)
        source, target = src.end(some, alike.index), dst.end(some, alike.index)
        grids.append(
            Grid(
                source.lines.addresses(src_pages, stretches),
                target.lines.addresses(dst_pages, stretches),
                some[..., Column.COUNT] * one_if_alike(stretches.count),
                source.step_bytes,
                target.step_bytes,
                source.dtype,
                target.dtype,
            )
        )
    return Copies(tuple(grids))
