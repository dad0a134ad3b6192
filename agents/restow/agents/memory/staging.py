"""Staging: memory beside the regions, for what is gathered and for what is scattered."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from restow.agents.memory.regions import HOST, MemoryKind, MemoryPlace, address_of


class Staging:
    """Memory at one place, as long as this object is there. On a host it costs nothing until used.

    There it is in pages of 4 KiB, as engines' memory mostly is: what reading costs is measured in
    it, and in huge pages small pieces would seem cheaper than they are.
    """

    def __init__(self, place: MemoryPlace, size_bytes: int) -> None:
        """At least one page."""
        self.size_bytes = size_bytes
        length_bytes = max(size_bytes, mmap.PAGESIZE)
        if place.kind is MemoryKind.HOST:
            mapping = mmap.mmap(-1, length_bytes)
            self._held: object = mapping
            self.address = address_of(mapping)
        else:
            tensor = torch.empty(length_bytes, dtype=torch.uint8, device=place.device)
            self._held = tensor
            self.address = tensor.data_ptr()


def staging_place(places: Sequence[MemoryPlace]) -> MemoryPlace:
    """Where an agent keeps its staging: on its regions' device if they share one, else the host."""
    return places[0] if len(set(places)) == 1 else HOST
