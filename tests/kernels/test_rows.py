"""Row tables: the kernel in Triton's interpreter against the definition, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_arena import GUARD_BYTES, SOURCE, Arena, interpreted, nan_as_one

from restow.kernels import (
    CopyCode,
    PieceTable,
    RowCall,
    RowColumn,
    RowTable,
    RowTableError,
    SidePages,
    TokenList,
    reference,
)
from restow.kernels.codes import DST_BYTES, SRC_BYTES, Int64s
from restow.kernels.copy import DeviceRows
from restow.kernels.row_table import (
    ONE_PAGE,
    TILE,
    VECTOR,
    ZERO_1,
    ZERO_CODES,
    ZERO_VECTOR,
    DeviceColumn,
    magics,
)

CPU = torch.device("cpu")
CODES = [*CopyCode, *(int(code) for code in ZERO_CODES if code)]
STAGED_DST = 1

pytestmark = [
    pytest.mark.sampled,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


@dataclass
class Launch:
    """A drawn table, whose destinations count from 0, and its call."""

    rows: Int64s
    lists: list[TokenList]
    begins: Int64s
    staged: int
    size_bytes: int

    def at(self, address: int) -> tuple[RowTable, RowCall]:
        """Return the table with its destinations behind an address, and the call."""
        rows = self.rows.copy()
        rows[:, RowColumn.DST_ADDRESS] += address
        table = RowTable.checked(rows)
        return table, RowCall.of(table, self.lists, self.begins)


def side(draw: st.DrawFn, tokens: int, pages: int, base: int) -> SidePages:
    """Draw the pages in which a list's tokens lie on one side."""
    kind = draw(st.sampled_from(("one page", "numbered", "listed")))
    if kind == "one page":
        ids = np.array([draw(st.integers(0, pages - 1))]) if draw(st.booleans()) else None
        return SidePages(ONE_PAGE, ids, 0, base)
    size = draw(st.sampled_from((1, 2, 3, 4, 16)))
    first = draw(st.integers(0, 2 * size))
    count = -(-(first + tokens) // size)
    if kind == "numbered" and count <= pages:
        return SidePages(size, None, first, base)
    seed = draw(st.integers(0, 9))
    ids = np.random.default_rng(seed).permutation(max(count, pages))[:count]
    return SidePages(size, ids, first, base)


def last_page(pages: SidePages, tokens: int) -> int:
    if pages.pages is not None:
        return int(pages.pages.max(initial=0))
    return 0 if pages.page_tokens == ONE_PAGE else (pages.first_place + tokens) // pages.page_tokens


@st.composite
def launches(draw: st.DrawFn) -> Launch:
    """Draw rows whose destinations do not overlap, and whose sources lie anywhere."""
    staged = draw(st.integers(0, 1))
    lists, rows, begins, end = [], [], [], 0
    for number in range(draw(st.integers(1, 3))):
        tokens = draw(st.sampled_from((0, 1, 1, 2, 5, 33)))
        src, dst = (side(draw, tokens, 6, draw(st.sampled_from((0, 16, 480)))) for _ in range(2))
        places = None
        if draw(st.booleans()) and tokens:  # tokens that are shared out among ranks
            order = np.random.default_rng(tokens).permutation(tokens)
            places = src.first_place + order, dst.first_place + order
        lists.append(TokenList(tokens, src, dst, places))
        for _ in range(draw(st.integers(1, 3))):
            code = draw(st.sampled_from(CODES))
            zero = code >= VECTOR
            item = 1 << (code - ZERO_1) if zero else int(DST_BYTES[code])
            src_item = 1 if zero else int(SRC_BYTES[code])
            count = draw(st.sampled_from((1, 2, 3, 8, 16, 48, 64)))
            step = item * draw(st.sampled_from((1, 1, 2, 3)))
            align = draw(st.sampled_from((8, 16)))
            token_bytes = -(-((count - 1) * step + item) // align) * align
            in_page = min(dst.page_tokens, tokens + dst.first_place)
            page_bytes = in_page * token_bytes + draw(st.sampled_from((0, 8, 16)))
            begin = 16 * draw(st.integers(0, 3))
            reach = dst.base_address + begin + (last_page(dst, tokens) + 1) * page_bytes
            src_step = src_item * draw(st.sampled_from((1, 1, 2, 5)))
            src_span = (count - 1) * src_step + src_item
            src_token = -(-src_span // 16) * draw(st.sampled_from((8, 16, 24)))
            src_page = 16 * draw(st.integers(0, 9))
            at = draw(st.sampled_from((0, 8, 16, 48)))
            rows.append(
                [
                    *(SOURCE.address + at, src_page, src_token, src_step),
                    *(end, page_bytes, token_bytes, step),
                    *(count, code, number),
                ]
            )
            most = 480 + 48 + at + (last_page(src, tokens) + 1) * src_page
            most += min(src.page_tokens, tokens + src.first_place) * src_token + src_span
            assert most < len(SOURCE.bytes), most
            begins.append(begin)
            end += -(-(reach + token_bytes) // 16) * 16
    return Launch(np.array(rows, np.int64), lists, np.array(begins), staged, end + 64)


@interpreted
@given(launches())
@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
def test_the_kernel_copies_what_the_definition_copies(launch: Launch) -> None:
    want = Arena(launch.size_bytes)
    got = want.twin()
    tables = [launch.at(-(-arena.address // 16) * 16) for arena in (want, got)]
    reference.copy_rows(*tables[0], launch.staged)
    DeviceRows(tables[1][0], CPU).launch(tables[1][1], launch.staged)
    for table, call in tables:
        pieces = [
            one for one in reference.row_pieces(table, call, launch.staged) if one[5] < VECTOR
        ]
        nan_as_one(PieceTable(np.array(pieces, np.int64).reshape(-1, 6)))
    shift = -want.address % 16, -got.address % 16
    first = want.memory[GUARD_BYTES + shift[0] :], got.memory[GUARD_BYTES + shift[1] :]
    length = min(map(len, first))
    assert np.array_equal(first[0][:length], first[1][:length])
    for arena in (want, got):
        assert (arena.memory[:GUARD_BYTES] == 0xA5).all()
        assert (arena.memory[-GUARD_BYTES:] == 0xA5).all()


@given(launches())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_a_device_accesses_nothing_across_its_size(launch: Launch) -> None:
    """Check alignments: a GPU faults where they are wrong, and the interpreter does not."""
    table, call = launch.at(-(-SOURCE.address // 16) * 16)
    sizes = np.array([*SRC_BYTES, 16, *(1,) * 5]), np.array([*DST_BYTES, 16, 1, 2, 4, 8, 16])
    wide = RowTable(table.device_rows[:, : len(RowColumn)], table.device_rows)
    for src, dst, count, src_step, dst_step, code in reference.row_pieces(
        wide, call, launch.staged
    ):
        for address, step, size in ((src, src_step, sizes[0]), (dst, dst_step, sizes[1])):
            assert address % size[code] == 0
            assert count == 1 or step % size[code] == 0


GOOD = (1600, 64, 32, 2, 3200, 64, 32, 4, 8, CopyCode.COPY_2, 0)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *((RowColumn.CODE, value) for value in (-1, VECTOR, ZERO_VECTOR, ZERO_VECTOR + 1)),
        *((RowColumn.COUNT, value) for value in (0, -1, 1 << 30)),
        (RowColumn.SRC_ADDRESS, 1601),
        (RowColumn.SRC_PAGE_BYTES, 63),
        (RowColumn.SRC_TOKEN_BYTES, -2),
        (RowColumn.DST_TOKEN_BYTES, 33),
        (RowColumn.DST_STEP_BYTES, 5),
    ],
)
def test_a_broken_row_is_named(column: RowColumn, value: int) -> None:
    rows = np.array([GOOD] * 3, np.int64)
    rows[1, column] = value
    with pytest.raises(RowTableError, match=f"row 1: {column.name} {value} ") as caught:
        RowTable.checked(rows)
    assert caught.value.row == 1


def test_rows_that_are_zeroed_have_no_source() -> None:
    rows = np.array([GOOD], np.int64)
    rows[0, : RowColumn.DST_ADDRESS] = -1
    rows[0, RowColumn.CODE] = ZERO_CODES[2]
    assert len(RowTable.checked(rows).rows) == 1


@pytest.mark.parametrize("what", ["base", "begin", "tokens", "page"])
def test_a_call_that_no_kernel_can_make_is_refused(what: str) -> None:
    table = RowTable.checked(np.array([GOOD], np.int64))
    pages = SidePages(1, np.array([1 << 31 if what == "page" else 5]))
    src = SidePages(base_address=8) if what == "base" else SidePages()
    tokens = 1 << 30 if what == "tokens" else 1
    begins = np.array([8 if what == "begin" else 16])
    with pytest.raises(RowTableError):
        RowCall.of(table, [TokenList(tokens, src, pages)], begins)


@pytest.mark.parametrize(
    ("source", "target", "unit"),
    [(0, 0, 16), (8, 0, 8), (0, 8, 8), (4, 4, 4), (12, 0, 4), (6, 2, 2), (1, 1, 1)],
)
@pytest.mark.parametrize("column", ["address", "page", "token"])
def test_bytes_are_copied_in_the_widest_unit_of_all_numbers(
    source: int, target: int, unit: int, column: str
) -> None:
    row = [4096, 512, 64, 1, 8192, 512, 64, 1, 48, CopyCode.COPY_1, 0]
    place = {"address": 0, "page": 1, "token": 2}[column]
    row[place] += source
    row[4 + place] += target
    made = RowTable.checked(np.array([row], np.int64)).device_rows[0]
    assert made[RowColumn.COUNT] == 48 // unit
    assert made[RowColumn.CODE] == (VECTOR if unit == 16 else unit.bit_length() - 1)
    row[RowColumn.CODE] = ZERO_CODES[1]
    zeroed = RowTable.checked(np.array([row], np.int64)).device_rows[0]
    widest = (target | 16) & -(target | 16)  # the source does not count
    assert zeroed[RowColumn.COUNT] == 48 // widest


def test_a_call_is_some_kilobytes_and_a_program_per_tile() -> None:
    rows = [[4096, 8192, 512, 1, 1 << 20, 0, 512, 1, 512, CopyCode.COPY_1, 0]] * 12
    table = RowTable.checked(np.array(rows, np.int64))
    assert not table.mixed
    pages = SidePages(16, np.arange(512))
    call = RowCall.of(table, [TokenList(8192, pages, SidePages())], np.zeros(12, np.int64))
    assert call.tiles == 12 * 8192 * 512 // 16 // TILE
    assert call.words.nbytes < 2400


@given(st.lists(st.integers(1, ONE_PAGE), min_size=1), st.integers(0, 2**31 - 1))
def test_division_by_magic_is_division(divisors: list[int], number: int) -> None:
    for divisor, (magic, shift) in zip(divisors, magics(np.array(divisors)).tolist(), strict=True):
        near = number // divisor * divisor
        for one in (number, near, max(near - 1, 0), 2**31 - 1):
            assert one * magic >> shift == one // divisor
            assert one * magic < 1 << 63
    assert [len(RowColumn), len(RowColumn) + 1] == [DeviceColumn.MAGIC, DeviceColumn.SHIFT]
