"""The kernels on a real GPU, and, without one, compiled for GPUs that are not here."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from kernel_arena import DTYPES, Arena, copy_elements, nan_as_one
from kernel_tables import SOURCE

from restow.kernels import Column, CopyCode, PieceTable, SlotTable, clear_slots, copy_pieces
from restow.kernels.codes import DST_BYTES, SRC_BYTES

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="NO GPU: the Triton kernels ran in the interpreter only, not on hardware",
)
CUDA = torch.device("cuda")


def mixed_table(target: Arena) -> PieceTable:
    """Rows of every code, dense and strided, of odd sizes."""
    rows: list[tuple[int, ...]] = []
    end = 0
    for code in CopyCode:
        src_unit, dst_unit = int(SRC_BYTES[code]), int(DST_BYTES[code])
        for count, stretch in ((1, 1), (63, 3), (1000, 1), (1025, 2), (0, 1)):
            src = SOURCE.address + 8 * len(rows)
            rows.append(
                (src, target.address + end, count, stretch * src_unit, stretch * dst_unit, code)
            )
            end += -(-count * stretch * dst_unit // 8) * 8 + 8
    return PieceTable.checked(np.array(rows, dtype=np.int64))


@needs_gpu
def test_every_code_in_one_launch_on_the_gpu() -> None:
    target = Arena(1 << 17)
    table = mixed_table(target)
    source_there = torch.from_numpy(SOURCE.bytes.copy()).to(CUDA)
    target_there = torch.from_numpy(target.memory.copy()).to(CUDA)
    rows = table.rows.copy()
    rows[:, Column.SRC_ADDRESS] += source_there.data_ptr() - SOURCE.address
    rows[:, Column.DST_ADDRESS] += target_there.data_ptr() - target.memory.ctypes.data
    copy_pieces(PieceTable.checked(rows), CUDA)
    got = target.twin()
    got.memory[:] = target_there.cpu().numpy()
    copy_elements(table)
    nan_as_one(table)
    shift = table.rows.copy()
    shift[:, Column.DST_ADDRESS] += got.address - target.address
    nan_as_one(PieceTable.checked(shift))
    assert np.array_equal(got.memory, target.memory)
    assert len(DTYPES) == len(CopyCode)


@needs_gpu
def test_a_captured_clear_follows_its_mask() -> None:
    pages = torch.full((8, 4096), 0xA5, dtype=torch.uint8, device=CUDA)
    rows = np.array([(pages.data_ptr(), 4096, 16, 1000), (pages.data_ptr(), 4096, 2000, 24)])
    regions = SlotTable.checked(rows.astype(np.int64), CUDA)
    slots = torch.tensor([5, 2, -1], device=CUDA)
    mask = torch.zeros(3, dtype=torch.bool, device=CUDA)
    clear_slots(regions, slots, mask)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        clear_slots(regions, slots, mask)
    slots.copy_(torch.tensor([3, 6, -1]))
    mask.copy_(torch.tensor([True, False, False]))
    graph.replay()
    want = torch.full((8, 4096), 0xA5, dtype=torch.uint8)
    want[3, 16:1016] = want[3, 2000:2024] = 0
    assert torch.equal(pages.cpu(), want)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from restow.kernels import clear, copy, project

target = GPUTarget("cuda", 90, 32)
pieces = ASTSource(
    copy.copy_pieces_kernel,
    {"rows": "*i64", "tiles": "*i64", "BLOCK": "constexpr"},
    {"BLOCK": copy.BLOCK},
)
assert triton.compile(pieces, target=target).asm["cubin"]
blocks = {"BLOCK_T": 16, "BLOCK_C": project.BLOCK_C, "BLOCK_H": project.BLOCK_H}
signature = {"rows": "*i64", "tiles": "*i64"} | dict.fromkeys(blocks, "constexpr")
windows = ASTSource(project.project_kernel, signature, blocks)
assert triton.compile(windows, target=target).asm["cubin"]
for slots in ("*i32", "*i64"):
    signature = {"rows": "*i64", "tiles": "*i64", "slots": slots, "mask": "*u8", "n_tiles": "i32"}
    fixed = {"UNIT_BYTES": 8, "UNIT": clear.UNIT_TYPES[8], "BLOCK": clear.TILE_UNITS}
    signature |= dict.fromkeys(fixed, "constexpr")
    source = ASTSource(clear.clear_slots_kernel, signature, fixed)
    assert triton.compile(source, target=target).asm["cubin"]
"""


def test_kernels_compile_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = COMPILE
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
