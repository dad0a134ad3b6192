"""Copy, cast and zero all rows of a row table in one launch on a GPU (GATHER, SCATTER and CLEAR).

rows   int64 [n, 13]  the device rows of a RowTable, which stay on the device
lists  int64 [l, 14]  the lists of a RowCall
words  int32          its other numbers: the tile at which each row ends, begins, page ids, places

One program copies `TILE` elements or vectors of one row, of as many tokens as they take, so short
rows fill a program as long rows do. It finds its row by the number of its tile. Casts to bfloat16
work on the bits, so that they round to nearest even on every GPU and in Triton's interpreter, which
would truncate them.
"""

from contextlib import nullcontext

import numpy as np
import torch
import triton
import triton.language as tl

from restow.kernels import row_table
from restow.kernels.codes import CopyCode
from restow.kernels.row_table import TILE, DeviceColumn, ListColumn, RowCall, RowColumn, RowTable

COPY_1, COPY_2, COPY_4, COPY_8 = (tl.constexpr(int(code)) for code in list(CopyCode)[:4])
F32_BF16, BF16_F32, F32_F16, F16_F32, BF16_F16, F16_BF16 = (
    tl.constexpr(int(code)) for code in list(CopyCode)[4:]
)
VECTOR, ZERO_1, ZERO_2, ZERO_4, ZERO_8, ZERO_VECTOR = (
    tl.constexpr(code)
    for code in (
        row_table.VECTOR,
        row_table.ZERO_1,
        row_table.ZERO_2,
        row_table.ZERO_4,
        row_table.ZERO_8,
        row_table.ZERO_VECTOR,
    )
)
ROW_COLUMNS = tl.constexpr(len(RowColumn) + len(DeviceColumn))
LIST_COLUMNS = tl.constexpr(len(ListColumn))
LIST_SIDE = tl.constexpr(row_table.SIDE_COLUMNS)
WARPS = 8
"""With these, a thread copies two vectors, and no kernel needs more than 64 registers."""


@triton.jit  # type: ignore[untyped-decorator]
def _load(address, mask, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(address.to(tl.pointer_type(dtype)), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _store(address, value, mask, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(address.to(tl.pointer_type(dtype)), value, mask=mask)


@triton.jit
def bf16_bits(value):  # type: ignore[no-untyped-def]
    """Round float32 to bfloat16, to nearest even; a NaN becomes the quiet NaN of its sign."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = ((bits >> 16) & 0x8000) | 0x7FC0
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, rounded).to(tl.uint16)


@triton.jit
def from_bf16_bits(bits):  # type: ignore[no-untyped-def]
    """Return the float32 value of the bits of a bfloat16."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _quotient(value, p_magic):  # type: ignore[no-untyped-def]
    """Divide by the divisor whose magic and shift lie at an address."""
    return (value.to(tl.int64) * tl.load(p_magic) >> tl.load(p_magic + 1)).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _addresses(p_row, p_list, words, begin, i_token, i_elem, m_elem, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the addresses of elements of tokens, at the source (0) or the destination (1)."""
    p_end, p_side = p_row + 4 * SIDE, p_list + 2 + LIST_SIDE * SIDE
    tokens, places = tl.load(p_list), tl.load(p_list + 1)
    place = tl.load(p_side + 1).to(tl.int32) + i_token
    if places >= 0:
        place = tl.load(words + places + SIDE * tokens + i_token, mask=m_elem, other=0)
    page_tokens, pages = tl.load(p_side + 2).to(tl.int32), tl.load(p_side + 5)
    page = _quotient(place, p_side + 3)
    in_page = place - page * page_tokens
    if pages >= 0:
        page = tl.load(words + pages + page, mask=m_elem, other=0)
    address = tl.load(p_end) + tl.load(p_side) + begin
    address += page.to(tl.int64) * tl.load(p_end + 1)
    address += in_page.to(tl.int64) * tl.load(p_end + 2)
    return address + i_elem.to(tl.int64) * tl.load(p_end + 3)


@triton.jit
def _copy_vectors(src, dst, m_vec):  # type: ignore[no-untyped-def]
    """Copy 16 bytes from each source to each destination address, with one access each."""
    # The alignment hints make single accesses. Hints on an argument are lost when this function
    # is inlined; hints on values computed here stay.
    o_word = tl.arange(0, 4)[None, :]
    p_src = tl.multiple_of(src.to(tl.pointer_type(tl.uint32)), 16)[:, None] + o_word
    p_dst = tl.multiple_of(dst.to(tl.pointer_type(tl.uint32)), 16)[:, None] + o_word
    tl.store(p_dst, tl.load(p_src, mask=m_vec[:, None]), mask=m_vec[:, None])


@triton.jit
def _zero_vectors(dst, m_vec):  # type: ignore[no-untyped-def]
    """Zero 16 bytes at each address, with one access each."""
    o_word = tl.arange(0, 4)[None, :]
    p_dst = tl.multiple_of(dst.to(tl.pointer_type(tl.uint32)), 16)[:, None] + o_word
    tl.store(p_dst, 0, mask=m_vec[:, None])


@triton.jit
def _copy_elements(src, dst, m_elem, code):  # type: ignore[no-untyped-def]
    """Copy, cast or zero elements."""
    if code == COPY_1:
        _store(dst, _load(src, m_elem, tl.uint8), m_elem, tl.uint8)
    elif code == COPY_2:
        _store(dst, _load(src, m_elem, tl.uint16), m_elem, tl.uint16)
    elif code == COPY_4:
        _store(dst, _load(src, m_elem, tl.uint32), m_elem, tl.uint32)
    elif code == COPY_8:
        _store(dst, _load(src, m_elem, tl.uint64), m_elem, tl.uint64)
    elif code == F32_BF16:
        _store(dst, bf16_bits(_load(src, m_elem, tl.float32)), m_elem, tl.uint16)
    elif code == BF16_F32:
        _store(dst, from_bf16_bits(_load(src, m_elem, tl.uint16)), m_elem, tl.float32)
    elif code == F32_F16:
        _store(dst, _load(src, m_elem, tl.float32).to(tl.float16), m_elem, tl.float16)
    elif code == F16_F32:
        _store(dst, _load(src, m_elem, tl.float16).to(tl.float32), m_elem, tl.float32)
    elif code == BF16_F16:
        b_value = from_bf16_bits(_load(src, m_elem, tl.uint16))
        _store(dst, b_value.to(tl.float16), m_elem, tl.float16)
    elif code == F16_BF16:
        b_value = _load(src, m_elem, tl.float16).to(tl.float32)
        _store(dst, bf16_bits(b_value), m_elem, tl.uint16)
    elif code == ZERO_1:
        tl.store(dst.to(tl.pointer_type(tl.uint8)), 0, mask=m_elem)
    elif code == ZERO_2:
        tl.store(dst.to(tl.pointer_type(tl.uint16)), 0, mask=m_elem)
    elif code == ZERO_4:
        tl.store(dst.to(tl.pointer_type(tl.uint32)), 0, mask=m_elem)
    elif code == ZERO_8:
        tl.store(dst.to(tl.pointer_type(tl.uint64)), 0, mask=m_elem)


@triton.jit(do_not_specialize=["n_rows", "halvings"])  # type: ignore[untyped-decorator]
def copy_rows_kernel(  # type: ignore[no-untyped-def]
    rows, lists, words, n_rows, halvings,
    STAGED: tl.constexpr, MIXED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy one tile of one row."""
    i_tile = tl.program_id(0)
    i_row, stop = tl.zeros([], tl.int32), n_rows.to(tl.int32)
    for _ in range(halvings):  # find the first row that ends behind this tile
        middle = (i_row + stop) // 2
        inside = tl.load(words + tl.minimum(middle, n_rows - 1)) > i_tile
        i_row, stop = tl.where(inside, i_row, middle + 1), tl.where(inside, middle, stop)
    first_tile = tl.load(words + i_row - 1, mask=i_row > 0, other=0)
    p_row = rows + i_row.to(tl.int64) * ROW_COLUMNS
    p_list = lists + tl.load(p_row + 10) * LIST_COLUMNS
    count, code = tl.load(p_row + 8), tl.load(p_row + 9).to(tl.int32)

    # The tile's first token is found in 64 bits; behind it 32 bits are enough.
    o_first = (i_tile - first_tile).to(tl.int64) * TILE
    first_token = o_first // count
    o_elem = (o_first - first_token * count).to(tl.int32) + tl.arange(0, TILE)
    later = _quotient(o_elem, p_row + 11)
    i_token = first_token.to(tl.int32) + later
    i_elem = o_elem - later * count.to(tl.int32)
    m_elem = i_token < tl.load(p_list).to(tl.int32)

    begin = tl.load(words + n_rows + i_row).to(tl.int64) * 16
    src = _addresses(p_row, p_list, words, begin * (STAGED == 0), i_token, i_elem, m_elem, 0)
    dst = _addresses(p_row, p_list, words, begin * (STAGED == 1), i_token, i_elem, m_elem, 1)
    if code == VECTOR:
        _copy_vectors(src, dst, m_elem)
    elif code == ZERO_VECTOR:
        _zero_vectors(dst, m_elem)
    elif MIXED:
        _copy_elements(src, dst, m_elem, code)


class DeviceRows:
    """A row table on a device, for any number of launches."""

    def __init__(self, table: RowTable, device: torch.device) -> None:
        """Upload the rows on the current stream."""
        self.table = table
        self._rows = torch.from_numpy(table.device_rows).to(device)

    def launch(self, call: RowCall, staged: int) -> None:
        """Copy on the current stream of the rows' device, without waiting for it.

        ``staged`` is the side, 0 or 1, to which the begins of ``call`` belong. The call's words are
        uploaded in one asynchronous copy from pinned memory, which torch's allocator keeps until
        the stream has passed the copy.
        """
        if not call.tiles:
            return
        device = self._rows.device
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        words = torch.empty(len(call.words), dtype=torch.int64, pin_memory=device.type == "cuda")
        words.numpy()[:] = call.words
        with on_device:
            words = words.to(device, non_blocking=True)
            n_rows, header = len(self.table.rows), call.lists * len(ListColumn)
            copy_rows_kernel[(call.tiles,)](
                self._rows, words, words[header:].view(torch.int32), n_rows, n_rows.bit_length(),
                STAGED=staged, MIXED=self.table.mixed, TILE=TILE, num_warps=WARPS,
            )  # fmt: skip


def prepare(device: torch.device) -> None:
    """Compile all that `DeviceRows.launch` launches, on the current stream of ``device``."""
    memory = torch.zeros(2, 64, dtype=torch.uint8, device=device)
    source, target = memory[0].data_ptr(), memory[1].data_ptr()
    pages = row_table.SidePages()
    for count in (16, 1):  # vectors alone, and elements
        row = [source, 0, 0, 1, target, 0, 0, 1, count, CopyCode.COPY_1, 0]
        table = RowTable.checked(np.array([row], np.int64))
        call = RowCall.of(table, [row_table.TokenList(1, pages, pages)], None)
        for staged in (0, 1):
            DeviceRows(table, device).launch(call, staged)
