"""The twins: copy_pieces and clear_slots for host memory, in numpy and torch.

copy_pieces  PieceTable over host addresses                                      -> None, copies
clear_slots  SlotTable over host addresses, slots int [g, n], mask [n] -> None, zeroes

They are the kernels' truth and the production path on the CPU. Python loops over classes of equal
rows and over rows long enough to pay for it, never over short rows. What was measured, one thread:

* a scattered run of bytes is fastest as one numpy void element (one memcpy per row), and where
  the destination is evenly spaced as `torch.index_select(out=...)`, which needs no temporary;
* with more threads a torch operation of over 32768 elements forks, which costs up to 10 ms when
  the cores are busy; so chunks stay below that, and only whole classes may fork.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import torch

from restow.kernels.codes import DST_BYTES, SRC_BYTES, Column, CopyCode, Int64s
from restow.kernels.host.classes import alike, classes, even_parts
from restow.kernels.host.interlaced import CHUNK_ELEMS, Interlaced
from restow.kernels.host.rows import (
    DTYPES,
    Rows,
    StridedRows,
    elements,
    memmove_rows,
    zero_rows,
)
from restow.kernels.piece_table import PieceTable
from restow.kernels.regroup import contiguous
from restow.kernels.slot_table import SlotTable

MEMMOVE_BYTES = 256 * 1024  # a memmove call costs 0.3 to 1.3 us against 30 us of copying
SCATTERED_MEMMOVE_BYTES = 32 * 1024  # measured break-even with a copy through a temporary
FEW_ROWS = 1024  # as many memmove calls cost less than sorting rows into classes
FEW_EQUAL_ROWS = 192  # and as many less than views of rows that need no sorting
FEW_ROWS_BYTES = 512  # at least, in every one of them
SHORT_BYTES = 64  # shorter runs may join to longer rows
QUICK_BYTES = 512  # a memcpy of as many takes 1/5 less for each byte
SLOW_BYTES = range(1024, 2049, QUICK_BYTES)  # than one of these (glibc 2.36 on AMD EPYC)
CHUNK_BYTES = 256 * 1024  # a temporary that stays in L2
FEW_STRIDED_ELEMS = 128  # at least, in every one of few rows
LONG_STRIDED_ELEMS = 1024  # a row of its own: 1.5 us of overhead against 1 us and more


def copy_pieces(table: PieceTable) -> None:
    """Execute the table's rows on host memory."""
    prepare_pieces(table)()


def prepare_pieces(table: PieceTable) -> Callable[[], None] | StridedRows:
    """As much of `copy_pieces` as touches no memory of the table; call what is returned."""
    rows = table.rows
    if _are_few_strided(rows):
        return StridedRows.of(rows)
    lengths = _run_lengths(rows)
    if lengths is not None and len(lengths):
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest == longest:
            copy = prepare_runs(rows[:, 0], rows[:, 1], longest)
            if copy is not None:
                return copy
        elif len(lengths) <= FEW_ROWS and shortest >= FEW_ROWS_BYTES:
            return partial(memmove_rows, rows[:, 0], rows[:, 1], lengths)
    return partial(_copy_pieces, table)


def prepare_runs(src: Int64s, dst: Int64s, length_bytes: int) -> Callable[[], None] | None:
    """What copies runs that all have as many bytes; None if a table of them is the better way."""
    if not len(src) or length_bytes < SHORT_BYTES:
        return None
    equal = length_bytes < MEMMOVE_BYTES
    if len(src) <= (FEW_EQUAL_ROWS if equal else FEW_ROWS) and length_bytes >= FEW_ROWS_BYTES:
        return partial(memmove_rows, src, dst, np.full(len(src), length_bytes))
    return partial(_call_all, list(_run_copies(src, dst, length_bytes))) if equal else None


def _copy_pieces(table: PieceTable) -> None:
    rows = table.lengthen().rows
    dense = contiguous(rows)
    some = rows[:, Column.COUNT] > 0
    runs = rows.take(np.flatnonzero(dense & some), axis=0)
    rest = rows.take(np.flatnonzero(some & ~dense), axis=0)
    runs[:, Column.COUNT] *= SRC_BYTES[runs[:, Column.CODE]]
    for column in (Column.SRC_STEP_BYTES, Column.DST_STEP_BYTES):
        runs[:, column] = 1
    runs[:, Column.CODE] = CopyCode.COPY_1
    big = runs[:, Column.COUNT] >= MEMMOVE_BYTES
    memmove_rows(*runs[big, : Column.SRC_STEP_BYTES].T)
    for same in classes(runs[~big] if big.any() else runs):
        _call_all(_run_copies(same[:, 0], same[:, 1], int(same[0, Column.COUNT])))

    count, src_step, dst_step, code = rest[:, Column.COUNT :].T
    strided = (src_step != SRC_BYTES[code]) | (dst_step != DST_BYTES[code])
    long = count >= np.where(strided, LONG_STRIDED_ELEMS, CHUNK_ELEMS)
    for same in alike(rest[long]):
        if not _copied_as_runs(same):
            for row in same.tolist():
                _copy_long(*row)
    for same in classes(rest[~long]):
        if not _copied_as_runs(same):
            _copy_strided(same)


def _are_few_strided(rows: Int64s) -> bool:
    """Whether handling each row by itself is the least work: windows that are turned are such."""
    if not 0 < len(rows) <= FEW_ROWS or rows[:, Column.COUNT].min() < FEW_STRIDED_ELEMS:
        return False
    code = int(rows[0, Column.CODE])
    if code > CopyCode.COPY_8 or np.any(rows[:, Column.CODE] != code):
        return False
    steps = rows[:, Column.SRC_STEP_BYTES : Column.CODE]
    return bool(np.any(steps != SRC_BYTES[code]))


def _copied_as_runs(same: Int64s) -> bool:
    """Copy rows of equal shape if they interlace."""
    found = Interlaced.of(same)
    if found is not None:
        found.copy()
    return found is not None


def _run_lengths(rows: Int64s) -> Int64s | None:
    """Bytes of every row, if all are runs."""
    lengths: Int64s = rows[:, Column.COUNT] * SRC_BYTES[rows[:, Column.CODE]]
    return lengths if contiguous(rows).all() else None


def clear_slots(
    regions: SlotTable, slots: torch.Tensor, mask: torch.Tensor, of_zero: bool, first_page: int
) -> None:
    """Zero every listed byte range in the pages of host memory that the mask says."""
    base, page_stride, offset, length, group = regions.rows.numpy()[:, :, None].transpose(1, 0, 2)
    marked = mask == 0 if of_zero else mask != 0
    page = regions.lists(slots)[:, marked].to(torch.int64).numpy()[group[:, 0]]  # [ranges, pages]
    start = base + offset + page * page_stride
    cleared = page >= first_page
    zero_rows(start[cleared], np.broadcast_to(length, start.shape)[cleared])


def _call_all(copies: Iterable[Callable[[], object]]) -> None:
    for copy in copies:
        copy()


def _run_copies(src: Int64s, dst: Int64s, length: int) -> Iterator[Callable[[], object]]:
    """Copies of scattered runs of equally many bytes; nothing is touched before they are called."""
    size_bytes = len(src) * length
    dst_parts = _worthwhile(even_parts(dst), size_bytes)
    src_parts = _worthwhile(even_parts(src), size_bytes) if dst_parts is None else None
    if len(src) < 4 or (not dst_parts and not src_parts and length >= SCATTERED_MEMMOVE_BYTES):
        yield partial(memmove_rows, src, dst, np.full(len(src), length))
        return
    for part in dst_parts or src_parts or [slice(0, len(src))]:
        source = Rows(src[part], length, 1, torch.uint8)
        target = Rows(dst[part], length, 1, torch.uint8)
        if length in SLOW_BYTES and (source.dense or target.dense):
            source, target = (rows.cut(length // QUICK_BYTES) for rows in (source, target))
        if target.even:
            windows, index = source.windows(), source.index()
            yield partial(torch.index_select, windows, 0, index, out=target.even_rows())
            continue
        # numpy first copies an operand that may overlap the other: chunks keep that in cache.
        whole = source.even and not source.meets(target)
        for chunk in _chunks(source.n, source.n if whole else CHUNK_BYTES // source.span_bytes):
            yield partial(target.take, source, chunk)


def _worthwhile(parts: list[slice] | None, size_bytes: int) -> list[slice] | None:
    """The parts, unless they are so short that handling each costs more than it saves."""
    if parts is None or len(parts) * CHUNK_BYTES > size_bytes:
        return None if parts is None or len(parts) > 1 else parts
    return parts


def _copy_strided(rows: Int64s) -> None:
    """Copy and cast rows of equal shape through an index, chunk by chunk."""
    src, dst = rows[:, 0], rows[:, 1]
    count, src_step, dst_step, code = rows[0, Column.COUNT :].tolist()
    for part in even_parts(dst) or even_parts(src) or [slice(0, len(rows))]:
        source = Rows(src[part], count, src_step, DTYPES[code][0])
        target = Rows(dst[part], count, dst_step, DTYPES[code][1])
        for chunk in _chunks(source.n, CHUNK_ELEMS // count):
            target.write(chunk, source.read(chunk))


def _chunks(n: int, size: int) -> list[slice]:
    size = max(1, size)
    return [slice(first, min(first + size, n)) for first in range(0, n, size)]


def _copy_long(src: int, dst: int, count: int, src_step: int, dst_step: int, code: int) -> None:
    """Copy one long row in one strided operation."""
    src_dtype, dst_dtype = DTYPES[code]
    source = elements(src, count, src_step, src_dtype)
    target = elements(dst, count, dst_step, dst_dtype)
    if src_dtype == dst_dtype:
        np.copyto(target.numpy(), source.numpy())  # half of torch's overhead
    else:
        target.copy_(source)
