"""Forms of steps, and the columns of their rows."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from restow.broker.layout.rows import Int64s
from restow.broker.layout.values import ITEM_BYTES


class Column(IntEnum):
    """Columns of a program's rows (int64)."""

    SRC_RANK = 0
    GROUP_PAIR = 1
    SRC_REGION = 2
    SRC_OFFSET_BYTES = 3
    DST_REGION = 4
    DST_OFFSET_BYTES = 5
    COUNT = 6
    SRC_STEP_BYTES = 7
    DST_STEP_BYTES = 8
    SRC_TOKEN_STRIDE_BYTES = 9
    DST_TOKEN_STRIDE_BYTES = 10
    SRC_DTYPE = 11
    DST_DTYPE = 12


class ProjectColumn(IntEnum):
    """Columns of a program's projected rows (int64)."""

    SPAN = 0
    SRC_OFFSET_BYTES = 1
    SRC_TAP_STRIDE_BYTES = 2
    TAPS = 3
    HIDDEN = 4
    DTYPE = 5
    WEIGHT_REGION = 6
    WEIGHT_OFFSET_BYTES = 7
    WEIGHT_STRIDE_BYTES = 8
    CHANNELS = 9
    GROUP_PAIR = 10
    DST_REGION = 11
    DST_OFFSET_BYTES = 12
    DST_STRIDE_BYTES = 13
    DST_TAP_STRIDE_BYTES = 14
    DST_DTYPE = 15


CHUNK_ALIGN_BYTES = 16
"""Alignment of every field in a chunk, and of the chunk's length."""

INTERLEAVED_TO = (Column.DST_OFFSET_BYTES, Column.DST_STEP_BYTES, Column.DST_DTYPE)
RESTORED_FROM = (Column.SRC_OFFSET_BYTES, Column.SRC_STEP_BYTES, Column.SRC_DTYPE)
"""The columns that say where an element lies in a chunk."""


def chunk_bytes(rows: Int64s, side: tuple[Column, Column, Column] = RESTORED_FROM) -> int:
    """Return the length of the chunk that a source rank's ``rows`` touch on the given side."""
    if not len(rows):
        return 0
    offset, step, dtype = (rows[:, column] for column in side)
    ends = offset + (rows[:, Column.COUNT] - 1) * step + ITEM_BYTES[dtype]
    return aligned(int(ends.max()))


def aligned(length_bytes: int) -> int:
    """Round up to a multiple of `CHUNK_ALIGN_BYTES`."""
    return -(-length_bytes // CHUNK_ALIGN_BYTES) * CHUNK_ALIGN_BYTES


class StepKind(IntEnum):
    """What a step does. Sources GATHER; the destination does everything else."""

    READ = 1
    GATHER = 2
    SCATTER = 3
    PROJECT = 4
    CLEAR = 5


class Operand(IntEnum):
    """Where an end of a step's rows lies."""

    NOTHING = 0
    PAGES = 1
    """Pages of a rank's regions."""
    RUN = 2
    """What a source gathers for a destination rank; it is read as a single piece."""
    SPAN = 3
    """Pages of a source, or a stretch of each, read unchanged into staging."""


class Form(NamedTuple):
    """What a step does, from where, and to where."""

    kind: StepKind
    src: Operand
    dst: Operand


READ_PAGES = Form(StepKind.READ, Operand.PAGES, Operand.PAGES)
"""Reads runs of bytes directly into place."""
READ_SPANS = Form(StepKind.READ, Operand.PAGES, Operand.SPAN)
"""Row ``i`` reads `COUNT` bytes of every page into span ``i``, which is its `DST_REGION`."""
GATHER_PLACED = Form(StepKind.GATHER, Operand.PAGES, Operand.RUN)
"""Copies rows of snapshots to their offsets in the run, counted from its beginning."""
GATHER_IN_ORDER = Form(StepKind.GATHER, Operand.PAGES, Operand.PAGES)
"""Copies rows one after the other behind the placed rows of the run, and from there to pages."""
SCATTER_PLACED = Form(StepKind.SCATTER, Operand.RUN, Operand.PAGES)
"""Copies rows of snapshots from their offsets in the run of their source rank."""
SCATTER_SPANS = Form(StepKind.SCATTER, Operand.SPAN, Operand.PAGES)
"""Copies rows out of spans: `SRC_REGION` is the number of the span, whose pages are as long as the
span reads, and `SRC_OFFSET_BYTES` counts from the beginning of each."""
PROJECT_SPANS = Form(StepKind.PROJECT, Operand.SPAN, Operand.PAGES)
"""Recomputes windows from inputs in spans and weights in constant regions: element ``(channel,
tap)`` is the product of `HIDDEN` weights and as many inputs. Columns are `ProjectColumn`."""
CLEAR_PAGES = Form(StepKind.CLEAR, Operand.NOTHING, Operand.PAGES)
"""Zeroes rows; their source columns are unused."""

FORMS = (
    READ_PAGES,
    READ_SPANS,
    GATHER_PLACED,
    GATHER_IN_ORDER,
    SCATTER_PLACED,
    SCATTER_SPANS,
    PROJECT_SPANS,
    CLEAR_PAGES,
)
"""Every form of a step, in the order of a program."""
GATHERED = (GATHER_PLACED, GATHER_IN_ORDER)
READ_OR_GATHERED = (READ_PAGES, READ_SPANS, *GATHERED)
"""The forms that take bytes from a source's pages."""


def columns_of(form: Form) -> type[IntEnum]:
    """Return the columns of a form's rows."""
    return ProjectColumn if form.kind is StepKind.PROJECT else Column
