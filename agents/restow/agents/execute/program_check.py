"""What a program must be before an agent trusts its addresses. Checked once, then remembered.

Law: with page ids that binding accepts, every byte that the rows of a checked program touch lies
inside a page of a region that is registered for it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from restow.agents.binding.pages import Tokens
from restow.agents.copying.prepared_copies import cast_known
from restow.agents.errors import OrderTooLargeError, ProgramInvalidError
from restow.agents.execute.projected_check import check_projected, check_projected_memory
from restow.broker.layout import DType
from restow.broker.layout.check_pages import MAX_PAGE_BYTES, MAX_PAGES_PER_BLOCK
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import (
    Column,
    GroupPair,
    PageForm,
    Program,
    ProjectColumn,
    SpanColumn,
)
from restow.broker.planner.table import ITEM_BYTES

Floats: TypeAlias = npt.NDArray[np.float64]

MAX_DESCRIPTORS = 4_000_000
_KINDS: dict[int, tuple[str, type[IntEnum]]] = {
    len(Column): ("row", Column),
    len(SpanColumn): ("span", SpanColumn),
    len(ProjectColumn): ("projected row", ProjectColumn),
}
_SOURCE = (
    Column.SRC_REGION,
    Column.SRC_OFFSET_BYTES,
    Column.SRC_STEP_BYTES,
    Column.SRC_TOKEN_STRIDE_BYTES,
    Column.SRC_DTYPE,
)
_DESTINATION = (
    Column.DST_REGION,
    Column.DST_OFFSET_BYTES,
    Column.DST_STEP_BYTES,
    Column.DST_TOKEN_STRIDE_BYTES,
    Column.DST_DTYPE,
)
_NOT_NEGATIVE = (
    Column.GROUP_PAIR,
    Column.SRC_REGION,
    Column.DST_REGION,
    Column.SRC_OFFSET_BYTES,
    Column.DST_OFFSET_BYTES,
    Column.SRC_TOKEN_STRIDE_BYTES,
    Column.DST_TOKEN_STRIDE_BYTES,
)
_POSITIVE = (Column.COUNT, Column.SRC_STEP_BYTES, Column.DST_STEP_BYTES)


class CheckedProgram:
    """A program whose rows say something sensible, and the checks of its sides that were passed."""

    def __init__(self, program: Program) -> None:
        """Check what needs no memory. Raises `ProgramInvalidError`."""
        self.program = program
        self.src_ranks = frozenset(program.src_ranks)
        staged = np.concatenate([program.packed, program.extracted, program.restored])
        touched = program.projected[:, [ProjectColumn.DST_REGION, ProjectColumn.WEIGHT_REGION]]
        regions = np.concatenate([staged[:, Column.DST_REGION], touched.ravel()])
        self.staged_regions = tuple(np.unique(regions).tolist())
        """Regions of the destination that are filled from staging, and those of weights."""
        self._small: dict[int | None, int] = {}
        """How many tokens each source's rows, or all rows, were found to be few enough for."""
        self._passed: set[tuple[int | None, tuple[int, ...], tuple[bool, ...]]] = set()
        _check_forms(program)
        for rows in _tables(program):
            self._check_rows(rows)
        self._check_spans()
        check_projected(program, self._refuse)
        per_token = np.array([pair.per_token for pair in program.group_pairs], bool)
        for rows, why in (
            (program.cleared, "clears pages of tokens"),
            (program.interleaved, "interleaves tokens"),
            (program.restored, "restores tokens"),
        ):
            self._refuse(rows, per_token[rows[:, Column.GROUP_PAIR]], why)
        self._check_chunks()
        direct = program.direct
        raw = (direct[:, [Column.SRC_DTYPE, Column.DST_DTYPE]] == DType.UINT8).all(axis=1)
        raw &= (direct[:, [Column.SRC_STEP_BYTES, Column.DST_STEP_BYTES]] == 1).all(axis=1)
        self._refuse(direct, ~raw, "is read into place, but is no run of bytes")

    def check_destination(
        self, page_strides_bytes: tuple[int, ...], constant: tuple[bool, ...] = ()
    ) -> None:
        """Check that rows stay inside the destination's pages, and out of ``constant`` regions.

        Raises `ProgramInvalidError`.
        """
        self._check_side(None, page_strides_bytes, constant)

    def check_source(
        self,
        src_rank: int,
        page_strides_bytes: tuple[int, ...],
        constant: tuple[bool, ...] = (),
    ) -> None:
        """Check that a source rank's rows stay inside its pages, and out of ``constant`` regions.

        Those of a peer are not known, nor can they be read. Raises `ProgramInvalidError`.
        """
        self._check_side(src_rank, page_strides_bytes, constant)

    def _check_side(
        self,
        src_rank: int | None,
        page_strides_bytes: tuple[int, ...],
        constant: tuple[bool, ...] = (),
    ) -> None:
        key = (src_rank, page_strides_bytes, constant)
        if key in self._passed:
            return
        source = src_rank is not None
        forms = [pair.src if source else pair.dst for pair in self.program.group_pairs]
        columns = _SOURCE if source else _DESTINATION
        page_tokens = np.array([max(form.page_tokens, 1) for form in forms], np.int64)
        strides = np.array(page_strides_bytes, np.int64)
        if src_rank is not None:
            self._check_span_ends(src_rank, strides, constant)
        tables = [self.program.direct, self.program.packed]
        # In its source's pages an extracted row can't leave its span, which was checked.
        if source:
            tables += [self.program.interleaved]
        else:
            tables += [self.program.extracted, self.program.restored, self.program.cleared]
            check_projected_memory(self.program, strides, constant, self._refuse)
        fixed = np.flatnonzero(constant)
        touches = "reads" if source else "writes"
        for table in tables:
            rows = table[table[:, Column.SRC_RANK] == src_rank] if source else table
            region = rows[:, columns[0]]
            self._refuse(rows, region >= len(strides), "names a region that is not there")
            self._refuse(rows, np.isin(region, fixed), f"{touches} a constant region")
            side = "source" if source else "destination"
            outside = self._ends(rows, columns, page_tokens) > strides[region]
            self._refuse(rows, outside, f"leaves its {side} page")
        self._passed.add(key)

    @staticmethod
    def _ends(rows: Int64s, columns: tuple[Column, ...], page_tokens: Int64s) -> Floats:
        """One past the last byte that each row touches in a page.

        Floats can't wrap around, and every sum below a page's length is exact in them.
        """
        _, offset, step, token_stride, dtype = (rows[:, column] for column in columns)
        tokens = page_tokens[rows[:, Column.GROUP_PAIR]].astype(float)
        ends: Floats = offset.astype(float) + (tokens - 1) * token_stride
        ends += (rows[:, Column.COUNT].astype(float) - 1) * step + ITEM_BYTES[dtype]
        return ends

    def _check_chunks(self) -> None:
        """Check that no chunk is longer than a page may be."""
        one = np.ones(len(self.program.group_pairs), np.int64)
        for rows, columns in (
            (self.program.interleaved, _DESTINATION),
            (self.program.restored, _SOURCE),
        ):
            ends = self._ends(rows, columns, one)
            self._refuse(rows, ends > MAX_PAGE_BYTES, "leaves any chunk that there may be")

    def _check_spans(self) -> None:
        """Check that spans are runs of bytes, and that extracted rows stay inside of theirs."""
        program, spans, rows = self.program, self.program.spans, self.program.extracted
        pairs = len(program.group_pairs)
        bad = (spans < 0).any(axis=1) | (spans[:, SpanColumn.GROUP_PAIR] >= pairs)
        self._refuse(spans, bad | (spans[:, SpanColumn.LENGTH_BYTES] < 1), "is no run of bytes")
        index = rows[:, Column.SRC_REGION]
        self._refuse(rows, index >= len(spans), "names a span that is not there")
        mine = spans[index]
        same = mine[:, SpanColumn.SRC_RANK] == rows[:, Column.SRC_RANK]
        same &= mine[:, SpanColumn.GROUP_PAIR] == rows[:, Column.GROUP_PAIR]
        self._refuse(rows, ~same, "has a span of another rank or pair of lists")
        page_tokens = [max(pair.src.page_tokens, 1) for pair in program.group_pairs]
        ends = self._ends(rows, _SOURCE, np.array(page_tokens, np.int64))
        self._refuse(rows, ends > mine[:, SpanColumn.LENGTH_BYTES], "leaves its span")

    def _check_span_ends(self, src_rank: int, strides: Int64s, constant: tuple[bool, ...]) -> None:
        spans = self.program.spans[self.program.spans[:, SpanColumn.SRC_RANK] == src_rank]
        region = spans[:, SpanColumn.SRC_REGION]
        self._refuse(spans, region >= len(strides), "names a region that is not there")
        fixed = np.flatnonzero(constant)
        self._refuse(spans, np.isin(region, fixed), "reads a constant region")
        ends = spans[:, SpanColumn.OFFSET_BYTES].astype(float) + spans[:, SpanColumn.LENGTH_BYTES]
        self._refuse(spans, ends > strides[region], "leaves its source page")

    def check_size(self, tokens: Tokens, src_rank: int | None = None) -> None:
        """Refuse to make more descriptors than fit, of one source's rows or of all.

        Raises `OrderTooLargeError`.
        """
        count = tokens.stop - tokens.start
        if count <= self._small.get(src_rank, -1):
            return
        program = self.program
        tables: tuple[Int64s, ...] = (program.direct, program.packed, program.extracted)
        spans = program.spans
        if src_rank is not None:
            tables = tuple(rows[rows[:, Column.SRC_RANK] == src_rank] for rows in tables[:2])
            spans = spans[spans[:, SpanColumn.SRC_RANK] == src_rank]
        for rows in tables:
            self._refuse_more(self._descriptors(rows, count), count)
        pages = np.array([self._pages(pair, count) for pair in program.group_pairs], np.int64)
        self._refuse_more(int(pages[spans[:, SpanColumn.GROUP_PAIR]].sum()), count)
        self._small[src_rank] = count

    def _descriptors(self, rows: Int64s, count: int) -> int:
        """At least as many as binding makes of ``rows`` for ``count`` tokens."""
        pairs = self.program.group_pairs
        per_token = np.array([pair.per_token for pair in pairs], bool)[rows[:, Column.GROUP_PAIR]]
        pages = np.array([self._pages(pair, count) for pair in pairs], np.int64)
        joined = np.ones(len(rows), bool)
        for step, stride in (
            (Column.SRC_STEP_BYTES, Column.SRC_TOKEN_STRIDE_BYTES),
            (Column.DST_STEP_BYTES, Column.DST_TOKEN_STRIDE_BYTES),
        ):
            joined &= rows[:, stride] == rows[:, Column.COUNT] * rows[:, step]
        each = np.where(per_token & ~joined, count, pages[rows[:, Column.GROUP_PAIR]])
        return int(each.sum())

    @staticmethod
    def _pages(pair: GroupPair, count: int) -> int:
        """At least as many stretches as pages of both sides cut ``count`` tokens into."""
        if not pair.per_token:
            return 1
        return 2 + sum(count // form.page_tokens for form in (pair.src, pair.dst))

    def _refuse_more(self, descriptors: int, count: int) -> None:
        if descriptors > MAX_DESCRIPTORS:
            raise OrderTooLargeError(
                f"program {self.program.program_id} needs about {descriptors} descriptors for "
                f"{count} tokens, an agent makes at most {MAX_DESCRIPTORS}: "
                f"use the strategy pack",
                program=self.program.program_id,
            )

    def _check_rows(self, rows: Int64s) -> None:
        pairs = self.program.group_pairs
        for columns, least, words in (
            (_NOT_NEGATIVE, 0, "a negative {}"),
            (_POSITIVE, 1, "a {} below 1"),
        ):
            low = rows[:, columns] < least
            if low.any():
                for bad, column in zip(low.T, columns, strict=True):
                    self._refuse(rows, bad, f"has {words.format(column.name)}")
        pair = rows[:, Column.GROUP_PAIR]
        self._refuse(rows, pair >= len(pairs), "names a pair of lists that is not there")
        src, dst = rows[:, Column.SRC_DTYPE], rows[:, Column.DST_DTYPE]
        self._refuse(rows, ~cast_known(src, dst), "asks for a cast that no kernel does")
        per_token = np.array([pair.per_token for pair in pairs], bool)[pair]
        for column in (Column.SRC_TOKEN_STRIDE_BYTES, Column.DST_TOKEN_STRIDE_BYTES):
            missing = per_token & (rows[:, column] < 1)
            self._refuse(rows, missing, f"has a {column.name} below 1")

    def _refuse(self, rows: Int64s, bad: npt.NDArray[np.bool_], why: str) -> None:
        if bad.any():
            row = rows[int(np.argmax(bad))]
            kind, columns = _KINDS[len(row)]
            shown = ", ".join(f"{column.name} {row[column]}" for column in columns)
            raise ProgramInvalidError(
                f"program {self.program.program_id}: a {kind} {why}: {shown}",
                program=self.program.program_id,
            )


def _tables(program: Program) -> tuple[Int64s, ...]:
    return (
        program.direct,
        program.packed,
        program.extracted,
        program.cleared,
        program.interleaved,
        program.restored,
    )


def _check_forms(program: Program) -> None:
    for pair in program.group_pairs:
        forms: tuple[PageForm, PageForm] = (pair.src, pair.dst)
        if (pair.src.page_tokens > 0) != (pair.dst.page_tokens > 0):
            why = "one list is of snapshots, the other one of tokens"
        elif any(form.page_tokens < 0 for form in forms):
            why = "page_tokens is negative"
        elif any(not 0 < form.pages_per_block <= MAX_PAGES_PER_BLOCK for form in forms):
            why = f"pages_per_block is not 1 to {MAX_PAGES_PER_BLOCK}"
        elif pair.window_tokens < 0 or (pair.window_tokens and not pair.per_token):
            why = "window_tokens is negative, or given for snapshots"
        else:
            continue
        raise ProgramInvalidError(
            f"program {program.program_id}: groups {pair.src.group} and {pair.dst.group}: {why}",
            program=program.program_id,
        )
