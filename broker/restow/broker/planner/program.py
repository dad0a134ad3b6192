"""Programs: what one destination agent does for a plan, with the page ids left open.

A program is a list of steps, each a table of rows. A row copies ``count`` elements from a page of a
source region to a page of a destination region, for the most part; a per-token row repeats for
every token. Which pages, and which tokens, is bound when a handoff is executed
(`restow.agents.binding`). Nothing here knows heads, groups or Mamba any more, and an agent needs
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from restow.broker.layout.rows import Int64s
from restow.broker.strategy import Strategy


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


@dataclass(frozen=True, slots=True)
class PageForm:
    """How a side's list of block ids addresses tokens; ``page_tokens`` 0 means snapshots."""

    group: str
    page_tokens: int
    pages_per_block: int


@dataclass(frozen=True, slots=True)
class GroupPair:
    """A list of page ids on each side that rows use together.

    With ``window_tokens`` rows repeat for so many tokens before the last one; 0: for all.
    """

    src: PageForm
    dst: PageForm
    window_tokens: int = 0

    @property
    def per_token(self) -> bool:
        """Whether rows of this pair repeat for every token."""
        return self.src.page_tokens > 0

    def first_token(self, start: int, stop: int) -> int:
        """Where the tokens that move begin, of ``[start, stop)``."""
        return max(start, stop - self.window_tokens) if self.window_tokens else start

    def src_pages(self, start: int, stop: int) -> range:
        """Which of the source's pages, counted from token 0, hold what moves of ``[start, stop)``.

        >>> GroupPair(PageForm("kv", 16, 1), PageForm("kv", 8, 1)).src_pages(20, 50)
        range(1, 4)
        """
        if not self.per_token:
            return range(1)
        if start >= stop:
            return range(0)
        size = self.src.page_tokens
        return range(self.first_token(start, stop) // size, -(-stop // size))


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


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of one form: int64 ``[rows, len(columns_of(form))]``.

    Regions are indices into the regions of the rank's layout.
    """

    form: Form
    rows: Int64s

    def of_source(self, src_rank: int) -> Step:
        """The rows of one source rank."""
        return Step(self.form, self.rows[self.rows[:, Column.SRC_RANK] == src_rank])


@dataclass(frozen=True, slots=True)
class Program:
    """What the agent of ``dst_rank`` does: steps, one of each form at most.

    ``strategies`` are the words for it, for people: an agent hears none.
    """

    program_id: str
    dst_rank: int
    group_pairs: tuple[GroupPair, ...]
    steps: tuple[Step, ...]
    strategies: tuple[Strategy, ...] = ()

    def rows(self, form: Form, src_rank: int | None = None) -> Int64s:
        """The rows of a form, or those of one source rank; maybe none."""
        for step in self.steps:
            if step.form == form:
                return step.rows if src_rank is None else step.of_source(src_rank).rows
        return np.zeros((0, len(columns_of(form))), np.int64)

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(step.rows.nbytes for step in self.steps)

    @property
    def src_ranks(self) -> tuple[int, ...]:
        """All ranks that are read from."""
        return self._ranks((*READ_OR_GATHERED, SCATTER_PLACED))

    @property
    def staging_ranks(self) -> tuple[int, ...]:
        """The ranks that gather for this destination."""
        return self._ranks((*GATHERED, SCATTER_PLACED))

    @property
    def interleaving_ranks(self) -> tuple[int, ...]:
        """Those of them that gather for all their readers in one launch."""
        return self._ranks((GATHER_PLACED, SCATTER_PLACED))

    def _ranks(self, forms: Sequence[Form]) -> tuple[int, ...]:
        # A destination's agent is not told what sources do to fill its run.
        ranks = np.concatenate([self.rows(form)[:, Column.SRC_RANK] for form in forms])
        return tuple(int(rank) for rank in np.unique(ranks))

    def gather_id(self, src_rank: int) -> str:
        """Name of the part of the program that ``src_rank`` gathers."""
        return f"{self.program_id}/{src_rank}"

    def hashed_id(self, src_rank: int) -> str:
        """Name of the part of the program that ``src_rank`` gathers and hashes."""
        return f"{self.program_id}/{src_rank}/hashed"


def no_rows() -> Int64s:
    """A table without rows."""
    return np.zeros((0, len(Column)), np.int64)


def no_projections() -> Int64s:
    """A table without projected rows."""
    return np.zeros((0, len(ProjectColumn)), np.int64)


def joined_steps(steps: Iterable[Step]) -> tuple[Step, ...]:
    """All rows of each form in one step, in the order of `FORMS`; none without rows."""
    rows: dict[Form, list[Int64s]] = {}
    for step in steps:
        if len(step.rows):
            rows.setdefault(step.form, []).append(step.rows)
    return tuple(Step(form, np.concatenate(rows[form])) for form in FORMS if form in rows)
