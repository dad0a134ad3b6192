"""Where the ends of rows may lie, and what each tells the law of addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from restow.agents.binding.addresses import Lines
from restow.agents.binding.pages import Blocks, PageList, RegionTable, Tokens
from restow.agents.binding.staging import row_begins, wire_dtypes
from restow.broker.layout.dtype import ITEM_BYTES
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.program import Column, GroupPair, PageForm

_ZERO: Int64s = np.zeros((1, 1), np.int64)


@dataclass(frozen=True, slots=True)
class SideColumns:
    """The columns of one side."""

    name: str
    region: Column
    offset: Column
    step: Column
    token_stride: Column
    dtype: Column

    def form(self, pair: GroupPair) -> PageForm:
        """This side's page list of a pair."""
        return pair.src if self is SRC else pair.dst

    def joined(self, rows: Int64s) -> Bools:
        """Rows whose next token follows at their own step: no loop over tokens is needed."""
        mask: Bools = rows[:, self.token_stride] == rows[:, Column.COUNT] * rows[:, self.step]
        return mask


SRC = SideColumns(
    "source",
    Column.SRC_REGION,
    Column.SRC_OFFSET_BYTES,
    Column.SRC_STEP_BYTES,
    Column.SRC_TOKEN_STRIDE_BYTES,
    Column.SRC_DTYPE,
)
DST = SideColumns(
    "destination",
    Column.DST_REGION,
    Column.DST_OFFSET_BYTES,
    Column.DST_STEP_BYTES,
    Column.DST_TOKEN_STRIDE_BYTES,
    Column.DST_DTYPE,
)


class End(NamedTuple):
    """One end of rows: where they lie, and the step and type of their elements."""

    lines: Lines
    step_bytes: Int64s
    dtype: Int64s


@dataclass(frozen=True, slots=True)
class BoundOperand:
    """Where one end of a table's rows lies in one handoff.

    - ``side``: whose pages it lies in, which cut the tokens; None: in no pages.
    - ``end`` of some rows, ``[..., len(Column)]``, from them and their index in the table.
    - ``pages`` that hold the tokens of a pair's rows. Raises `PageCountError`.
    """

    side: SideColumns | None
    end: Callable[[Int64s, Int64s], End]
    pages: Callable[[GroupPair, Tokens], PageList]


def paged(memory: RegionTable, side: SideColumns, blocks: Blocks) -> BoundOperand:
    """PAGES: those that one side lists, in its regions."""
    return BoundOperand(
        side,
        lambda rows, _: side_end(rows, memory, side, side),
        lambda pair, tokens: blocks.listed(side.form(pair), tokens),
    )


def in_spans(staged: RegionTable) -> BoundOperand:
    """SPAN: pages of the source as they were read; span ``i`` is region ``i`` of ``staged``."""
    return BoundOperand(SRC, lambda rows, _: side_end(rows, staged, SRC, None), staged_pages)


def by_place(address: int, columns: SideColumns) -> BoundOperand:
    """RUN by place: a chunk at ``address``, of snapshots; ``columns`` say where in it they lie."""

    def end(rows: Int64s, _: Int64s) -> End:
        lines = Lines(address + rows[..., columns.offset], _ZERO, _ZERO)
        return End(lines, rows[..., columns.step], rows[..., columns.dtype])

    return BoundOperand(None, end, lambda pair, tokens: PageList(None))


def in_order(
    rows: Int64s, pairs: Sequence[GroupPair], tokens: Tokens, address: int
) -> BoundOperand:
    """RUN in order: rows of a table one behind the other, and in each all tokens that move.

    They travel in the narrower type.
    """
    begins, _ = row_begins(rows, pairs, tokens)
    begins += address

    def end(some: Int64s, index: Int64s) -> End:
        dtype = wire_dtypes(some)
        item = ITEM_BYTES[dtype]
        return End(Lines(begins[index], _ZERO, some[..., Column.COUNT] * item), item, dtype)

    return BoundOperand(None, end, lambda pair, tokens: PageList(None))


def in_regions(
    memory: RegionTable,
    region: Int64s,
    offset_bytes: Int64s | int = 0,
    token_stride_bytes: Int64s = _ZERO,
    side: SideColumns | None = None,
) -> Lines:
    """Lines at an offset in every page of a region; a ``side`` lists their pages, or none does."""
    first_address = memory.base_address[region] + offset_bytes
    strides = memory.page_stride_bytes[region], token_stride_bytes
    if side is None:
        return Lines(first_address, *strides)
    return Lines(first_address, *strides, int(memory.page_count[region].min()), side.name)


def side_end(
    rows: Int64s, memory: RegionTable, side: SideColumns, lister: SideColumns | None
) -> End:
    """What the columns of one side say of rows, of which there is at least one, in ``memory``.

    Its pages are listed by a side, or known to be there.
    """
    region, offset = rows[..., side.region], rows[..., side.offset]
    lines = in_regions(memory, region, offset, rows[..., side.token_stride], lister)
    return End(lines, rows[..., side.step], rows[..., side.dtype])


def staged_pages(pair: GroupPair, tokens: Tokens) -> PageList:
    """The pages of a pair's spans in staging: page 0 is the first one that was read."""
    if not pair.per_token:
        return PageList(None)
    held = pair.src_pages(tokens.start, tokens.stop)
    size = pair.src.page_tokens
    return PageList(np.arange(len(held)), size, held.start * size, pair.src.tokens)


def span_lines(spans: Int64s, memory: RegionTable) -> Lines:
    """Lines of ``spans`` ``[..., len(Column)]`` in the source's pages that hold them."""
    region, offset = spans[..., Column.SRC_REGION], spans[..., Column.SRC_OFFSET_BYTES]
    return in_regions(memory, region, offset, side=SRC)


def held_pages(pair: GroupPair, blocks: Blocks, tokens: Tokens) -> PageList:
    """The source's pages that are read whole, as spans. Raises `PageCountError`."""
    held = pair.src_pages(tokens.start, tokens.stop)
    return PageList(blocks.pages(pair.src, tokens)[held.start : held.stop])
