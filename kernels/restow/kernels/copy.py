"""Copy and cast all rows of a piece table in one launch on a GPU (GATHER and SCATTER).

tiles   int64 [t, 3]  the tiles of a LaunchTable, on the device
shapes  int64 [n, 5]  the shapes that the tiles refer to, on the device

One program copies one tile. A tile contains all that its program must know of a run of vectors, so
reading the table costs one round trip to memory. A program issues all its loads before its first
store. Casts to bfloat16 work on the bits, so that they round to nearest even on every GPU and in
Triton's interpreter, which would truncate them.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from restow.kernels import launch_table
from restow.kernels.codes import CopyCode
from restow.kernels.launch_table import SHAPE_COLUMNS, LaunchTable
from restow.kernels.tables import PieceTable

COPY_1, COPY_2, COPY_4, COPY_8 = (tl.constexpr(int(code)) for code in list(CopyCode)[:4])
F32_BF16, BF16_F32, F32_F16, F16_F32, BF16_F16, F16_BF16 = (
    tl.constexpr(int(code)) for code in list(CopyCode)[4:]
)
BOX_16, RUN_16 = tl.constexpr(launch_table.BOX_16), tl.constexpr(launch_table.RUN_16)
COLUMNS = tl.constexpr(SHAPE_COLUMNS)


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


@triton.jit  # type: ignore[untyped-decorator]
def _addresses(address, o_elem, p_shape, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the addresses of a box's elements, at the source (0) or the destination (1)."""
    inner = tl.load(p_shape).to(tl.uint32)
    i_row = o_elem.to(tl.uint32) // inner
    i_col = o_elem.to(tl.uint32) - i_row * inner
    step, gap = tl.load(p_shape + 1 + SIDE), tl.load(p_shape + 3 + SIDE)
    return address + i_row.to(tl.int64) * gap + i_col.to(tl.int64) * step


@triton.jit
def _copy_vectors(src, dst, m_vec):  # type: ignore[no-untyped-def]
    """Copy 16 bytes from each source to each destination address, with one access each."""
    # The alignment hints make single accesses. Hints on an argument are lost when this function
    # is inlined; hints on values computed here stay.
    o_word = tl.arange(0, 4)[None, :]
    p_src = tl.multiple_of(src.to(tl.pointer_type(tl.uint32)), 16)[:, None] + o_word
    p_dst = tl.multiple_of(dst.to(tl.pointer_type(tl.uint32)), 16)[:, None] + o_word
    tl.store(p_dst, tl.load(p_src, mask=m_vec[:, None]), mask=m_vec[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _copy_vector_box(src, dst, count, p_shape, VECTORS: tl.constexpr):  # type: ignore[no-untyped-def]
    o_vec = tl.arange(0, VECTORS)
    b_src, b_dst = _addresses(src, o_vec, p_shape, 0), _addresses(dst, o_vec, p_shape, 1)
    _copy_vectors(b_src, b_dst, o_vec < count)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_element_box(src_0, dst_0, count, p_shape, code, ELEMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy or cast the elements of a box."""
    o_elem = tl.arange(0, ELEMS)
    m_elem = o_elem < count
    src, dst = _addresses(src_0, o_elem, p_shape, 0), _addresses(dst_0, o_elem, p_shape, 1)
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


@triton.jit  # type: ignore[untyped-decorator]
def copy_pieces_kernel(  # type: ignore[no-untyped-def]
    tiles, shapes, VECTORS: tl.constexpr, ELEMS: tl.constexpr
):
    """Copy or cast one tile."""
    p_tile = tiles + tl.program_id(0).to(tl.int64) * 3
    src, dst, work = tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2)
    count, code = (work & 0xFFFF).to(tl.int32), ((work >> 16) & 0xFFFF).to(tl.int32)
    p_shape = shapes + (work >> 32) * COLUMNS
    if code == RUN_16:
        o_vec = tl.arange(0, VECTORS)
        o_byte = o_vec.to(tl.int64) * 16
        _copy_vectors(src + o_byte, dst + o_byte, o_vec < count)
    elif code == BOX_16:
        _copy_vector_box(src, dst, count, p_shape, VECTORS)
    else:
        _copy_element_box(src, dst, count, p_shape, code, ELEMS)


@dataclass(frozen=True, slots=True, eq=False)
class DevicePieces:
    """A piece table on a device, ready for repeated launches."""

    table: torch.Tensor
    """Tiles, followed by shapes."""
    tiles: int
    vectors: int

    @classmethod
    def of(
        cls, table: PieceTable, device: torch.device, vectors: int | None = None
    ) -> "DevicePieces":
        """Upload the table on the current stream of ``device``, without waiting for it.

        The upload is one asynchronous copy from pinned memory, which torch's allocator keeps until
        the stream has passed the copy.
        """
        cut = LaunchTable.of(table.rows, vectors)
        begin = _shapes_begin(len(cut.tiles))
        words = torch.empty(begin + cut.shapes.size, dtype=torch.int64,
                            pin_memory=device.type == "cuda")  # fmt: skip
        words.numpy()[: cut.tiles.size] = cut.tiles.ravel()
        words.numpy()[begin:] = cut.shapes.ravel()
        return cls(words.to(device, non_blocking=True), len(cut.tiles), cut.vectors)

    def copy(self) -> None:
        """Launch on the current stream of the current device, without waiting for it.

        The launch allocates, uploads and reads back nothing, so a CUDA graph may capture it. The
        first launch in a process compiles the kernel; `prepare` does that beforehand.
        """
        if self.tiles:
            copy_pieces_kernel[(self.tiles,)](
                self.table, self.table[_shapes_begin(self.tiles) :],
                VECTORS=self.vectors, ELEMS=launch_table.ELEMS,
            )  # fmt: skip


def _shapes_begin(tiles: int) -> int:
    """Return the index of the first shape word, kept 16-byte aligned.

    Triton would compile the kernel anew for another alignment.
    """
    return 3 * tiles + tiles % 2


def prepare(device: torch.device) -> None:
    """Compile what `DevicePieces.copy` launches, on the current stream of `device`."""
    memory = torch.zeros(2, 2, dtype=torch.int64, device=device)
    row = [[memory[0].data_ptr(), memory[1].data_ptr(), 16, 1, 1, CopyCode.COPY_1]]
    table = PieceTable.checked(np.array(row, np.int64))
    for vectors in launch_table.VECTORS:
        DevicePieces.of(table, device, vectors).copy()


def copy_pieces(table: PieceTable, device: torch.device) -> None:
    """Upload the table and launch on the current stream of `device`, the current device."""
    DevicePieces.of(table, device).copy()
