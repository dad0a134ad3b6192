"""Regions that an agent serves, and the place of each."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import torch

from restow.agents.binding.pages import RegionTable
from restow.agents.memory.errors import RegionInvalidError
from restow.broker.words import Worded

MAX_ADDRESS = 1 << 63


class MemoryKind(StrEnum):
    """Kind of memory."""

    HOST = "host"
    """Host memory, which a pointer of the process reaches."""
    CUDA = "cuda"
    """Memory of a CUDA device, whose index is given separately."""


@dataclass(frozen=True, slots=True)
class MemoryPlace(Worded):
    """The place of memory: its kind, and the index of the CUDA device (0 for host memory)."""

    kind: MemoryKind = MemoryKind.HOST
    device_id: int = 0

    def __str__(self) -> str:
        """Return torch's name of the device, or ``host``."""
        return "host" if self.kind is MemoryKind.HOST else f"{self.kind}:{self.device_id}"

    @property
    def device(self) -> torch.device:
        """The torch device."""
        if self.kind is MemoryKind.HOST:
            return torch.device("cpu")
        return torch.device("cuda", self.device_id)


HOST = MemoryPlace()


@dataclass(frozen=True, slots=True)
class RegionMemory(Worded):
    """The memory of a region: page ``i`` begins at ``base_address + i * page_stride_bytes``.

    Raises `RegionInvalidError` if the address, count or stride is not positive.
    """

    name: str
    """Name of the region in the rank's layout."""
    base_address: int
    """Address of page 0, in this process or on the device."""
    page_count: int
    """Number of pages. Block ids are below this divided by the layout's ``pages_per_block``."""
    page_stride_bytes: int
    """Bytes from one page to the next; at least the layout's page size."""
    kind: MemoryKind = MemoryKind.HOST
    """Kind of the memory."""
    device_id: int = 0
    """Index of the CUDA device; 0 for host memory."""
    private: bool = False
    """Whether no peer reads it and no handoff writes it, as a layout's constant regions."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        Worded.__post_init__(self)
        for field in ("base_address", "page_count", "page_stride_bytes"):
            if getattr(self, field) < 1:
                raise RegionInvalidError(
                    f"region {self.name}: {field} is {getattr(self, field)}, but must be positive",
                    region=self.name,
                )

    @property
    def length_bytes(self) -> int:
        """Bytes from page 0 to the end of the last page."""
        return self.page_count * self.page_stride_bytes

    @property
    def place(self) -> MemoryPlace:
        """Place of the region."""
        return MemoryPlace(self.kind, self.device_id)


def common_place(regions: Sequence[RegionMemory]) -> MemoryPlace:
    """Return the place that a rank's regions share; without regions it is the host.

    The rank's staging lies there too, because a device's kernels reach no memory of another place.
    Raises `RegionInvalidError` if regions lie at several places.
    """
    places = list(dict.fromkeys(region.place for region in regions))
    if len(places) > 1:
        raise RegionInvalidError(
            f"the regions of a rank lie at several places: {', '.join(map(str, places))}. An agent "
            f"copies between them and its staging, so all must lie on one device or on the host",
        )
    return places[0] if places else HOST


def region_table(regions: Sequence[RegionMemory]) -> RegionTable:
    """Return the regions as the arrays that binding uses."""
    return RegionTable(
        np.array([region.base_address for region in regions], np.int64),
        np.array([region.page_stride_bytes for region in regions], np.int64),
        np.array([region.page_count for region in regions], np.int64),
    )


def registrations(regions: Sequence[RegionMemory]) -> list[tuple[int, int, MemoryPlace]]:
    """Return address, bytes and place of each area to register with NIXL, by address.

    Overlapping regions become one area: engines lay groups of layers over the same bytes, and a
    block id belongs to one group at a time. Adjacent regions stay separate.
    """
    shared = [region for region in regions if not region.private]
    areas: list[tuple[int, int, MemoryPlace]] = []
    for region in sorted(
        shared, key=lambda region: (region.kind, region.device_id, region.base_address)
    ):
        begin, end = region.base_address, region.base_address + region.length_bytes
        if areas and areas[-1][2] == region.place and begin < sum(areas[-1][:2]):
            begin, length_bytes, _ = areas.pop()
            end = max(end, begin + length_bytes)
        areas.append((begin, end - begin, region.place))
    return sorted(areas, key=lambda registration: registration[0])


def address_spaces(regions: Sequence[RegionMemory]) -> list[tuple[str, int]]:
    """Return each region's address space and its offset in that space.

    Agents of one engine whose regions are the same memory return the same values. The address
    space of shared memory is its file, because processes map it at different addresses; the
    address space of other memory is the process.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    process = f"{boot}/process {namespace}:{os.getpid()}:{started}"
    shared: list[tuple[int, int, str, int]] = []
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        between, mode, offset, device, inode = line.split(maxsplit=5)[:5]
        if mode.endswith("s") and inode != "0":
            begin, end = (int(edge, 16) for edge in between.split("-"))
            shared.append((begin, end, f"{boot}/file {device}:{inode}", int(offset, 16)))
    spaces = []
    for region in regions:
        address = region.base_address
        known = [mapping for mapping in shared if mapping[0] <= address < mapping[1]]
        if region.kind is MemoryKind.HOST and known:
            begin, _, name, offset_bytes = known[0]
            spaces.append((name, offset_bytes + address - begin))
        else:
            spaces.append((process, address))
    return spaces


def check_inside(
    region: str, offset_bytes: int, length_bytes: int, holder: str, size_bytes: int
) -> None:
    """Raise `RegionInvalidError` if a region leaves the memory that is said to hold it."""
    end = offset_bytes + length_bytes
    if offset_bytes < 0 or end > size_bytes:
        raise RegionInvalidError(
            f"region {region}: bytes [{offset_bytes}, {end}) lie outside of {holder} of "
            f"{size_bytes} bytes",
            region=region,
        )


def is_memory(address: int, size_bytes: int) -> bool:
    """Return whether bytes may lie there, so that no sum of addresses and offsets overflows."""
    return size_bytes > 0 and 0 < address <= MAX_ADDRESS - size_bytes


def address_of(mapping: mmap.mmap) -> int:
    """Return the address of a mapping."""
    return np.frombuffer(mapping, np.uint8).ctypes.data
