"""Copies of device memory: rows are uploaded once, and a handoff adds tokens and page ids.

`DeviceTables` keeps the row tables of a rank's programs. What a handoff's `RowCopies` say beside
their rows becomes a `RowCall` of a few kilobytes, and all of it is done in one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from restow.agents.binding.copies import Copies, Grid, RowCopies, by_pair
from restow.agents.binding.operands import BoundOperand, Lines
from restow.agents.binding.pages import TokenRange
from restow.agents.copying.codes import COPY_CODES
from restow.agents.memory.cuda import QueuedWork
from restow.agents.memory.errors import ProgramInvalidError
from restow.broker.layout.rows import Int64s
from restow.broker.layout.token_class import shared_runs
from restow.broker.layout.values import ITEM_BYTES, DType
from restow.broker.planner.program import Column, GroupPair, moved_tokens
from restow.kernels import (
    ONE_PAGE,
    VECTOR_BYTES,
    ZERO_CODES,
    RowCall,
    RowColumn,
    RowTable,
    RowTableError,
    SidePages,
    TokenList,
    device_rows,
)

if TYPE_CHECKING:
    from restow.kernels.copy import DeviceRows

SRC_SIDE, DST_SIDE = 0, 1
MOST_TABLES = 1024
"""Tables that are kept. A source has a table for each set of readers that gather at once."""


@dataclass(frozen=True, slots=True)
class _PartList:
    """The rows of one part and one pair of page lists."""

    part: int
    pair: GroupPair
    src: Lines | None
    dst: Lines


@dataclass(frozen=True, slots=True)
class _Table:
    """The rows of all parts of a launch, on the device."""

    rows: DeviceRows
    lists: tuple[_PartList, ...]


@dataclass(frozen=True, slots=True)
class DeviceLaunch:
    """A launch that is ready to begin."""

    rows: DeviceRows
    call: RowCall
    staged: int

    def begin(self) -> None:
        """Queue the copies on the current stream, without waiting for them."""
        self.rows.launch(self.call, self.staged)


class DeviceTables:
    """The row tables of one rank's programs on its device. Belongs to one event loop."""

    def __init__(
        self, device: torch.device, upload: Callable[[RowTable, torch.device], DeviceRows]
    ) -> None:
        """Begin without tables; ``upload`` moves a table to the device."""
        self._device, self._upload = device, upload
        self._tables: dict[tuple[tuple[object, ...], ...], _Table] = {}
        """Tables by the names of their parts."""

    def bind(self, parts: Sequence[RowCopies]) -> DeviceLaunch | None:
        """Return the launch of all parts, none of which is without rows; None if there are none.

        Raises `PageCountError`, `PageRangeError`, and `ProgramInvalidError` for elements that are
        not aligned to their size.
        """
        if not parts:
            return None
        name = tuple(part.name for part in parts)
        table = self._tables.get(name)
        if table is None:
            if len(self._tables) >= MOST_TABLES:
                del self._tables[next(iter(self._tables))]
            table = self._tables[name] = self._table(parts)
        staged = DST_SIDE if any(part.dst.side is None for part in parts) else SRC_SIDE
        begins = [
            np.zeros(len(part.rows), np.int64) if end is None or end.begins is None else end.begins
            for part in parts
            for end in [part.dst if staged == DST_SIDE else part.src]
        ]
        lists = [_tokens(parts[rows.part], rows) for rows in table.lists]
        try:
            call = RowCall.of(table.rows.table, lists, np.concatenate(begins))
        except RowTableError as error:
            raise ProgramInvalidError(f"no kernel does this copy: {error}") from None
        return DeviceLaunch(table.rows, call, staged)

    def forget_program(self, program_id: str) -> None:
        """Forget a program, whose id another program may have from now on. May be called again."""
        for names in list(self._tables):
            if any(program_id in name for name in names):
                del self._tables[names]

    def clear(self) -> None:
        """Forget all programs."""
        self._tables.clear()

    def _table(self, parts: Sequence[RowCopies]) -> _Table:
        tables: list[Int64s] = []
        lists: list[_PartList] = []
        for number, part in enumerate(parts):
            table = np.zeros((len(part.rows), len(RowColumn)), np.int64)
            for pair, index in by_pair(part.rows[:, Column.GROUP_PAIR], part.pairs):
                made, src, dst = _rows_of(part, index)
                made[:, RowColumn.LIST] = len(lists)
                table[index] = made
                lists.append(_PartList(number, pair, src, dst))
            tables.append(table)
        try:
            checked = RowTable.checked(np.concatenate(tables))
        except RowTableError as error:
            raise ProgramInvalidError(f"no kernel does this copy: {error}") from None
        return _Table(self._upload(checked, self._device), tuple(lists))


def _rows_of(part: RowCopies, index: Int64s) -> tuple[Int64s, Lines | None, Lines]:
    """Return the kernel's rows of one pair of page lists, and where they lie on both sides."""
    bound = part.rows[index[:, None]]
    made = np.zeros((len(index), len(RowColumn)), np.int64)
    dst = part.dst.end(bound)
    src = None if part.src is None else part.src.end(bound)
    for first, end in ((RowColumn.SRC_ADDRESS, src), (RowColumn.DST_ADDRESS, dst)):
        if end is not None:
            lines = end.lines
            for column, values in enumerate(
                (
                    lines.first_address,
                    lines.page_stride_bytes,
                    lines.token_stride_bytes,
                    end.step_bytes,
                )
            ):
                made[:, first + column] = np.broadcast_to(values, bound.shape[:-1])[:, 0]
    made[:, RowColumn.COUNT] = bound[:, 0, Column.COUNT]
    codes = ZERO_CODES[ITEM_BYTES[dst.dtype]] if src is None else COPY_CODES[src.dtype, dst.dtype]
    made[:, RowColumn.CODE] = np.broadcast_to(codes, bound.shape[:-1])[:, 0]
    return made, None if src is None else src.lines, dst.lines


def _tokens(part: RowCopies, rows: _PartList) -> TokenList:
    """Return the tokens for which rows of a part repeat in this handoff."""
    pair, tokens = rows.pair, part.tokens
    if not pair.per_token:
        count, places = 1, None
    else:
        count, places = moved_tokens(pair, tokens.start, tokens.stop), None
        if not pair.alike:
            first = pair.first_token(tokens.start, tokens.stop)
            begins, ends = shared_runs(pair.src.tokens, pair.dst.tokens, first, tokens.stop)
            counts = ends - begins
            places = np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(count)
    sides = (part.src, rows.src), (part.dst, rows.dst)
    src, dst = (_side(pair, tokens, end, lines, count, places) for end, lines in sides)
    both = None if places is None else (src[1], dst[1])
    return TokenList(count, src[0], dst[0], both)


def _side(
    pair: GroupPair,
    tokens: TokenRange,
    end: BoundOperand | None,
    lines: Lines | None,
    count: int,
    shared: Int64s | None,
) -> tuple[SidePages, Int64s]:
    """Return the pages of one side, and the places of ``shared`` tokens in them."""
    in_order = np.arange(0 if shared is None else count)
    if end is None or lines is None:
        return SidePages(), in_order
    listed = end.pages(pair, tokens)
    if count:
        lines.check(listed.ids)
    if not pair.per_token or listed.page_tokens == 0:
        return SidePages(ONE_PAGE, listed.ids, 0, end.base_address), in_order
    held = listed.tokens
    first = held.before(pair.first_token(tokens.start, tokens.stop)) - listed.first_token
    places = in_order if shared is None else held.before(shared) - listed.first_token
    return SidePages(listed.page_tokens, listed.ids, first, end.base_address), places


def run_grids(copies: Copies, device: torch.device) -> None:
    """Queue copies between any addresses of ``device`` on the current stream.

    Rows of one shape become one row of the kernel, whose pages are their addresses. Raises
    `ProgramInvalidError` for elements that are not aligned to their size.
    """
    rows: list[list[int]] = []
    lists: list[TokenList] = []
    for grid in copies.grids:
        for row, tokens in _alike(grid):
            rows.append([*row, len(lists)])
            lists.append(tokens)
    if not rows:
        return
    try:
        table = RowTable.checked(np.array(rows, np.int64))
        device_rows(table, device).launch(RowCall.of(table, lists, None), SRC_SIDE)
    except RowTableError as error:
        raise ProgramInvalidError(f"no kernel does this copy: {error}") from None


def queue_pieces(
    src_address: Int64s, dst_address: Int64s, length_bytes: Int64s, device: torch.device
) -> QueuedWork:
    """Queue copies of pieces of ``device`` on the agent's own stream. Raises `CopyFailedError`."""
    one, bytes_ = np.ones(1, np.int64), np.full(1, int(DType.UINT8), np.int64)
    grid = Grid(src_address, dst_address, length_bytes, one, one, bytes_, bytes_)
    return QueuedWork(device, lambda: run_grids(Copies((grid,)), device))


_WINDOW_PAGES = 1 << 31


def _alike(grid: Grid) -> Iterator[tuple[list[int], TokenList]]:
    """Yield a kernel's row for the rows of one shape, and their addresses as pages."""
    if not grid.src_address.size:
        return
    codes = COPY_CODES[grid.src_dtype, grid.dst_dtype]
    kinds = [grid.count, grid.src_step_bytes, grid.dst_step_bytes, codes]
    sides = [_pages_of(address.ravel()) for address in (grid.src_address, grid.dst_address)]
    windows = [pages // _WINDOW_PAGES for _, pages, _ in sides]
    if all(kind.size == 1 for kind in kinds) and not any(window.any() for window in windows):
        shapes = np.array([[*(kind.flat[0] for kind in kinds), 0, 0]])
        group = np.zeros(grid.src_address.size, np.int64)
    else:
        shape = grid.src_address.shape
        columns = [*(np.broadcast_to(kind, shape).ravel() for kind in kinds), *windows]
        shapes, group = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    for number, (count, src_step, dst_step, code, *moved) in enumerate(shapes.tolist()):
        chosen = group.ravel() == number
        (src, src_pages), (dst, dst_pages) = (
            (
                [window * _WINDOW_PAGES * unit, unit, 0, step],
                SidePages(1, pages[chosen] - window * _WINDOW_PAGES, 0, base),
            )
            for (base, pages, unit), step, window in zip(
                sides, (src_step, dst_step), moved, strict=True
            )
        )
        yield [*src, *dst, count, code], TokenList(int(chosen.sum()), src_pages, dst_pages)


def _pages_of(address: Int64s) -> tuple[int, Int64s, int]:
    """Return addresses as a base, numbers of pages behind it, and the bytes of a page."""
    base = int(address.min()) // VECTOR_BYTES * VECTOR_BYTES
    behind = address - base
    page_bytes = int(np.bitwise_or.reduce(behind, initial=VECTOR_BYTES))
    page_bytes &= -page_bytes
    return base, behind // page_bytes, page_bytes
