"""Staging: memory beside the regions, for what is gathered and for what is scattered."""

from __future__ import annotations

import mmap

import torch

from restow.agents.memory.device import finished
from restow.agents.memory.regions import MemoryKind, MemoryPlace, address_of


class Staging:
    """Memory at one place, as long as this object is there. On a host it costs nothing until used.

    There it is in pages of 4 KiB, as engines' memory mostly is: what reading costs is measured in
    it, and in huge pages small pieces would seem cheaper than they are.
    """

    def __init__(self, place: MemoryPlace, size_bytes: int) -> None:
        """Take at least one page. Raises `CopyFailedError` if a device has no room for it."""
        self.size_bytes = size_bytes
        length_bytes = max(size_bytes, mmap.PAGESIZE)
        if place.kind is MemoryKind.HOST:
            mapping = mmap.mmap(-1, length_bytes)
            self._held: object = mapping
            self.address = address_of(mapping)
        else:
            with finished(place.device):
                tensor = torch.empty(length_bytes, dtype=torch.uint8, device=place.device)
            self._held = tensor
            self.address = tensor.data_ptr()
