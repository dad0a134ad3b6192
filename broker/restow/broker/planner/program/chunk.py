"""How much of a staged run is a chunk: what sources interleave (`ways.interleave`) goes first."""

from __future__ import annotations

from restow.broker.layout.dtype import ITEM_BYTES
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import Column

CHUNK_ALIGN_BYTES = 16
"""Every field of a chunk begins at a multiple of this, and every chunk ends at one."""

INTERLEAVED_TO = (Column.DST_OFFSET_BYTES, Column.DST_STEP_BYTES, Column.DST_DTYPE)
RESTORED_FROM = (Column.SRC_OFFSET_BYTES, Column.SRC_STEP_BYTES, Column.SRC_DTYPE)
"""Where rows say what lies in a chunk."""


def chunk_bytes(rows: Int64s, side: tuple[Column, Column, Column] = RESTORED_FROM) -> int:
    """Length of the chunk that ``rows`` of one source rank touch on the given side."""
    if not len(rows):
        return 0
    offset, step, dtype = (rows[:, column] for column in side)
    ends = offset + (rows[:, Column.COUNT] - 1) * step + ITEM_BYTES[dtype]
    return aligned(int(ends.max()))


def aligned(length_bytes: int) -> int:
    """The next multiple of `CHUNK_ALIGN_BYTES`."""
    return -(-length_bytes // CHUNK_ALIGN_BYTES) * CHUNK_ALIGN_BYTES
