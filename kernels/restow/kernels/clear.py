"""Zero the recurrent fields of masked slots in one launch on a GPU, for an engine that reuses them.

rows   int64 [n, 5]             the rows of a SlotTable, on the device
tiles  int64 [t, 2]             its tiles on the device: range, and first unit in the range
slots  int64 or int32 [g, s]    page ids; ids of slots that are not cleared are never used
mask   any integers [s]         OF_ZERO says whether slots with zero or with nonzero are cleared

One program zeroes one tile of one slot. Shapes are static, and nothing is allocated or read back,
so a CUDA graph may capture the launch and replay it with other slots and another mask.
"""

import torch
import triton
import triton.language as tl

from restow.kernels.tables import TILE_UNITS, SlotColumn, SlotTable

COLUMNS = tl.constexpr(len(SlotColumn))
UNIT_TYPES = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


@triton.jit  # type: ignore[untyped-decorator]
def clear_slots_kernel(  # type: ignore[no-untyped-def]
    rows, tiles, slots, mask, n_tiles, n_slots, first_page, OF_ZERO: tl.constexpr,
    UNIT_BYTES: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zero one tile of one slot."""
    i_program = tl.program_id(0).to(tl.int64)
    i_slot, i_tile = i_program // n_tiles, i_program % n_tiles
    p_row = rows + tl.load(tiles + i_tile * 2) * COLUMNS
    i_page = tl.load(slots + tl.load(p_row + 4) * n_slots + i_slot).to(tl.int64)
    if ((tl.load(mask + i_slot) == 0) == OF_ZERO) & (i_page >= first_page):
        o_byte = (tl.load(tiles + i_tile * 2 + 1) + tl.arange(0, BLOCK)) * UNIT_BYTES  # [BLOCK]
        page = tl.load(p_row) + i_page * tl.load(p_row + 1)
        p_unit = (page + tl.load(p_row + 2) + o_byte).to(tl.pointer_type(UNIT))
        m_unit = o_byte < tl.load(p_row + 3)
        tl.store(p_unit, tl.zeros([BLOCK], UNIT), mask=m_unit)


def clear_slots(
    regions: SlotTable, slots: torch.Tensor, mask: torch.Tensor, of_zero: bool, first_page: int
) -> None:
    """Launch the clearing on the current stream of the table's device."""
    lists, n_tiles = regions.lists(slots), len(regions.tiles)
    n_slots = lists.shape[1]
    if not n_tiles or not n_slots:
        return
    flags = mask.view(torch.uint8) if mask.dtype is torch.bool else mask
    clear_slots_kernel[(n_tiles * n_slots,)](
        regions.rows, regions.tiles, lists, flags, n_tiles, n_slots, first_page, OF_ZERO=of_zero,
        UNIT_BYTES=regions.unit_bytes, UNIT=UNIT_TYPES[regions.unit_bytes], BLOCK=TILE_UNITS,
    )  # fmt: skip
