"""Large copies, products and digests run on a thread, so that the event loop is not blocked.

There is one thread. Two were tried and took longer for pieces of 256 bytes and 1 KiB, because each
chunk of a copy waits for the interpreter's lock. Work on device memory is a single launch, and the
event loop waits for it in place.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
import xxhash

from restow.agents.binding.copies import Copies, Grid
from restow.agents.binding.extents import Extents
from restow.agents.copying.piece_copies import run_copies
from restow.agents.copying.projecting import run_projections
from restow.agents.memory.cuda import bind_thread, finished
from restow.agents.memory.regions import HOST, MemoryPlace
from restow.broker.layout import DType
from restow.broker.layout.rows import Int64s

T = TypeVar("T")

LARGE_BYTES = 1 << 20
"""A copy of this size or more could block the event loop for too long, so a thread makes it."""


class Copier:
    """Runs the copies and products of a rank's agent. Belongs to one event loop."""

    def __init__(self) -> None:
        """Prepare the thread, which starts with the first large copy or product."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="restow-copy")

    async def run(self, copies: Copies, device: torch.device) -> None:
        """Do the copies; no copy is under way after this returns, raises or is cancelled.

        Raises `ProgramInvalidError` for elements that are not aligned to their size, and
        `CopyFailedError`.
        """
        if device.type == "cpu" and copies.size_bytes >= LARGE_BYTES:
            await self.on_thread(lambda: run_copies(copies, device))
        else:
            run_copies(copies, device)

    async def project(self, rows: Int64s, device: torch.device) -> None:
        """Compute the products of a project table; ends and raises as `run` does."""
        if device.type != "cpu":
            run_projections(rows, device)
        else:
            await self.on_thread(lambda: run_projections(rows, device))

    async def on_thread(self, work: Callable[[], T]) -> T:
        """Do the work on the thread; it has ended when this returns, raises or is cancelled."""
        done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        cancelled: asyncio.CancelledError | None = None
        while not done.done():
            try:
                await asyncio.wait([done])
            except (
                asyncio.CancelledError
            ) as error:  # may come more than once, e.g. for a broken stream
                cancelled = error
        if cancelled is not None:
            raise cancelled from done.exception()
        return done.result()

    def close(self) -> None:
        """Wait for copies under way. May be called again."""
        self._thread.shutdown()


DIGEST_BYTES = 16
CHUNK_BYTES = 4 << 20
"""Bytes hashed at a time, after gathering if they lie in many pieces."""
IN_PLACE_PIECES = 256
"""Pieces of a chunk up to which hashing in place is faster than gathering first."""


class Hasher:
    """Computes digests of one rank's memory and its staging."""

    def __init__(self, place: MemoryPlace, copier: Copier) -> None:
        """Hash memory at ``place``."""
        self._place = place
        self._copier = copier
        self._kept = threading.local()

    async def digest(self, extents: Extents) -> bytes:
        """Return the digest of all bytes in order; ends like `run`. Raises `CopyFailedError`."""
        if self._place == HOST and extents.size_bytes < LARGE_BYTES:
            return self._digest(extents)
        return await self._copier.on_thread(lambda: self._digest(extents))

    def _digest(self, extents: Extents) -> bytes:
        made = xxhash.xxh3_128()
        bind_thread(self._place)
        for chunk in extents.chunks(CHUNK_BYTES):
            if self._place == HOST and len(chunk.address) <= IN_PLACE_PIECES:
                for address, length in zip(
                    chunk.address.tolist(), chunk.length_bytes.tolist(), strict=True
                ):
                    made.update((ctypes.c_char * length).from_address(address))
            else:
                made.update(self._gathered(chunk, self._place.device))
        return made.digest()

    def _gathered(self, chunk: Extents, device: torch.device) -> memoryview:
        """Return a chunk's bytes as one piece in host memory, valid until the next chunk."""
        gathered = self._buffer(device)
        length = chunk.length_bytes
        ones, bytes_ = np.ones(1, np.int64), np.full(1, int(DType.UINT8), np.int64)
        behind = gathered.data_ptr() + np.cumsum(length) - length
        grid = Grid(chunk.address, behind, length, ones, ones, bytes_, bytes_)
        run_copies(Copies((grid,)), device)
        with finished(device):
            host = gathered[: chunk.size_bytes].cpu()
        return host.numpy().data

    def _buffer(self, device: torch.device) -> torch.Tensor:
        """Return this thread's memory for a chunk; new memory would have to be zeroed each time."""
        kept: dict[torch.device, torch.Tensor] = self._kept.__dict__.setdefault("buffers", {})
        if device not in kept:
            with finished(device):
                kept[device] = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device)
        return kept[device]
