"""The two sides of a program's rows: which columns speak of each, and where its elements lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from restow.agents.binding.pages import (
    SNAPSHOT,
    Blocks,
    RegionTable,
    Stretches,
    Tokens,
    check_pages,
    cut_tokens,
)
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.program import Column, GroupPair, PageForm


@dataclass(frozen=True, slots=True)
class Side:
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


SRC = Side(
    "source",
    Column.SRC_REGION,
    Column.SRC_OFFSET_BYTES,
    Column.SRC_STEP_BYTES,
    Column.SRC_TOKEN_STRIDE_BYTES,
    Column.SRC_DTYPE,
)
DST = Side(
    "destination",
    Column.DST_REGION,
    Column.DST_OFFSET_BYTES,
    Column.DST_STEP_BYTES,
    Column.DST_TOKEN_STRIDE_BYTES,
    Column.DST_DTYPE,
)


@dataclass(frozen=True, slots=True)
class Lines:
    """Where rows lie in one side's memory, pages and tokens left open: arrays ``[..., 1, rows]``.

    ``page_count`` is that of the smallest region among them.
    """

    first_address: Int64s
    page_stride_bytes: Int64s
    token_stride_bytes: Int64s
    page_count: int
    side: Side

    @classmethod
    def of(cls, rows: Int64s, memory: RegionTable, side: Side) -> Lines:
        """The lines of ``rows`` ``[..., rows, len(Column)]``, of which there is at least one."""
        region = rows[..., None, :, side.region]
        return cls(
            memory.base_address[region] + rows[..., None, :, side.offset],
            memory.page_stride_bytes[region],
            rows[..., None, :, side.token_stride],
            int(memory.page_count[region].min()),
            side,
        )

    def some(self, mask: Bools) -> Lines:
        """Those of a flat mask, as ``[rows]``."""
        first, page, token = (
            values.ravel()[mask]
            for values in (self.first_address, self.page_stride_bytes, self.token_stride_bytes)
        )
        return Lines(first, page, token, self.page_count, self.side)

    def addresses(self, pages: Int64s, form: PageForm, stretches: Stretches) -> Int64s:
        """Address of every row at every stretch, ``[..., stretches, rows]``.

        ``pages`` begin at token 0. Raises `PageRangeError`.
        """
        check_pages(pages, self.page_count, self.side.name)
        page, token = stretches.within(pages, form.page_tokens)
        table: Int64s = self.page_stride_bytes * page[:, None]
        table += self.first_address
        if token is not None:
            table += self.token_stride_bytes * token[:, None]
        return table

    def by_row(self, pages: Int64s, form: PageForm, stretches: Stretches) -> Int64s:
        """What `addresses` gives for lines of one axis, as ``[rows, stretches]``, row by row.

        Raises `PageRangeError`.
        """
        check_pages(pages, self.page_count, self.side.name)
        page, token = stretches.within(pages, form.page_tokens)
        table: Int64s = self.first_address.reshape(-1, 1)
        table = table + one_if_alike(self.page_stride_bytes.reshape(-1, 1)) * page
        if token is not None:
            table += one_if_alike(self.token_stride_bytes.reshape(-1, 1)) * token
        return table


def one_if_alike(values: Int64s) -> Int64s:
    """The first of equal values along the first axis, or all: what is made of one is made once."""
    return values[:1] if len(values) and (values == values[0]).all() else values


def by_pair(rows: Int64s, pairs: Sequence[GroupPair]) -> Iterator[tuple[GroupPair, Int64s]]:
    """The rows of each pair of page lists that has any."""
    for number, pair in enumerate(pairs):
        table = rows[rows[:, Column.GROUP_PAIR] == number]
        if len(table):
            yield pair, table


def cut(pair: GroupPair, sides: Sequence[Side], tokens: Tokens, whole: bool) -> Stretches:
    """Stretches inside pages of the given sides, or single tokens; one for a snapshot."""
    if not pair.per_token:
        return SNAPSHOT
    tokens = Tokens(pair.first_token(tokens.start, tokens.stop), tokens.stop)
    if not whole:
        return cut_tokens(tokens, (1,))
    return cut_tokens(tokens, [side.form(pair).page_tokens for side in sides])


def pages_of(pair: GroupPair, side: Side, blocks: Blocks, tokens: Tokens) -> Int64s:
    """The pages of one side, from token 0 on. Raises `PageCountError`."""
    return blocks.pages(side.form(pair), tokens)
