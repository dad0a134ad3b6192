"""Copies, products and hashes of this agent's memory, made by the kernels.

Bound copies and products become the kernels' tables. A `Copier` runs what is large on a thread, so
that the event loop is not blocked. There is one thread. Two were tried and took longer for pieces
of 256 bytes and 1 KiB, because each chunk of a copy waits for the interpreter's lock. Work on
device memory is a single launch, whose end the event loop polls for.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import torch
import xxhash

from restow.agents.binding.copies import Copies, Grid, RowCopies, by_pair
from restow.agents.binding.extents import Extents
from restow.agents.binding.operands import DST, in_regions
from restow.agents.binding.pages import SNAPSHOT, Blocks, RegionTable, TokenRange
from restow.agents.copying.codes import COPY_CODES, FLOAT_CODES
from restow.agents.copying.device_copies import DeviceLaunch, DeviceTables, run_grids
from restow.agents.memory.cuda import bind_thread, finished, finished_later
from restow.agents.memory.errors import CopyFailedError, ProgramInvalidError
from restow.agents.memory.regions import HOST, MemoryPlace
from restow.broker.layout import DType
from restow.broker.layout.rows import Int64s
from restow.broker.layout.values import ITEM_BYTES
from restow.broker.planner.program import Column, GroupPair, ProjectColumn
from restow.kernels import (
    PieceColumn,
    PieceTable,
    PieceTableError,
    ProjectTable,
    ProjectTableError,
    RowTable,
    copy_pieces,
    device_rows,
    prepare_kernels,
    project_windows,
)

if TYPE_CHECKING:
    from restow.kernels.copy import DeviceRows


def run_copies(copies: Copies, device: torch.device) -> None:
    """Do the copies, and return when the last copy is done.

    Raises `ProgramInvalidError` for elements that are not aligned to their size, and
    `CopyFailedError`.
    """
    if not len(copies):
        return
    with finished(device):
        if device.type == "cpu":
            copy_pieces(piece_table(copies))
        else:
            run_grids(copies, device)


def prepare(device: torch.device) -> None:
    """Compile what a `Copier` launches on ``device``, and return when it is compiled.

    Raises `CopyFailedError`.
    """
    with finished(device):
        prepare_kernels(device)


def piece_table(copies: Copies) -> PieceTable:
    """Return the copies as a piece table.

    Raises `ProgramInvalidError` for elements that are not aligned to their size.
    """
    table = np.empty((len(PieceColumn), len(copies)), np.int64)
    begin = 0
    for grid in copies.grids:
        size = grid.src_address.size
        filled = table[:, begin : begin + size].reshape(len(PieceColumn), *grid.src_address.shape)
        begin += size
        for column, values in (
            (PieceColumn.SRC_ADDRESS, grid.src_address),
            (PieceColumn.DST_ADDRESS, grid.dst_address),
            (PieceColumn.COUNT, grid.count),
            (PieceColumn.SRC_STEP_BYTES, grid.src_step_bytes),
            (PieceColumn.DST_STEP_BYTES, grid.dst_step_bytes),
            (PieceColumn.CODE, COPY_CODES[grid.src_dtype, grid.dst_dtype]),
        ):
            filled[column] = values
    try:
        return PieceTable.checked(table.T)
    except PieceTableError as error:
        raise ProgramInvalidError(f"no kernel does this copy: {error}") from None


def zero_destinations(copies: Copies, zeroes: torch.Tensor) -> None:
    """Write zeroes wherever the copies would write; ``zeroes`` are bytes on the same device.

    Raises as `run_copies` does.
    """
    parts = (part for grid in copies.grids for part in _filling(grid, zeroes))
    run_copies(Copies(tuple(parts)), zeroes.device)


def _filling(grid: Grid, zeroes: torch.Tensor) -> Iterator[Grid]:
    """Yield copies to the same destinations whose source is the contiguous ``zeroes``.

    Rows with more elements than there are zeroes are cut.
    """
    item_bytes = ITEM_BYTES[grid.dst_dtype]
    most = zeroes.numel() // int(np.max(item_bytes, initial=1))
    for first in range(0, int(np.max(grid.count, initial=0)), most):
        yield replace(
            grid,
            src_address=np.full_like(grid.dst_address, zeroes.data_ptr()),
            dst_address=grid.dst_address + first * grid.dst_step_bytes,
            count=np.clip(grid.count - first, 0, most),
            src_step_bytes=item_bytes,
            src_dtype=grid.dst_dtype,
        )


_FIRST_PAGE: Int64s = np.zeros(1, np.int64)


def bind_projections(
    projected: Int64s,
    pairs: Sequence[GroupPair],
    staged: RegionTable,
    memory: RegionTable,
    dst_blocks: Blocks,
    tokens: TokenRange,
) -> Int64s:
    """Return the kernels' project table; span ``i`` is region ``i`` of ``staged``.

    Raises `PageCountError` and `PageRangeError`.
    """
    dst_address = np.empty(len(projected), np.int64)
    for pair, index in by_pair(projected[:, ProjectColumn.GROUP_PAIR], pairs):
        region, offset = (
            projected[index[:, None], column]
            for column in (ProjectColumn.DST_REGION, ProjectColumn.DST_OFFSET_BYTES)
        )
        lines = in_regions(memory, region, offset, side=DST)
        pages = dst_blocks.listed(pair.dst, tokens)
        dst_address[index] = lines.addresses(pages, SNAPSHOT)[:, 0]
    src_address, weight_address = (
        in_regions(regions, projected[:, [region]], projected[:, [offset]]).at(_FIRST_PAGE)[:, 0]
        for regions, region, offset in (
            (staged, ProjectColumn.SPAN, ProjectColumn.SRC_OFFSET_BYTES),
            (memory, ProjectColumn.WEIGHT_REGION, ProjectColumn.WEIGHT_OFFSET_BYTES),
        )
    )
    return np.column_stack(
        [
            src_address,
            projected[:, ProjectColumn.SRC_TAP_STRIDE_BYTES],
            projected[:, ProjectColumn.TAPS],
            projected[:, ProjectColumn.HIDDEN],
            weight_address,
            projected[:, ProjectColumn.WEIGHT_STRIDE_BYTES],
            projected[:, ProjectColumn.CHANNELS],
            dst_address,
            projected[:, ProjectColumn.DST_STRIDE_BYTES],
            projected[:, ProjectColumn.DST_TAP_STRIDE_BYTES],
            FLOAT_CODES[projected[:, ProjectColumn.DTYPE]],
            FLOAT_CODES[projected[:, ProjectColumn.DST_DTYPE]],
        ]
    )


def run_projections(rows: Int64s, device: torch.device) -> None:
    """Compute the products, and return when the last product is stored.

    Raises as `launch_projections` does, and `CopyFailedError`.
    """
    with finished(device):
        launch_projections(rows, device)


def launch_projections(rows: Int64s, device: torch.device) -> None:
    """Compute the products, or queue them on a device's current stream.

    Raises `ProgramInvalidError` for numbers that are not aligned to their size.
    """
    try:
        table = ProjectTable.checked(rows)
    except ProjectTableError as error:
        raise ProgramInvalidError(f"no kernel makes this product: {error}") from None
    project_windows(table, device)


def window_rows(projected: Int64s) -> Int64s:
    """Return the windows that projected rows write, as rows to zero: a row for each tap."""
    taps = projected[:, ProjectColumn.TAPS]
    repeated = np.repeat(projected, taps, axis=0)
    tap = np.arange(len(repeated)) - np.repeat(np.cumsum(taps) - taps, taps)
    rows = np.zeros((len(repeated), len(Column)), np.int64)
    for column, name in (
        (Column.GROUP_PAIR, ProjectColumn.GROUP_PAIR),
        (Column.DST_REGION, ProjectColumn.DST_REGION),
        (Column.DST_OFFSET_BYTES, ProjectColumn.DST_OFFSET_BYTES),
        (Column.COUNT, ProjectColumn.CHANNELS),
        (Column.DST_STEP_BYTES, ProjectColumn.DST_STRIDE_BYTES),
        (Column.SRC_DTYPE, ProjectColumn.DST_DTYPE),
        (Column.DST_DTYPE, ProjectColumn.DST_DTYPE),
    ):
        rows[:, column] = repeated[:, name]
    rows[:, Column.DST_OFFSET_BYTES] += tap * repeated[:, ProjectColumn.DST_TAP_STRIDE_BYTES]
    rows[:, Column.SRC_STEP_BYTES] = rows[:, Column.DST_STEP_BYTES]
    return rows


T = TypeVar("T")

LARGE_BYTES = 1 << 20
"""A copy of this size or more could block the event loop for too long, so a thread makes it."""


ZEROES_BYTES = 2 << 20
"""Longer rows of a host are zeroed in parts."""


@dataclass(frozen=True, slots=True)
class HostCopies:
    """Copies of host memory that are bound to addresses, part by part."""

    parts: tuple[Copies, ...]
    zeroed: tuple[Copies, ...]
    """Copies whose destinations are zeroed."""


BoundCopies: TypeAlias = HostCopies | DeviceLaunch | None
"""Copies that are ready to be made."""


class Copier:
    """Runs the copies and products of a rank's agent. Belongs to one event loop."""

    def __init__(self, device: torch.device) -> None:
        """Prepare the thread, which starts with the first large copy or product.

        Memory that failed orders are cleared with is allocated now, as they may find no room.
        Raises `CopyFailedError`.
        """
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="restow-copy")
        self._tables = DeviceTables(device, self._upload)
        with finished(device):
            zeroes = torch.zeros(ZEROES_BYTES, dtype=torch.uint8, device=device)
        self._zeroes = zeroes
        """What a host copies to zero; a device only keeps it as room for what clears orders."""

    def bind(self, parts: Sequence[RowCopies]) -> BoundCopies:
        """Return the copies of all parts, none of which is without rows, with their addresses.

        Raises `PageCountError`, `PageRangeError`, and for a device `ProgramInvalidError` and
        `CopyFailedError`.
        """
        if self._device.type != "cpu":
            return self._tables.bind(parts)
        copied = tuple(part.bind() for part in parts if part.src is not None)
        return HostCopies(copied, tuple(part.bind() for part in parts if part.src is None))

    async def run(self, copies: BoundCopies) -> None:
        """Do the copies; no copy is under way after this returns, raises or is cancelled.

        Raises `ProgramInvalidError` for elements that are not aligned to their size, and
        `CopyFailedError`.
        """
        if isinstance(copies, DeviceLaunch):
            async with finished_later(self._device):
                copies.begin()
        elif copies is not None:
            for part in copies.parts:
                if part.size_bytes >= LARGE_BYTES:
                    await self.on_thread(partial(run_copies, part, self._device))
                else:
                    run_copies(part, self._device)
            for part in copies.zeroed:
                zero_destinations(part, self._zeroes)

    async def clear(self, parts: Sequence[RowCopies]) -> None:
        """Zero the destinations of a failed order's parts; ends and raises as `bind` and `run`."""
        try:
            await self.run(self.bind(parts))
        except CopyFailedError:
            if self._device.type == "cpu" or not self._zeroes.numel():
                raise
            self._zeroes = torch.empty(0)  # on a full device this makes room for the rows
            await self.run(self.bind(parts))

    def forget_program(self, program_id: str) -> None:
        """Forget what is kept of a program, whose id another program may have from now on."""
        self._tables.forget_program(program_id)

    def forget_programs(self) -> None:
        """Forget what is kept of all programs."""
        self._tables.clear()

    async def project(self, rows: Int64s) -> None:
        """Compute the products of a project table; ends and raises as `run` does."""
        if self._device.type != "cpu":
            async with finished_later(self._device):
                launch_projections(rows, self._device)
        else:
            await self.on_thread(partial(run_projections, rows, self._device))

    def _upload(self, table: RowTable, device: torch.device) -> DeviceRows:
        with finished(device):
            return device_rows(table, device)

    async def on_thread(self, work: Callable[[], T]) -> T:
        """Do the work on the thread; it has ended when this returns, raises or is cancelled."""
        return await completed(asyncio.get_running_loop().run_in_executor(self._thread, work))

    def close(self) -> None:
        """Wait for copies under way. May be called again."""
        self._thread.shutdown()


async def completed(work: asyncio.Future[T]) -> T:
    """Wait for the end of ``work`` even if the caller is cancelled; then raise the cancellation."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:  # may come more than once
            cancelled = error
    if cancelled is not None:
        raise cancelled from work.exception()
    return work.result()


DIGEST_BYTES = 16
CHUNK_BYTES = 4 << 20
"""Bytes hashed at a time, after gathering if they lie in many pieces."""
IN_PLACE_PIECES = 256
"""Pieces of a chunk up to which hashing in place is faster than gathering first."""


class Hasher:
    """Computes digests of one rank's memory and its staging."""

    def __init__(self, place: MemoryPlace, copier: Copier) -> None:
        """Hash memory at ``place``."""
        self.copier = copier
        """Runs the copies before hashing, and the hashing of much memory."""
        self._place = place
        self._gathered: torch.Tensor | None = None
        """Memory for a chunk; new memory would have to be zeroed each time."""

    async def digest(self, extents: Extents) -> bytes:
        """Return the digest of all bytes in order; ends like `run`. Raises `CopyFailedError`."""
        is_small = extents.size_bytes < LARGE_BYTES and len(extents.address) <= IN_PLACE_PIECES
        if self._place == HOST and is_small:
            return self._digest(extents)
        return await self.copier.on_thread(lambda: self._digest(extents))

    def _digest(self, extents: Extents) -> bytes:
        hasher = xxhash.xxh3_128()
        bind_thread(self._place)
        for chunk in extents.chunks(CHUNK_BYTES):
            if self._place == HOST and len(chunk.address) <= IN_PLACE_PIECES:
                for address, length in zip(
                    chunk.address.tolist(), chunk.length_bytes.tolist(), strict=True
                ):
                    hasher.update((ctypes.c_char * length).from_address(address))
            else:
                hasher.update(self._gather(chunk, self._place.device))
        return hasher.digest()

    def _gather(self, chunk: Extents, device: torch.device) -> memoryview:
        """Return a chunk's bytes as one piece in host memory, valid until the next chunk."""
        gathered = self._gathered
        if gathered is None:
            with finished(device):
                gathered = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device)
            self._gathered = gathered
        length = chunk.length_bytes
        ones, bytes_ = np.ones(1, np.int64), np.full(1, int(DType.UINT8), np.int64)
        dst_address = gathered.data_ptr() + np.cumsum(length) - length
        grid = Grid(chunk.address, dst_address, length, ones, ones, bytes_, bytes_)
        run_copies(Copies((grid,)), device)
        with finished(device):
            host = gathered[: chunk.size_bytes].cpu()
        return host.numpy().data
