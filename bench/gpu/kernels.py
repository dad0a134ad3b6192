"""The Triton kernels on a GPU, beside torch's copies and the device's own copy of as many bytes.

The rows of a case are on the device already, and CUDA events time the launch alone. The note says
what a handoff costs the host: binding its tokens and pages, and beginning the launch. Every case is
checked byte by byte before it is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from bench.gpu.device import on_gpu
from bench.model_sizes import real_models, tiny_hybrid
from bench.report import Put, Row, compared
from restow.agents.binding.copies import RowCopies
from restow.agents.binding.operands import DST, SRC, in_order, paged
from restow.agents.binding.pages import Blocks, RegionTable, TokenRange, staged_bytes
from restow.agents.copying.copier import piece_table
from restow.agents.copying.device_copies import SRC_SIDE, DeviceLaunch, DeviceTables
from restow.broker.families import ConvLayout, EngineSettings, build_layout
from restow.broker.layout import Layout, RankLayout
from restow.broker.planner import Strategy, compile_programs, make_plan
from restow.broker.planner.program import GATHER_IN_ORDER, Column, Program
from restow.kernels import (
    CopyCode,
    PieceTable,
    RowCall,
    RowTable,
    SidePages,
    TokenList,
    copy_pieces,
    device_rows,
)
from restow.kernels.codes import Int64s

SUITE = "gpu-kernels"
DEVICE, TORCH = "the device's own copy", "torch"
HOST_CALLS = 9
SIZES = tuple(256 << shift for shift in range(0, 13, 2))  # 256 B to 1 MiB
TOTAL_BYTES = 512 << 20  # far more than the L2 cache of a GPU holds
MAX_PIECES = 1 << 20
MODEL, TOKENS = "nemotron3-nano-30b", 4096
Call = Callable[[], object]


@dataclass(frozen=True)
class DeviceCase:
    """Copies between two tensors, and a call of torch that makes the same copy, if any."""

    name: str
    src: torch.Tensor
    dst: torch.Tensor
    pieces: PieceTable
    """What is copied, for the host to check."""
    bind: Callable[[], DeviceLaunch]
    """Binds what a handoff names to rows that are on the device."""
    torch_call: Call | None = None


def piece_cases(device: torch.device, size: int, total: int) -> Iterator[DeviceCase]:
    """Yield cases of pieces of one size, scattered over pools, between pools and staging."""
    n = min(total // size, MAX_PIECES)
    rng = np.random.default_rng(size)
    pool, other = (_noise(device, 2 * n, size) for _ in range(2))
    staging = _noise(device, n, size)
    src_row, dst_row = rng.permutation(2 * n)[:n], rng.permutation(2 * n)[:n]
    src, dst = torch.from_numpy(src_row).to(device), torch.from_numpy(dst_row).to(device)
    label = f"{size} B" if size < 1024 else f"{size >> 10} KiB"
    row = np.arange(n)

    def case(name: str, *ends: tuple[torch.Tensor, Int64s], call: Call) -> DeviceCase:
        (source, src_rows), (target, dst_rows) = ends
        pieces = _pieces(source, src_rows, target, dst_rows)
        bind = _bind_pieces(source, src_rows, target, dst_rows)
        return DeviceCase(f"{name} {n} x {label}", source, target, pieces, bind, call)

    yield case("gather", (pool, src_row), (staging, row),
               call=lambda: torch.index_select(pool, 0, src, out=staging))  # fmt: skip
    yield case("scatter", (staging, row), (other, dst_row),
               call=lambda: other.index_copy_(0, dst, staging))  # fmt: skip
    yield case("page to page", (pool, src_row), (other, dst_row),
               call=lambda: other.index_copy_(0, dst, pool[src]))  # fmt: skip


def state_cases(
    device: torch.device, source: Layout, target: Layout, tokens: int
) -> Iterator[DeviceCase]:
    """Yield what the first rank of a D needs of one of P's ranks."""
    program = next(iter(compile_programs(make_plan(source, target), Strategy.PACK)))
    rows = program.rows(GATHER_IN_ORDER)
    src_rank = int(rows[0, Column.SRC_RANK])
    rows = rows[rows[:, Column.SRC_RANK] == src_rank]
    span = TokenRange(0, tokens)
    staging = _noise(device, 1, -(-staged_bytes(rows, program.group_pairs, span) // 16) * 16)
    p_rank = next(rank for rank in source.ranks if rank.rank == src_rank)
    d_rank = next(rank for rank in target.ranks if rank.rank == program.dst_rank)
    name = f"{source.model.name}, {tokens} tokens, P rank {src_rank} to D rank {program.dst_rank}"
    run = in_order(rows, program.group_pairs, span, staging.data_ptr())
    for verb, layout, side in (("gather", p_rank, SRC), ("scatter", d_rank, DST)):
        memory = _RankPages(device, layout, program, span)
        pages = paged(memory.table, side, memory.blocks)
        operands = (pages, run) if verb == "gather" else (run, pages)
        part = RowCopies((program.program_id, verb), rows, program.group_pairs, *operands, span)
        ends = (memory.data, staging) if verb == "gather" else (staging, memory.data)
        yield DeviceCase(
            f"{verb} {name}", *ends, piece_table(part.bind()), _bind_part(part, device)
        )


def _bind_part(part: RowCopies, device: torch.device) -> Callable[[], DeviceLaunch]:
    tables = DeviceTables(device, device_rows)

    def bind() -> DeviceLaunch:
        launch = tables.bind([part])
        if launch is None:
            raise RuntimeError("a program without rows")
        return launch

    return bind


def run(put: Put, repeats: int) -> None:
    """Measure every case on the first GPU, or rehearse. Raises `RuntimeError` as `on_gpu` does."""
    if on_gpu():
        device, sizes, total_bytes = torch.device("cuda"), SIZES, TOTAL_BYTES
        states = state_cases(device, *_layouts(), TOKENS)
    else:
        device, sizes, total_bytes = torch.device("cpu"), (256, 4096), 64 << 10
        states = state_cases(device, tiny_hybrid(1), tiny_hybrid(2), 64)
    for cases in (states, *(piece_cases(device, size, total_bytes) for size in sizes)):
        for case in cases:
            for row in _measured(case, device, repeats):
                put(row)


def _layouts() -> tuple[Layout, Layout]:
    """Return a P (TP 2, SD, pages of 16) and a D (TP 4, DS, pages of 64)."""
    spec = real_models()[MODEL]
    return (
        build_layout(spec, EngineSettings(tp=2, page_tokens=16, conv_layout=ConvLayout.SD)),
        build_layout(spec, EngineSettings(tp=4, page_tokens=64, conv_layout=ConvLayout.DS)),
    )


def _measured(case: DeviceCase, device: torch.device, repeats: int) -> Iterator[Row]:
    want = _by_the_host(case)
    launch = case.bind()
    launch.begin()
    if not torch.equal(case.dst.cpu(), want):
        raise RuntimeError(f"{case.name}: the kernel wrote wrong bytes")
    size_bytes = case.pieces.bytes_written
    plain, target = (_noise(device, 1, -(-size_bytes // 8) * 8) for _ in range(2))
    calls: dict[str, Call] = {"ours": launch.begin, DEVICE: lambda: target.copy_(plain)}
    if case.torch_call is not None:
        calls[TORCH] = case.torch_call
    seconds = _timed(calls, device, repeats)
    host_s = []
    for _ in range(HOST_CALLS):
        begun_s = time.perf_counter()
        case.bind().begin()
        host_s.append(time.perf_counter() - begun_s)
        _wait(device)
    note = f"host {statistics.median(host_s) * 1e3:.2f} ms, {launch.call.words.nbytes} B uploaded"
    ours = seconds.pop("ours")
    for reference, theirs in seconds.items():
        yield compared(SUITE, case.name, ours, reference, theirs, size_bytes=size_bytes, note=note)


def _timed(calls: dict[str, Call], device: torch.device, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every call, taken in turns; on a GPU between two events."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(-3, repeats):  # three to warm up
        for name, call in calls.items():
            value = _seconds(call, device)
            if repeat >= 0:
                seconds[name].append(value)
    return seconds


def _seconds(call: Call, device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _noise(device: torch.device, rows: int, length: int) -> torch.Tensor:
    """Make rows of ``length`` random bytes, as int64."""
    return torch.randint(-(2**62), 2**62, (rows, length // 8), device=device)


def _pieces(src: torch.Tensor, src_rows: Int64s, dst: torch.Tensor, dst_rows: Int64s) -> PieceTable:
    length = src.shape[1] * 8
    rows = np.ones((len(src_rows), 6), dtype=np.int64)
    rows[:, 0], rows[:, 1] = src.data_ptr() + src_rows * length, dst.data_ptr() + dst_rows * length
    rows[:, 2], rows[:, 5] = length, CopyCode.COPY_1
    return PieceTable.checked(rows)


def _bind_pieces(
    src: torch.Tensor, src_rows: Int64s, dst: torch.Tensor, dst_rows: Int64s
) -> Callable[[], DeviceLaunch]:
    """Return the copies as a row whose tokens are the pieces, in pages of one token."""
    length = src.shape[1] * 8
    row = [*(0, length, 0, 1), *(0, length, 0, 1), length, CopyCode.COPY_1, 0]
    table = RowTable.checked(np.array([row], np.int64))
    rows = device_rows(table, src.device)

    def bind() -> DeviceLaunch:
        source, target = (
            SidePages(1, pages, 0, tensor.data_ptr())
            for tensor, pages in ((src, src_rows), (dst, dst_rows))
        )
        call = RowCall.of(table, [TokenList(len(src_rows), source, target)], None)
        return DeviceLaunch(rows, call, SRC_SIDE)

    return bind


class _RankPages:
    """A rank's regions in one tensor, and blocks in random order."""

    def __init__(
        self, device: torch.device, layout: RankLayout, program: Program, tokens: TokenRange
    ) -> None:
        rng = np.random.default_rng(layout.rank)
        ids: dict[str, Int64s] = {}
        counts = []
        for region in layout.regions:
            needed = -(-tokens.stop // region.page_tokens) if region.page_tokens else 1
            needed = -(-needed // region.pages_per_block)
            counts.append((2 * needed + 1) * region.pages_per_block)
            if region.group not in ids or len(ids[region.group]) < needed:
                ids[region.group] = rng.permutation(2 * needed)[:needed] + 1
        strides = [region.page_stride_bytes for region in layout.regions]
        sizes = [-(-n * stride // 256) * 256 for n, stride in zip(counts, strides, strict=True)]
        self.data = _noise(device, 1, sum(sizes))
        begins = np.cumsum([0, *sizes[:-1]]) + self.data.data_ptr()
        self.table = RegionTable(begins, np.array(strides, np.int64), np.array(counts, np.int64))
        self.blocks = Blocks(ids)


def _by_the_host(case: DeviceCase) -> torch.Tensor:
    """Compute on the host what the destination must hold after the copy."""
    src, dst = case.src.cpu().clone(), case.dst.cpu().clone()
    rows = case.pieces.rows.copy()
    rows[:, 0] += src.data_ptr() - case.src.data_ptr()
    rows[:, 1] += dst.data_ptr() - case.dst.data_ptr()
    copy_pieces(PieceTable.checked(rows))
    return dst
