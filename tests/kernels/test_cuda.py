"""The kernels on a real GPU, and, without one, compiled for GPUs that are not here."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from kernel_arena import SOURCE, Arena, nan_as_one

from restow.kernels import (
    CopyCode,
    PieceColumn,
    PieceTable,
    SlotTable,
    clear_slots,
    copy_pieces,
    prepare_copies,
    reference,
)
from restow.kernels.codes import DST_BYTES, SRC_BYTES
from restow.kernels.copy import DevicePieces, copy_pieces_kernel
from restow.kernels.launch_table import VECTORS

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
    prepare_copies(CUDA)
    (compiled, *_) = copy_pieces_kernel.device_caches[torch.cuda.current_device()]
    before = set(compiled)
    assert len(before) == len(VECTORS)
    for count in (1, 2, 3):  # tables that end at any of a table's alignments
        target = torch.zeros(4096, dtype=torch.uint8, device=CUDA)
        rows = np.ones((count, len(PieceColumn)), dtype=np.int64)
        rows[:, 0], rows[:, 1] = target.data_ptr(), target.data_ptr() + 64 * np.arange(1, 1 + count)
        rows[:, PieceColumn.COUNT], rows[:, PieceColumn.CODE] = 7, CopyCode.COPY_1
        for vectors in VECTORS:
            DevicePieces.of(PieceTable.checked(rows), CUDA, vectors).copy()
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
    copy_pieces(PieceTable.checked(rows), CUDA)
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
@pytest.mark.parametrize("vectors", VECTORS)
def test_runs_at_all_alignments_in_one_launch_on_the_gpu(vectors: int) -> None:
    sizes = (1, 15, 16, 17, 511, 513, 4095, 4096, 4097, 20_000)
    src, dst, length = (part.ravel() for part in np.meshgrid(range(16), range(16), sizes))
    order = np.random.default_rng(0).permutation(len(src))
    source = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8, device=CUDA)
    target = torch.full((len(src) << 15,), 0xA5, dtype=torch.uint8, device=CUDA)
    at = (np.arange(len(src)) << 15) + 64 + dst
    rows = np.ones((len(src), len(PieceColumn)), dtype=np.int64)
    rows[:, 0], rows[:, 1] = source.data_ptr() + src, target.data_ptr() + at
    rows[:, PieceColumn.COUNT], rows[:, PieceColumn.CODE] = length, CopyCode.COPY_1
    DevicePieces.of(PieceTable.checked(rows[order]), CUDA, vectors).copy()
    source, got = source.cpu(), target.cpu()
    want = torch.full_like(got, 0xA5)
    for a, b, n in zip(src.tolist(), at.tolist(), length.tolist(), strict=True):
        want[b : b + n] = source[a : a + n]
    assert torch.equal(got, want)


@needs_gpu
def test_a_captured_copy_copies_what_is_there_at_its_replay() -> None:
    pool = torch.zeros(64, 4096, dtype=torch.uint8, device=CUDA)
    staging = torch.zeros(16, 4096, dtype=torch.uint8, device=CUDA)
    page = np.random.default_rng(0).permutation(64)[:16]
    rows = np.ones((16, len(PieceColumn)), dtype=np.int64)
    rows[:, 0] = pool.data_ptr() + page * 4096
    rows[:, 1] = staging.data_ptr() + np.arange(16) * 4096
    rows[:, PieceColumn.COUNT], rows[:, PieceColumn.CODE] = 4096, CopyCode.COPY_1
    pieces = DevicePieces.of(PieceTable.checked(rows), CUDA)
    pieces.copy()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pieces.copy()
    pool.random_(0, 256)
    graph.replay()
    assert torch.equal(staging.cpu(), pool.cpu()[page.tolist()])


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
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from restow.kernels import clear, copy, launch_table, project

target = GPUTarget("cuda", 90, 32)
for vectors in launch_table.VECTORS:
    fixed = {"VECTORS": vectors, "ELEMS": launch_table.ELEMS}
    signature = {"tiles": "*i64", "shapes": "*i64"} | dict.fromkeys(fixed, "constexpr")
    source = ASTSource(copy.copy_pieces_kernel, signature, fixed)
    compiled = triton.compile(source, target=target)
    assert compiled.asm["cubin"]
    wide = re.findall(r"(ld|st)\\.global\\.(?:v4\\.b32|v2\\.b64)", compiled.asm["ptx"])
    each = vectors // (32 * compiled.metadata.num_warps)  # vectors of one thread
    # A run, and a box: all of a thread's loads before its first store, and no narrower ones.
    assert wide == (["ld"] * each + ["st"] * each) * 2, wide
blocks = {"BLOCK_T": 16, "BLOCK_C": project.BLOCK_C, "BLOCK_H": project.BLOCK_H}
signature = {"rows": "*i64", "tiles": "*i64"} | dict.fromkeys(blocks, "constexpr")
windows = ASTSource(project.project_kernel, signature, blocks)
assert triton.compile(windows, target=target).asm["cubin"]
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
