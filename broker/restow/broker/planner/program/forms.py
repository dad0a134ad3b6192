"""Columns of rows: what each number of a row says."""

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


class StepKind(IntEnum):
    """What a step does. Sources GATHER; the destination does everything else."""

    READ = 1
    GATHER = 2
    SCATTER = 3
    PROJECT = 4
    CLEAR = 5


class Operand(IntEnum):
    """Where the one or the other end of a step's rows lies."""

    NOTHING = 0
    PAGES = 1
    """Pages of a rank's regions."""
    RUN = 2
    """What one source gathers for one destination rank; it is read as one piece."""
    SPAN = 3
    """Pages of a source, or a stretch of each, read as they are into staging."""


class Form(NamedTuple):
    """What a step does, from where to where."""

    kind: StepKind
    src: Operand
    dst: Operand


READ_PAGES = Form(StepKind.READ, Operand.PAGES, Operand.PAGES)
"""Runs of bytes are read straight into place."""
READ_SPANS = Form(StepKind.READ, Operand.PAGES, Operand.SPAN)
"""Row ``i`` reads `COUNT` bytes of every page into span ``i``, which is its `DST_REGION`."""
GATHER_PLACED = Form(StepKind.GATHER, Operand.PAGES, Operand.RUN)
"""Rows of snapshots are copied to where they say in the run, counted from its beginning."""
GATHER_IN_ORDER = Form(StepKind.GATHER, Operand.PAGES, Operand.PAGES)
"""Rows are copied one after the other behind what is placed, and from there to pages."""
SCATTER_PLACED = Form(StepKind.SCATTER, Operand.RUN, Operand.PAGES)
"""Rows of snapshots are copied from where they say in the run of their source rank."""
SCATTER_SPANS = Form(StepKind.SCATTER, Operand.SPAN, Operand.PAGES)
"""Rows are copied out of spans: `SRC_REGION` is the number of one, a page of which is as long as
it reads, and `SRC_OFFSET_BYTES` counts from its beginning."""
PROJECT_SPANS = Form(StepKind.PROJECT, Operand.SPAN, Operand.PAGES)
"""Windows are rebuilt from inputs in spans and weights in regions of their own: element ``(channel,
tap)`` is the product of `HIDDEN` weights and as many inputs. Columns are `ProjectColumn`."""
CLEAR_PAGES = Form(StepKind.CLEAR, Operand.NOTHING, Operand.PAGES)
"""Rows are zeroed; what they say of a source means nothing."""

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
"""Every form that a step may have, in the order in which a program has them."""
GATHERED = (GATHER_PLACED, GATHER_IN_ORDER)
READ_OR_GATHERED = (READ_PAGES, READ_SPANS, *GATHERED)
"""The forms that take bytes out of a source's pages."""


def columns_of(form: Form) -> type[IntEnum]:
    """The columns of a form's rows."""
    return ProjectColumn if form.kind is StepKind.PROJECT else Column
