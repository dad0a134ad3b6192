"""Programs: what a destination's agent does for a plan, without page ids.

A program is a list of steps, each of which is a table of rows. Most rows copy ``count`` elements
from a page of a source region to a page of a destination region; a per-token row repeats for every
token. Pages and tokens are bound when a handoff is executed (`restow.agents.binding`). A program
does not know heads, groups or Mamba, and an agent needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from restow.broker.errors import TooManyPiecesError
from restow.broker.layout.rows import MAX_ROWS, Bools, Int64s
from restow.broker.layout.token_class import (
    ALL_TOKENS,
    TokenClass,
    count_shared,
    cut_runs,
    shared_runs,
)
from restow.broker.layout.values import ITEM_BYTES, DType, Region
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
    """Pages of a source, or a stretch of each page, read unchanged into staging."""


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
"""Copies rows one after the other behind the placed rows of the run, and from the run to pages."""
SCATTER_PLACED = Form(StepKind.SCATTER, Operand.RUN, Operand.PAGES)
"""Copies rows of snapshots from their offsets in the run of their source rank."""
SCATTER_SPANS = Form(StepKind.SCATTER, Operand.SPAN, Operand.PAGES)
"""Copies rows out of spans: `SRC_REGION` is the number of the span, whose pages are as long as the
span reads, and `SRC_OFFSET_BYTES` counts from the beginning of each page."""
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


@dataclass(frozen=True, slots=True)
class PageForm:
    """How a side's list of block ids addresses tokens; a ``page_tokens`` of 0 means snapshots.

    The pages hold only the tokens of the class ``tokens``. With ``whole_blocks``, a block that is
    written at all is written from its beginning.
    """

    group: str
    page_tokens: int
    pages_per_block: int
    tokens: TokenClass = ALL_TOKENS
    whole_blocks: bool = False

    @classmethod
    def of(cls, region: Region) -> PageForm:
        """Return how the pages of a region are addressed."""
        pages = region.page_tokens or 0, region.pages_per_block
        return cls(region.group, *pages, region.tokens, region.whole_blocks)

    @property
    def block_tokens(self) -> int:
        """Return the tokens that a block spans, with tokens of other ranks; 0 for a snapshot."""
        return self.page_tokens * self.pages_per_block * self.tokens.parts


NO_LIST = ""
"""The group of a missing list: rows that are zeroed need no source."""


@dataclass(frozen=True, slots=True)
class GroupPair:
    """A list of block ids on each side that rows use together.

    The source's list may be missing (`NO_LIST`) if nothing is read. Rows repeat for the tokens that
    both sides hold. With ``window_tokens``, they repeat only for that many tokens before the end; 0
    means all. A destination with ``whole_blocks`` also gets the earlier tokens of the first block.
    """

    src: PageForm
    dst: PageForm
    window_tokens: int = 0

    @property
    def has_source(self) -> bool:
        """Return whether the source has a list."""
        return self.src.group != NO_LIST

    @property
    def per_token(self) -> bool:
        """Return whether rows of this pair repeat for every token."""
        return self.src.page_tokens > 0

    @property
    def alike(self) -> bool:
        """Return whether both sides hold the same tokens, and therefore in the same order."""
        return self.src.tokens == self.dst.tokens

    def first_token(self, start: int, stop: int) -> int:
        """Return the first token of ``[start, stop)`` that moves.

        >>> kv, kept = PageForm("kv", 16, 1), PageForm("kv", 16, 1, whole_blocks=True)
        >>> GroupPair(kv, kv, 31).first_token(0, 57), GroupPair(kv, kept, 31).first_token(0, 57)
        (26, 16)
        """
        if not self.window_tokens:
            return start
        first = stop - self.window_tokens
        if self.dst.whole_blocks:
            first -= first % self.dst.block_tokens
        return max(start, first)

    def src_pages(self, start: int, stop: int) -> range:
        """Return the source's pages, counted from token 0, that hold the moved tokens of a range.

        If D's ranks divide the tokens, some of these pages may hold no token that moves.

        >>> GroupPair(PageForm("kv", 16, 1), PageForm("kv", 8, 1)).src_pages(20, 50)
        range(1, 4)
        """
        if not self.per_token:
            return range(1)
        held, size = self.src.tokens, self.src.page_tokens
        begin = self.first_token(start, stop)
        first, last = held.before(begin), held.before(stop)
        if first >= last or not (self.alike or count_shared(held, self.dst.tokens, begin, stop)):
            return range(0)
        return range(first // size, -(-last // size))


def moved_tokens(pair: GroupPair, start: int, stop: int) -> int:
    """Return how many tokens of ``[start, stop)`` rows of the pair move."""
    return count_shared(pair.src.tokens, pair.dst.tokens, pair.first_token(start, stop), stop)


def cut_shared(
    pair: GroupPair, start: int, stop: int, forms: Sequence[PageForm]
) -> tuple[Int64s, Int64s]:
    """Cut the tokens that move into stretches that are contiguous in a page of each of ``forms``.

    Returns where each stretch begins, and its number of tokens. On a side that is not among the
    forms, other tokens may lie between the tokens of a stretch.
    """
    begins, ends = shared_runs(
        pair.src.tokens, pair.dst.tokens, pair.first_token(start, stop), stop
    )
    for form in forms:
        begins, ends = cut_runs(begins, ends, form.tokens.before(begins), form.page_tokens)
    counts = ends - begins
    goes_on = np.ones(max(len(begins) - 1, 0), np.bool_)
    for form in forms:
        place = form.tokens.before(begins)
        goes_on &= place[1:] == place[:-1] + counts[:-1]
        goes_on &= place[1:] % form.page_tokens != 0
    if not goes_on.any():
        return begins, counts
    first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    return begins[first], np.add.reduceat(counts, first)


def most_tokens(pair: GroupPair, count: int) -> int:
    """Return an upper bound of the tokens that both sides hold of ``count`` consecutive tokens."""
    return min(_most_held(form.tokens, count) for form in (pair.src, pair.dst))


def most_pages(pair: GroupPair, count: int) -> int:
    """Return an upper bound of the source's pages with any of ``count`` consecutive tokens."""
    if not pair.per_token:
        return 1
    return 2 + _most_held(pair.src.tokens, count) // pair.src.page_tokens


def most_stretches(pair: GroupPair, count: int) -> int:
    """Return an upper bound of the stretches into which both sides cut ``count`` tokens."""
    if not pair.per_token:
        return 1
    moved = most_tokens(pair, count)
    stretches = 2 + sum(moved // form.page_tokens for form in (pair.src, pair.dst))
    if pair.alike:
        return stretches
    rarer, denser = sorted((pair.src.tokens, pair.dst.tokens), key=lambda tokens: -tokens.parts)
    per_period = rarer.interleave_tokens // denser.period_tokens + 2 if denser.parts > 1 else 1
    return min(moved, stretches + (count // rarer.period_tokens + 2) * per_period)


def _most_held(tokens: TokenClass, count: int) -> int:
    return min(count, (count // tokens.period_tokens + 2) * tokens.interleave_tokens)


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
        """Return the rows of a form, of all source ranks or of a single rank; there may be none."""
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
