"""Compute the products of all rows of a project table in one launch on a GPU (PROJECT).

rows   int64 [n, 12]  the rows of a ProjectTable, on the device
tiles  int64 [t, 2]   row and first channel of every tile of BLOCK_C channels, on the device

One program computes the products of one tile, for all taps (at most BLOCK_T). Reading the weights
limits its speed, so it multiplies in float32 whatever the type is. It sums in float32 as cuBLAS
does, but in another order: a window equals P's to the last bit only if the engine's own product
sums in this order too.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from restow.kernels.copy import bf16_bits, from_bf16_bits
from restow.kernels.tables import FloatCode, ProjectColumn, ProjectTable, tiles

BLOCK_C = 32
BLOCK_H = 16
WARPS = 8
"""With these, no thread needs more than 80 registers, and none is spilled to memory."""
LEAST_T = 16  # smallest size that a Triton matrix product accepts

FLOAT32, BFLOAT16 = (tl.constexpr(int(c)) for c in (FloatCode.FLOAT32, FloatCode.BFLOAT16))
COLUMNS = tl.constexpr(len(ProjectColumn))


@triton.jit
def _load_float(address, mask, code):  # type: ignore[no-untyped-def]
    if code == FLOAT32:
        value = tl.load(address.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    elif code == BFLOAT16:
        bits = tl.load(address.to(tl.pointer_type(tl.uint16)), mask=mask, other=0)
        value = from_bf16_bits(bits)
    else:
        half = tl.load(address.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0)
        value = half.to(tl.float32)
    return value


@triton.jit
def _rounded(value, code):  # type: ignore[no-untyped-def]
    """Round float32 values to the type of `code`, and return them as float32."""
    if code == BFLOAT16:
        value = from_bf16_bits(bf16_bits(value))
    elif code != FLOAT32:
        value = value.to(tl.float16).to(tl.float32)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def project_kernel(  # type: ignore[no-untyped-def]
    rows, tiles, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Compute the products of one tile."""
    i_tile = tl.program_id(0).to(tl.int64)
    p_row = rows + tl.load(tiles + i_tile * 2) * COLUMNS
    o_tap = tl.arange(0, BLOCK_T).to(tl.int64)  # [BLOCK_T]
    o_channel = tl.load(tiles + i_tile * 2 + 1) + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    taps, hidden, channels = tl.load(p_row + 2), tl.load(p_row + 3), tl.load(p_row + 6)
    code, dst_code = tl.load(p_row + 10), tl.load(p_row + 11)
    item = tl.where(code == FLOAT32, 4, 2)
    p_input = tl.load(p_row) + o_tap * tl.load(p_row + 1)
    p_weight = tl.load(p_row + 4) + o_channel * tl.load(p_row + 5)
    m_tap, m_channel = o_tap < taps, o_channel < channels

    b_sum = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for first in range(0, hidden, BLOCK_H):
        o_hidden = first + tl.arange(0, BLOCK_H)  # [BLOCK_H]
        m_hidden = o_hidden < hidden
        b_input = _load_float(
            p_input[:, None] + (o_hidden * item)[None, :], m_tap[:, None] & m_hidden[None, :], code
        )
        b_weight = _load_float(
            p_weight[None, :] + (o_hidden * item)[:, None],
            m_channel[None, :] & m_hidden[:, None],
            code,
        )
        b_sum += tl.dot(b_input, b_weight, input_precision="ieee")

    # Round as the engine's product is rounded before it is stored as another type.
    b_sum = _rounded(b_sum, code)
    p_target = tl.load(p_row + 7) + (o_channel * tl.load(p_row + 8))[None, :]
    p_target += (o_tap * tl.load(p_row + 9))[:, None]
    mask = m_tap[:, None] & m_channel[None, :]
    if dst_code == FLOAT32:
        tl.store(p_target.to(tl.pointer_type(tl.float32)), b_sum, mask=mask)
    elif dst_code == BFLOAT16:
        tl.store(p_target.to(tl.pointer_type(tl.uint16)), bf16_bits(b_sum), mask=mask)
    else:
        tl.store(p_target.to(tl.pointer_type(tl.float16)), b_sum.to(tl.float16), mask=mask)


def project_windows(table: ProjectTable, device: torch.device) -> None:
    """Launch the products on the current stream of `device`, without waiting for them."""
    rows = table.rows
    tile_rows = tiles(rows[:, ProjectColumn.CHANNELS], BLOCK_C)
    if not len(tile_rows):
        return
    words = torch.from_numpy(np.concatenate([rows.ravel(), tile_rows.ravel()]))
    if device.type == "cuda":
        words = words.pin_memory().to(device, non_blocking=True)
    most = int(rows[:, ProjectColumn.TAPS].max())
    project_kernel[(len(tile_rows),)](
        words, words[rows.size :],
        BLOCK_T=max(LEAST_T, triton.next_power_of_2(most)), BLOCK_C=BLOCK_C, BLOCK_H=BLOCK_H,
        num_warps=WARPS,
    )  # fmt: skip


def prepare(device: torch.device) -> None:
    """Compile what `project_windows` launches, on the current stream of ``device``."""
    memory = torch.zeros(3, 16, dtype=torch.float32, device=device)
    source, weight, target = (row.data_ptr() for row in memory)
    row = [source, 4, 1, 1, weight, 4, 1, target, 4, 4, FloatCode.FLOAT32, FloatCode.FLOAT32]
    project_windows(ProjectTable.checked(np.array([row], np.int64)), device)
