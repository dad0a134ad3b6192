"""Digests of content: made of bytes where they lie, on the thread that copies.

XXH3 runs at the speed of memory. It finds accidents; whoever can choose the bytes can choose them
to have the same digest.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash

from restow.agents.binding.copies import Copies, Grid
from restow.agents.binding.extents import Extents
from restow.agents.binding.pages import RegionTable
from restow.agents.copying.copier import LARGE_BYTES, Copier
from restow.agents.copying.piece_copies import run_copies
from restow.agents.errors import CopyFailedError
from restow.agents.memory.device import bind_thread, finished
from restow.agents.memory.regions import HOST, MemoryKind, MemoryPlace
from restow.broker.layout import DType
from restow.broker.layout.rows import Int64s

DIGEST_BYTES = 16
CHUNK_BYTES = 4 << 20
"""Hashed at once, and gathered before if they lie in many pieces."""
IN_PLACE_PIECES = 256
"""Of a chunk: up to so many are hashed where they lie, which then takes less than gathering."""


class Hasher:
    """Makes digests of one rank's memory and its staging."""

    def __init__(self, memory: RegionTable, places: Sequence[MemoryPlace], copier: Copier) -> None:
        """Of ``memory``, whose regions are at ``places``; what is in none is at their one place."""
        self._memory, self._places = memory, tuple(places)
        self._copier = copier
        self._kept = threading.local()

    async def digest(self, extents: Extents) -> bytes:
        """The digest of all bytes in order; ends as `Copier.run` does. Raises `CopyFailedError`."""
        small = extents.size_bytes < LARGE_BYTES
        if small and all(place.kind is MemoryKind.HOST for place in self._places):
            return self._digest(extents)
        return await self._copier.on_thread(lambda: self._digest(extents))

    def _digest(self, extents: Extents) -> bytes:
        made = xxhash.xxh3_128()
        for place, part in self._by_place(extents):
            bind_thread(place)
            try:
                for chunk in part.chunks(CHUNK_BYTES):
                    if place == HOST and len(chunk.address) <= IN_PLACE_PIECES:
                        for address, length in zip(
                            chunk.address.tolist(), chunk.length_bytes.tolist(), strict=True
                        ):
                            made.update((ctypes.c_char * length).from_address(address))
                    else:
                        made.update(self._gathered(chunk, place.device))
            except RuntimeError as error:  # torch's word for memory that it can't have
                raise CopyFailedError(f"content can't be hashed: {error}") from None
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

    def _by_place(self, extents: Extents) -> Iterator[tuple[MemoryPlace, Extents]]:
        """The same bytes in the same order, cut where the kind of memory changes."""
        kinds = list(dict.fromkeys([*self._places, HOST]))
        if len(set(self._places)) <= 1:
            yield kinds[0], extents
            return
        at = self._kind_of(extents.address, kinds)
        bounds = np.flatnonzero(np.diff(at, prepend=-1, append=-1))
        for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            part = slice(begin, end)
            yield kinds[at[begin]], Extents(extents.address[part], extents.length_bytes[part])

    def _kind_of(self, address: Int64s, kinds: Sequence[MemoryPlace]) -> Int64s:
        """The index of each address' place in ``kinds``; staging of a mixed rank is host memory."""
        found = np.full(len(address), kinds.index(HOST), np.int64)
        memory = self._memory
        ends = memory.base_address + memory.page_stride_bytes * memory.page_count
        for begin, end, place in zip(memory.base_address, ends, self._places, strict=True):
            found[(address >= begin) & (address < end)] = kinds.index(place)
        return found
