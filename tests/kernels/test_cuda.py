"""The kernels on a real GPU, and, without one, compiled for GPUs that are not here."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from kernel_arena import SOURCE, Arena, nan_as_one, rows_of_pieces

from restow.kernels import (
    CopyCode,
    PieceColumn,
    PieceTable,
    RowCall,
    RowColumn,
    RowTable,
    SidePages,
    SlotTable,
    TokenList,
    clear_slots,
    device_rows,
    prepare_kernels,
    reference,
)
from restow.kernels.codes import DST_BYTES, SRC_BYTES
from restow.kernels.copy import copy_rows_kernel

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="NO GPU: the Triton kernels ran in the interpreter only, not on hardware",
)
CUDA = torch.device("cuda")


def mixed_table(target: Arena) -> PieceTable:
    """Return a table with rows of every code, dense and strided, of odd sizes."""
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
def test_no_copy_compiles_after_it_was_prepared() -> None:
    prepare_kernels(CUDA)
    (compiled, *_) = copy_rows_kernel.device_caches[torch.cuda.current_device()]
    before = set(compiled)
    assert len(before) == 4  # rows of vectors alone or not, staged at the source or not
    for count in (1, 2, 3, 16):
        target = torch.zeros(4096, dtype=torch.uint8, device=CUDA)
        rows = np.zeros((count, len(RowColumn)), dtype=np.int64)
        rows[:, RowColumn.SRC_ADDRESS] = target.data_ptr()
        rows[:, RowColumn.DST_ADDRESS] = target.data_ptr() + 64 * np.arange(1, 1 + count)
        rows[:, RowColumn.COUNT], rows[:, RowColumn.CODE] = 7 if count % 2 else 16, CopyCode.COPY_1
        rows[:, [RowColumn.SRC_STEP_BYTES, RowColumn.DST_STEP_BYTES]] = 1
        table = RowTable.checked(rows)
        call = RowCall.of(table, [TokenList(1, SidePages(), SidePages())], None)
        for staged in (0, 1):
            device_rows(table, CUDA).launch(call, staged)
    torch.cuda.synchronize()
    assert set(compiled) == before


@needs_gpu
def test_every_code_in_one_launch_on_the_gpu() -> None:
    target = Arena(1 << 17)
    table = mixed_table(target)
    source_there = torch.from_numpy(SOURCE.bytes.copy()).to(CUDA)
    target_there = torch.from_numpy(target.memory.copy()).to(CUDA)
    rows = table.rows.copy()
    rows[:, PieceColumn.SRC_ADDRESS] += source_there.data_ptr() - SOURCE.address
    rows[:, PieceColumn.DST_ADDRESS] += target_there.data_ptr() - target.memory.ctypes.data
    made, call = rows_of_pieces(PieceTable.checked(rows))
    device_rows(made, CUDA).launch(call, 0)
    got = target.twin()
    got.memory[:] = target_there.cpu().numpy()
    reference.copy_pieces(table)
    nan_as_one(table)
    shift = table.rows.copy()
    shift[:, PieceColumn.DST_ADDRESS] += got.address - target.address
    nan_as_one(PieceTable.checked(shift))
    assert np.array_equal(got.memory, target.memory)
    assert len(reference.COPIED) == len(CopyCode)


@needs_gpu
@pytest.mark.parametrize("length", [16, 48, 72, 256, 4096])
@pytest.mark.parametrize("first", [0, 5])
def test_tokens_of_pages_are_gathered_and_scattered_on_the_gpu(length: int, first: int) -> None:
    tokens, rng = 500, np.random.default_rng(0)
    ids = [rng.permutation(200)[: -(-(first + tokens) // size)] for size in (16, 64)]
    pools = [torch.zeros(200, size, length, dtype=torch.uint8, device=CUDA) for size in (16, 64)]
    run = torch.zeros(tokens + 1, length, dtype=torch.uint8, device=CUDA)
    pools[0].random_(0, 256)
    sides = [SidePages(size, page, first) for size, page in zip((16, 64), ids, strict=True)]
    ends = [
        [pool.data_ptr(), size * length, length, 1]
        for pool, size in zip(pools, (16, 64), strict=True)
    ]
    staged = SidePages(base_address=run.data_ptr() // 16 * 16)
    of_run = [run.data_ptr() % 16, 0, length, 1]
    for rows, lists, side in (
        ([*ends[0], *of_run], TokenList(tokens, sides[0], staged), 1),
        ([*of_run, *ends[1]], TokenList(tokens, staged, sides[1]), 0),
    ):
        table = RowTable.checked(np.array([[*rows, length, CopyCode.COPY_1, 0]], np.int64))
        device_rows(table, CUDA).launch(RowCall.of(table, [lists], None), side)
    source, target = (pool.cpu() for pool in pools)
    want = torch.zeros_like(target)
    for token in range(first, first + tokens):
        want[ids[1][token // 64], token % 64] = source[ids[0][token // 16], token % 16]
    assert torch.equal(target, want)


@needs_gpu
def test_a_captured_clear_follows_its_mask() -> None:
    pages = torch.full((8, 4096), 0xA5, dtype=torch.uint8, device=CUDA)
    base = pages.data_ptr()
    rows = np.array([(base, 4096, 16, 1000, 0), (base, 4096, 2000, 24, 0)])
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
import glob, os, re, subprocess, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from restow.kernels import clear, copy, project, row_table

TOOL = glob.glob(os.path.dirname(triton.__file__) + "/backends/nvidia/bin/cuobjdump")

def resources(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [TOOL[0], "--dump-resource-usage", file.name], capture_output=True, text=True
        ).stdout
    return [int(n) for n in re.search(r"REG:(\\d+) STACK:(\\d+)", said).groups()]

signature = {"rows": "*i64", "lists": "*i64", "words": "*i32", "n_rows": "i32", "halvings": "i32"}
aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
nvidia = [GPUTarget("cuda", arch, 32) for arch in (80, 90, 100)]
for target in (*nvidia, GPUTarget("hip", "gfx942", 64)):
    for staged in (0, 1):
        for mixed in (False, True):
            fixed = {"STAGED": staged, "MIXED": mixed, "TILE": row_table.TILE}
            source = ASTSource(
                copy.copy_rows_kernel, signature | dict.fromkeys(fixed, "constexpr"), fixed, aligned
            )
            made = triton.compile(source, target=target, options={"num_warps": copy.WARPS})
            each = row_table.TILE // (target.warp_size * copy.WARPS)  # vectors of one thread
            if target.backend == "hip":
                wide = re.findall(r"global_(load|store)_dwordx4", made.asm["amdgcn"])
                spilled = re.findall(r"vgpr_spill_count: +(\\d+)", made.asm["amdgcn"])
                assert set(spilled) == {"0"}, spilled
            else:
                wide = re.findall(r"(ld|st)\\.global\\.v4\\.b32", made.asm["ptx"])
                if TOOL:
                    registers, stack = resources(made.asm["cubin"])
                    assert registers <= 64 and stack == 0, (target, registers, stack)
            # Vectors are copied, all of a thread's loads before its first store, or zeroed.
            seen = "".join(word[0] for word in wide)
            assert seen.count("l") == each and seen.count("s") == 2 * each, (target, wide)
            assert "l" * each + "s" * each in seen, (target, wide)
blocks = {"BLOCK_T": 16, "BLOCK_C": project.BLOCK_C, "BLOCK_H": project.BLOCK_H}
signature = {"rows": "*i64", "tiles": "*i64"} | dict.fromkeys(blocks, "constexpr")
for target in nvidia:
    windows = ASTSource(project.project_kernel, signature, blocks)
    made = triton.compile(windows, target=target, options={"num_warps": project.WARPS})
    if TOOL:
        registers, stack = resources(made.asm["cubin"])
        assert registers <= 80 and stack == 0, (target, registers, stack)
target = GPUTarget("cuda", 90, 32)
for slots in ("*i32", "*i64"):
    signature = {"rows": "*i64", "tiles": "*i64", "slots": slots, "mask": "*u8"}
    signature |= dict.fromkeys(("n_tiles", "n_slots", "first_page"), "i32")
    fixed = {"UNIT_BYTES": 8, "UNIT": clear.UNIT_TYPES[8], "BLOCK": clear.TILE_UNITS}
    fixed["OF_ZERO"] = True
    signature |= dict.fromkeys(fixed, "constexpr")
    source = ASTSource(clear.clear_slots_kernel, signature, fixed)
    assert triton.compile(source, target=target).asm["cubin"]
"""


def test_kernels_compile_for_a_gpu_with_16_byte_accesses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True)
    if "Cannot find ptxas" in done.stderr:
        pytest.skip("NO COMPILER: this Triton has no ptxas, so 16-byte accesses were not checked")
    assert done.returncode == 0, done.stderr
