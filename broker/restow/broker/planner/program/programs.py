"""Programs and steps, and operations on tables of rows: joining and splitting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from restow.broker.errors import TooManyPiecesError
from restow.broker.layout.rows import MAX_ROWS, Bools, Int64s
from restow.broker.layout.values import ITEM_BYTES, DType
from restow.broker.planner.program.forms import (
    FORMS,
    GATHER_PLACED,
    GATHERED,
    READ_OR_GATHERED,
    SCATTER_PLACED,
    Column,
    Form,
    columns_of,
)
from restow.broker.planner.program.pairs import GroupPair
from restow.broker.strategy import Strategy


def no_rows(columns: type[IntEnum] = Column) -> Int64s:
    """Return a table without rows."""
    return np.zeros((0, len(columns)), np.int64)


def joined(
    rows: Int64s,
    same: Sequence[IntEnum],
    offsets: Sequence[IntEnum],
    count: IntEnum,
    steps: Sequence[IntEnum],
    apart: Bools | None = None,
) -> tuple[Int64s, Int64s]:
    """Join rows with equal ``same`` columns if each begins where its predecessor ends.

    A row ends ``count`` steps after its beginning. Rows marked in ``apart`` stay separate. Returns
    the joined rows, ordered by ``same`` and the first offset, and for each given row the number of
    the joined row.
    """
    if len(rows) < 2:
        return rows, np.zeros(len(rows), np.int64)
    order = np.lexsort((rows[:, offsets[0]], *rows[:, same].T[::-1]))
    rows = rows[order]
    ends = rows[:, offsets] + rows[:, [count]] * rows[:, steps]
    continues = (rows[1:, same] == rows[:-1, same]).all(axis=1)
    continues &= (rows[1:, offsets] == ends[:-1]).all(axis=1)
    if apart is not None:
        continues &= ~apart[order][1:]
    begins = np.concatenate([[True], ~continues])
    first = np.flatnonzero(begins)
    made = rows[first]
    made[:, count] = np.add.reduceat(rows[:, count], first)
    row_of = np.empty(len(rows), np.int64)
    row_of[order] = np.cumsum(begins) - 1
    return made, row_of


def join_rows(rows: Int64s) -> tuple[Int64s, Int64s]:
    """Join rows of bytes that are contiguous on both sides, across fields too.

    Returns the joined rows, sorted by region, and for each given row the number of the joined row.
    """
    return joined(rows, _SAME, _OFFSETS, Column.COUNT, _STEPS, apart=strided(rows))


def strided(rows: Int64s) -> Bools:
    """Return a mask of the rows that are not runs of bytes."""
    steps = rows[:, [Column.SRC_STEP_BYTES, Column.DST_STEP_BYTES]]
    dtypes = rows[:, [Column.SRC_DTYPE, Column.DST_DTYPE]]
    mask: Bools = (steps != 1).any(axis=1) | (dtypes != DType.UINT8).any(axis=1)
    return mask


def split_rows(rows: Int64s) -> Int64s:
    """Split strided rows into a row per element, because a READ moves contiguous bytes.

    Raises `TooManyPiecesError`.
    """
    wide = strided(rows)
    if not wide.any():
        return rows
    table = rows[wide]
    counts = table[:, Column.COUNT]
    if int(counts.sum()) > MAX_ROWS:
        raise TooManyPiecesError(
            f"a rank would read more than {MAX_ROWS} single elements: use pack or auto"
        )
    single = np.repeat(table, counts, axis=0)
    index = np.arange(len(single)) - np.repeat(np.cumsum(counts) - counts, counts)
    single[:, Column.SRC_OFFSET_BYTES] += index * single[:, Column.SRC_STEP_BYTES]
    single[:, Column.DST_OFFSET_BYTES] += index * single[:, Column.DST_STEP_BYTES]
    single[:, Column.COUNT] = ITEM_BYTES[single[:, Column.SRC_DTYPE]]
    single[:, [Column.SRC_STEP_BYTES, Column.DST_STEP_BYTES]] = 1
    single[:, [Column.SRC_DTYPE, Column.DST_DTYPE]] = DType.UINT8
    return join_rows(np.concatenate([rows[~wide], single]))[0]


_SAME = (
    Column.SRC_RANK,
    Column.GROUP_PAIR,
    Column.SRC_REGION,
    Column.DST_REGION,
    Column.SRC_TOKEN_STRIDE_BYTES,
    Column.DST_TOKEN_STRIDE_BYTES,
    Column.SRC_STEP_BYTES,
    Column.DST_STEP_BYTES,
    Column.SRC_DTYPE,
    Column.DST_DTYPE,
)
_OFFSETS = (Column.DST_OFFSET_BYTES, Column.SRC_OFFSET_BYTES)
_STEPS = (Column.DST_STEP_BYTES, Column.SRC_STEP_BYTES)


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of the same form: int64 ``[rows, len(columns_of(form))]``.

    Regions are indices into the regions of the rank's layout.
    """

    form: Form
    rows: Int64s

    def of_source(self, src_rank: int) -> Step:
        """Return the step with only the rows of a source rank."""
        return Step(self.form, self.rows[self.rows[:, Column.SRC_RANK] == src_rank])


@dataclass(frozen=True, slots=True)
class Program:
    """What the agent of ``dst_rank`` does: steps, at most one of each form.

    ``strategies`` describe the program to people; agents do not receive them.
    """

    program_id: str
    dst_rank: int
    group_pairs: tuple[GroupPair, ...]
    steps: tuple[Step, ...]
    strategies: tuple[Strategy, ...] = ()

    def rows(self, form: Form, src_rank: int | None = None) -> Int64s:
        """Return the rows of a form, of all source ranks or of a single one; possibly none."""
        for step in self.steps:
            if step.form == form:
                return step.rows if src_rank is None else step.of_source(src_rank).rows
        return no_rows(columns_of(form))

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all rows."""
        return sum(step.rows.nbytes for step in self.steps)

    @property
    def src_ranks(self) -> tuple[int, ...]:
        """Return all ranks that are read from."""
        return self._ranks((*READ_OR_GATHERED, SCATTER_PLACED))

    @property
    def staging_ranks(self) -> tuple[int, ...]:
        """Return the ranks that gather for this destination."""
        return self._ranks((*GATHERED, SCATTER_PLACED))

    @property
    def interleaving_ranks(self) -> tuple[int, ...]:
        """Return the ranks that gather for all their readers in a single launch."""
        return self._ranks((GATHER_PLACED, SCATTER_PLACED))

    def _ranks(self, forms: Sequence[Form]) -> tuple[int, ...]:
        # A destination's agent gets no GATHER steps, so SCATTER tells it who gathers.
        ranks = np.concatenate([self.rows(form)[:, Column.SRC_RANK] for form in forms])
        return tuple(int(rank) for rank in np.unique(ranks))

    def gather_id(self, src_rank: int) -> str:
        """Return the name of the part of the program that ``src_rank`` gathers."""
        return f"{self.program_id}/{src_rank}"

    def hashed_id(self, src_rank: int) -> str:
        """Return the name of the part of the program that ``src_rank`` gathers and hashes."""
        return f"{self.program_id}/{src_rank}/hashed"


def joined_steps(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Return a step per form with all its rows, in the order of `FORMS`, without empty steps."""
    rows: dict[Form, list[Int64s]] = {}
    for step in steps:
        if len(step.rows):
            rows.setdefault(step.form, []).append(step.rows)
    return tuple(Step(form, np.concatenate(rows[form])) for form in FORMS if form in rows)
