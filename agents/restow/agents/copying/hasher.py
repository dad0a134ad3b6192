"""Digests of content: made of bytes where they lie, on the thread that copies.

XXH3 runs at the speed of memory. It finds accidents; whoever can choose the bytes can choose them
to have the same digest.
"""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import torch
import xxhash

from restow.agents.binding.copies import Copies, Grid
from restow.agents.binding.extents import Extents
from restow.agents.copying.copier import LARGE_BYTES, Copier
from restow.agents.copying.piece_copies import run_copies
from restow.agents.memory.device import bind_thread, finished
from restow.agents.memory.regions import HOST, MemoryPlace
from restow.broker.layout import DType

DIGEST_BYTES = 16
CHUNK_BYTES = 4 << 20
"""Hashed at once, and gathered before if they lie in many pieces."""
IN_PLACE_PIECES = 256
"""Of a chunk: up to so many are hashed where they lie, which then takes less than gathering."""


class Hasher:
    """Makes digests of one rank's memory and its staging."""

    def __init__(self, place: MemoryPlace, copier: Copier) -> None:
        """Hash memory at ``place``."""
        self._place = place
        self._copier = copier
        self._kept = threading.local()

    async def digest(self, extents: Extents) -> bytes:
        """The digest of all bytes in order; ends as `Copier.run` does. Raises `CopyFailedError`."""
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
        """The bytes of a chunk, one piece behind the other, in host memory, until the next ones."""
        gathered = self._buffer(device)
        length = chunk.length_bytes
        one, bytes_ = np.ones(1, np.int64), np.full(1, int(DType.UINT8), np.int64)
        behind = gathered.data_ptr() + np.cumsum(length) - length
        grid = Grid(chunk.address, behind, length, one, one, bytes_, bytes_)
        run_copies(Copies((grid,)), device)
        with finished(device):
            host = gathered[: chunk.size_bytes].cpu()
        return host.numpy().data

    def _buffer(self, device: torch.device) -> torch.Tensor:
        """Memory for a chunk, this thread's own: new memory would have to be zeroed each time."""
        kept: dict[torch.device, torch.Tensor] = self._kept.__dict__.setdefault("buffers", {})
        if device not in kept:
            with finished(device):
                kept[device] = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device)
        return kept[device]
