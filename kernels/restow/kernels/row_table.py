"""Rows that stay on a device, and the few numbers with which a handoff names tokens and pages.

A row copies `COUNT` elements for each token of a list. Element ``i`` of a row at the list's
``k``-th token lies, on each of the two sides, at

    ADDRESS + base + 16 * begin + page * PAGE_BYTES + in_page * TOKEN_BYTES + i * STEP_BYTES

where ``place`` is the place of the token on that side, ``page`` the id of the page
``place // page_tokens``, and ``in_page`` is ``place % page_tokens``. The columns in capitals are
those of the row, and are uploaded once. A `RowCall` has the rest: ``base``, ``place`` and the pages
of each list, and ``begin`` of each row on the side that is staged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from restow.kernels.codes import DST_BYTES, SRC_BYTES, CopyCode, Int64s, TableError

VECTOR_BYTES = 16
VECTOR = len(CopyCode)
"""Code of a copy of 16-byte vectors that follow each other on both sides."""
ZERO_1, ZERO_2, ZERO_4, ZERO_8, ZERO_VECTOR = range(VECTOR + 1, VECTOR + 6)
"""Codes of zeroing elements of 1, 2, 4 and 8 bytes, and vectors. Such rows have no source."""
ONE_PAGE = 1 << 30
"""The ``page_tokens`` of a page that holds any number of tokens."""
TILE = 512
"""Elements or vectors that one program copies."""
_MOST = 1 << 30
"""Limit of a row's elements and of a list's tokens, so that products of two fit in 64 bits."""


class RowColumn(IntEnum):
    """Columns of a row table; the source's columns come first."""

    SRC_ADDRESS = 0
    SRC_PAGE_BYTES = 1
    SRC_TOKEN_BYTES = 2
    SRC_STEP_BYTES = 3
    DST_ADDRESS = 4
    DST_PAGE_BYTES = 5
    DST_TOKEN_BYTES = 6
    DST_STEP_BYTES = 7
    COUNT = 8
    CODE = 9
    LIST = 10


class DeviceColumn(IntEnum):
    """Columns that a kernel reads behind those of `RowColumn`."""

    MAGIC = 11
    SHIFT = 12


class ListColumn(IntEnum):
    """Columns of a call's lists; those behind `PLACES` come first for the source."""

    TOKENS = 0
    PLACES = 1
    """Where the places begin among the call's words, the source's first; -1: consecutive."""
    SRC_BASE = 2
    SRC_PLACE = 3
    """Place of the first token."""
    SRC_PAGE_TOKENS = 4
    SRC_MAGIC = 5
    SRC_SHIFT = 6
    SRC_PAGES = 7
    """Where page ids begin among the call's words; -1: pages are numbered from 0."""
    DST_BASE = 8
    DST_PLACE = 9
    DST_PAGE_TOKENS = 10
    DST_MAGIC = 11
    DST_SHIFT = 12
    DST_PAGES = 13


SIDE_COLUMNS = 6
"""Columns of each side of a list."""


class RowTableError(TableError):
    """A row table breaks a rule."""

    table = "row table"


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """The rows of a row table that passed the checks of `RowTable.checked`."""

    rows: Int64s
    """``[n, 11]``, as given."""
    device_rows: Int64s
    """``[n, 13]``: rows of bytes in the widest unit that divides all their numbers."""

    @classmethod
    def checked(cls, rows: npt.NDArray[Any]) -> RowTable:
        """Check every row and return the table; raise `RowTableError` if a row breaks a rule.

        Addresses, strides and steps must be multiples of the element's size, because a GPU requires
        it. A row may use a step or a token's stride only for zeroing (codes `ZERO_1` to `ZERO_8`).
        """
        RowTableError.check_shape(rows, RowColumn)
        refuse = partial(RowTableError.refuse, rows)
        count, code = rows[:, RowColumn.COUNT], rows[:, RowColumn.CODE]
        known = ((code >= 0) & (code < VECTOR)) | ((code >= ZERO_1) & (code < ZERO_VECTOR))
        refuse(~known, RowColumn.CODE, "is no known code")
        refuse((count < 1) | (count >= _MOST), RowColumn.COUNT, f"is not in [1, {_MOST})")
        for first, item in ((0, _SRC_BYTES[code]), (RowColumn.DST_ADDRESS, _DST_BYTES[code])):
            for column in list(RowColumn)[first : first + 4]:
                used = item > 0
                refuse(used & (rows[:, column] < 0), column, "is negative")
                refuse(used & (rows[:, column] & (item - 1) != 0), column, _UNEVEN)
        return cls(rows, _widened(rows))

    @property
    def mixed(self) -> bool:
        """Return whether there are rows of elements beside rows of vectors."""
        code = self.device_rows[:, RowColumn.CODE]
        return bool(((code != VECTOR) & (code != ZERO_VECTOR)).any())


def _widened(rows: Int64s) -> Int64s:
    """Return the device's rows: those of adjacent bytes in the widest unit, and all magics."""
    made = np.zeros((len(rows), len(RowColumn) + len(DeviceColumn)), np.int64)
    made[:, : len(RowColumn)] = rows
    code = rows[:, RowColumn.CODE]
    item, zero = _DST_BYTES[code], code >= ZERO_1
    raw = (code <= CopyCode.COPY_8) | zero
    alone = rows[:, RowColumn.COUNT] == 1
    dense = raw & ((rows[:, RowColumn.DST_STEP_BYTES] == item) | alone)
    dense &= (rows[:, RowColumn.SRC_STEP_BYTES] == item) | alone | zero
    length = rows[:, RowColumn.COUNT] * item
    source = np.bitwise_or.reduce(rows[:, : RowColumn.SRC_STEP_BYTES], axis=1)
    target = np.bitwise_or.reduce(rows[:, RowColumn.DST_ADDRESS : RowColumn.DST_STEP_BYTES], axis=1)
    bits = length | target | np.where(zero, 0, source) | VECTOR_BYTES
    unit = bits & -bits
    made[dense, RowColumn.COUNT] = (length // unit)[dense]
    made[dense, RowColumn.SRC_STEP_BYTES] = made[dense, RowColumn.DST_STEP_BYTES] = unit[dense]
    made[dense, RowColumn.CODE] = np.where(zero, ZERO_1, CopyCode.COPY_1)[dense]
    made[dense, RowColumn.CODE] += np.log2(unit).astype(np.int64)[dense]
    vectors = dense & (unit == VECTOR_BYTES)
    made[vectors, RowColumn.CODE] = np.where(zero, ZERO_VECTOR, VECTOR)[vectors]
    made[:, DeviceColumn.MAGIC :] = magics(made[:, RowColumn.COUNT])
    return made


def magics(divisors: Int64s) -> Int64s:
    """Return ``[n, 2]``: ``x // d`` is ``x * magic >> shift`` for every ``x`` below 2**31.

    A device divides by multiplying. Divisors are at most 2**30.

    >>> magic, shift = magics(np.array([7]))[0]
    >>> [int(x * magic >> shift) for x in (6, 7, 13, 14, 2**31 - 1)]
    [0, 1, 1, 2, 306783378]
    """
    shift = 31 + np.ceil(np.log2(divisors)).astype(np.int64)
    return np.stack([-(-(1 << shift) // divisors), shift], axis=1)


@cache
def _magic(divisor: int) -> tuple[int, int]:
    return tuple(magics(np.array([divisor]))[0].tolist())


@dataclass(frozen=True, slots=True, eq=False)
class SidePages:
    """Where a list's tokens lie on one side."""

    page_tokens: int = ONE_PAGE
    pages: Int64s | None = None
    """The id of each page; None: pages are numbered from 0."""
    first_place: int = 0
    base_address: int = 0
    """An address that is added to all rows of the list."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenList:
    """The tokens for which rows repeat in one call, and where they lie."""

    tokens: int
    src: SidePages
    dst: SidePages
    places: tuple[Int64s, Int64s] | None = None
    """The place of each token on each side; None: consecutive places from the first."""


@dataclass(frozen=True, slots=True, eq=False)
class RowCall:
    """What a launch needs beside its rows."""

    words: Int64s
    """Lists, followed by the numbers of 32 bits: tiles, begins, page ids and places."""
    lists: int
    tiles: int

    @classmethod
    def of(cls, table: RowTable, lists: Sequence[TokenList], begins: Int64s | None) -> RowCall:
        """Write the call; ``begins`` are multiples of 16 bytes.

        Raises `RowTableError` for a list of too many tokens, and for begins that are not aligned.
        """
        rows = table.device_rows
        tokens = np.array([listed.tokens for listed in lists], np.int64)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < _MOST:
            raise RowTableError(None, f"a list has {tokens.max()} tokens, not [0, {_MOST})")
        bases = [side.base_address for listed in lists for side in (listed.src, listed.dst)]
        if any(base % VECTOR_BYTES for base in bases):
            raise RowTableError(None, f"base addresses must be multiples of {VECTOR_BYTES}")
        units = tokens[rows[:, RowColumn.LIST]] * rows[:, RowColumn.COUNT]
        ends = np.cumsum(-(-units // TILE))
        begins = np.zeros(len(rows), np.int64) if begins is None else begins
        if np.any(begins % VECTOR_BYTES):
            raise RowTableError(None, f"begins must be multiples of {VECTOR_BYTES} bytes")
        parts = [ends, begins // VECTOR_BYTES]
        placed: dict[int, int] = {}
        at = 2 * len(rows)

        def put(numbers: Int64s) -> int:
            """Return where numbers lie among the words; the same array is written once."""
            nonlocal at
            if id(numbers) not in placed:
                placed[id(numbers)] = at
                parts.append(numbers)
                at += len(numbers)
            return placed[id(numbers)]

        header = np.empty((len(lists), len(ListColumn)), np.int64)
        for row, listed in zip(header, lists, strict=True):
            row[ListColumn.TOKENS] = listed.tokens
            row[ListColumn.PLACES] = -1
            if listed.places is not None:
                row[ListColumn.PLACES] = at
                parts += listed.places
                at += 2 * listed.tokens
            for first, side in (
                (ListColumn.SRC_BASE, listed.src),
                (ListColumn.DST_BASE, listed.dst),
            ):
                pages = -1 if side.pages is None else put(side.pages)
                row[first : first + SIDE_COLUMNS] = (
                    *(side.base_address, side.first_place, side.page_tokens),
                    *(*_magic(side.page_tokens), pages),
                )
        numbers = np.concatenate([*parts, np.zeros(at % 2, np.int64)])
        if len(numbers) and numbers.max() >= 1 << 31:
            raise RowTableError(None, f"{numbers.max()} is too large for a call's words")
        words = np.concatenate([header.ravel(), numbers.astype(np.int32).view(np.int64)])
        return cls(words, len(lists), int(ends[-1]) if len(ends) else 0)


ZERO_CODES: Int64s = np.zeros(9, np.int64)
"""The code that zeroes elements, by their size in bytes."""
ZERO_CODES[[1, 2, 4, 8]] = ZERO_1, ZERO_2, ZERO_4, ZERO_8
_UNEVEN = "is no multiple of the element's size"
_ZEROED: Int64s = np.array([1, 2, 4, 8, VECTOR_BYTES], np.int64)
_SRC_BYTES: Int64s = np.concatenate([SRC_BYTES, [VECTOR_BYTES], np.zeros(5, np.int64)])
_DST_BYTES: Int64s = np.concatenate([DST_BYTES, [VECTOR_BYTES], _ZEROED])
