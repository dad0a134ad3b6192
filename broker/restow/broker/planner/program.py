"""Programs: what one destination agent does for a plan, with the page ids left open.

A program is a table of rows. A row copies ``count`` elements from a page of a source region to a
page of a destination region; a per-token row repeats for every token. Which pages, and which
tokens, is bound when a handoff is executed (`restow.agents.binding`). Nothing here knows heads,
groups or Mamba any more, and an agent needs nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np

from restow.broker.layout.rows import Int64s
from restow.broker.planner.strategy import Strategy


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


class SpanColumn(IntEnum):
    """Columns of a program's spans (int64)."""

    SRC_RANK = 0
    GROUP_PAIR = 1
    SRC_REGION = 2
    OFFSET_BYTES = 3
    LENGTH_BYTES = 4


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


@dataclass(frozen=True, slots=True)
class Program:
    """What the agent of ``dst_rank`` does: rows that travel in four ways, and windows rebuilt.

    - ``direct`` rows are read into place.
    - ``packed`` rows are gathered by the agents of their source ranks, read as one run, scattered.
    - ``interleaved`` rows are copied by those agents to the beginning of that run, its *chunk*, and
      ``restored`` rows from there to pages; offsets and steps of the chunk's side are its own.
    - ``spans`` of source pages are read into staging as they are, and ``extracted`` rows are copied
      out of them: these take their ``SRC_REGION`` from the index of a span, a page of which is
      its length, and their ``SRC_OFFSET_BYTES`` from its beginning.

    ``cleared`` rows are zeroed; what they say of a source means nothing. ``projected`` rows are
    conv windows that are rebuilt from inputs in spans and from weights in regions of their own:
    element ``(channel, tap)`` is the product of ``HIDDEN`` weights and as many inputs.

    Rows are int64 ``[rows, len(Column)]``, projected ones ``[rows, len(ProjectColumn)]``, spans
    ``[spans, len(SpanColumn)]``; other regions are indices into the regions of the rank's layout.
    """

    program_id: str
    dst_rank: int
    group_pairs: tuple[GroupPair, ...]
    direct: Int64s
    packed: Int64s
    spans: Int64s
    extracted: Int64s
    cleared: Int64s
    interleaved: Int64s
    restored: Int64s
    projected: Int64s

    @property
    def size_bytes(self) -> int:
        """Bytes of all tables."""
        values = (getattr(self, one.name) for one in fields(self))
        return sum(value.nbytes for value in values if isinstance(value, np.ndarray))

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """In which ways its rows travel; empty: nothing is read."""
        tables = (
            (Strategy.SLICES, self.direct),
            (Strategy.WHOLE, self.extracted),
            (Strategy.PACK, self.packed),
            (Strategy.INTERLEAVE, self.restored),
            (Strategy.RECOMPUTE, self.projected),
        )
        return tuple(way for way, table in tables if len(table))

    @property
    def src_ranks(self) -> tuple[int, ...]:
        """All ranks that are read from."""
        ranks = np.concatenate(
            [
                self.direct[:, Column.SRC_RANK],
                self.packed[:, Column.SRC_RANK],
                self.restored[:, Column.SRC_RANK],
                self.spans[:, SpanColumn.SRC_RANK],
            ]
        )
        return tuple(int(rank) for rank in np.unique(ranks))

    def gather_id(self, src_rank: int) -> str:
        """Name of the part of the program that ``src_rank`` gathers."""
        return f"{self.program_id}/{src_rank}"

    def hashed_id(self, src_rank: int) -> str:
        """Name of the part of the program that ``src_rank`` gathers and hashes."""
        return f"{self.program_id}/{src_rank}/hashed"

    @property
    def staging_ranks(self) -> tuple[int, ...]:
        """The ranks that gather for this destination."""
        tables = [self.packed[:, Column.SRC_RANK], self.restored[:, Column.SRC_RANK]]
        return tuple(int(rank) for rank in np.unique(np.concatenate(tables)))

    @property
    def interleaving_ranks(self) -> tuple[int, ...]:
        """Those of them that gather for all their readers in one launch."""
        return tuple(int(rank) for rank in np.unique(self.restored[:, Column.SRC_RANK]))


def no_rows() -> Int64s:
    """A table without rows."""
    return np.zeros((0, len(Column)), np.int64)


def no_projections() -> Int64s:
    """A table without projected rows."""
    return np.zeros((0, len(ProjectColumn)), np.int64)


def no_spans() -> Int64s:
    """A table without spans."""
    return np.zeros((0, len(SpanColumn)), np.int64)
