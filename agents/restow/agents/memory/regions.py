"""Memory: the regions that an agent serves, shared-memory objects, and staging."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import torch

from restow.agents.binding.pages import RegionTable
from restow.agents.errors import ProgramInvalidError, RegionInvalidError
from restow.broker.layout.rows import Bools
from restow.broker.words import Worded

SHARED_MEMORY_FOLDER = "/dev/shm"  # noqa: S108 - where POSIX shared memory lives on Linux


class MemoryKind(StrEnum):
    """What memory is attached to."""

    HOST = "host"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Place(Worded):
    """Where memory is: its kind, and the index of the CUDA device (0 for host memory)."""

    kind: MemoryKind = MemoryKind.HOST
    device_id: int = 0

    @property
    def device(self) -> torch.device:
        """The device in torch's words."""
        if self.kind is MemoryKind.HOST:
            return torch.device("cpu")
        return torch.device("cuda", self.device_id)


HOST = Place()


def one_place(places: Sequence[Place], regions: Sequence[int]) -> Place:
    """The one place where all of these regions are. Raises `ProgramInvalidError`."""
    found = {places[region] for region in regions}
    if len(found) > 1:
        raise ProgramInvalidError("staged rows touch the memory of several devices")
    return found.pop() if found else HOST


def are_at(places: Sequence[Place], place: Place) -> Bools:
    """Mask of those that are this one."""
    return np.array([one == place for one in places], np.bool_)


@dataclass(frozen=True, slots=True)
class RegionMemory(Worded):
    """The memory of one region: page ``i`` is at ``base_address + i * page_stride_bytes``.

    One that is ``private`` is read by no peer and written by no handoff: the constant regions of a
    layout are. Raises `RegionInvalidError` for an address, count or stride that is not positive.
    """

    name: str
    base_address: int
    page_count: int
    page_stride_bytes: int
    kind: MemoryKind = MemoryKind.HOST
    device_id: int = 0
    private: bool = False

    def __post_init__(self) -> None:
        """Check."""
        Worded.__post_init__(self)
        for field in ("base_address", "page_count", "page_stride_bytes"):
            if getattr(self, field) < 1:
                raise RegionInvalidError(
                    f"region {self.name}: {field} is {getattr(self, field)}, not positive",
                    region=self.name,
                )

    @property
    def length_bytes(self) -> int:
        """Bytes from page 0 to the end of the last page."""
        return self.page_count * self.page_stride_bytes

    @property
    def place(self) -> Place:
        """Where the region is."""
        return Place(self.kind, self.device_id)


def region_table(regions: Sequence[RegionMemory]) -> RegionTable:
    """The regions as the arrays that binding works on."""
    return RegionTable(
        np.array([region.base_address for region in regions], np.int64),
        np.array([region.page_stride_bytes for region in regions], np.int64),
        np.array([region.page_count for region in regions], np.int64),
    )


def registrations(regions: Sequence[RegionMemory]) -> list[tuple[int, int, Place]]:
    """Address, bytes and place of what to register with NIXL, in the order of addresses.

    Regions that overlay each other are one: engines lay groups of layers over the same bytes, of
    which a block id belongs to one at a time. Those that only touch stay apart.
    """
    found: list[tuple[int, int, Place]] = []
    for place in {region.place for region in regions}:
        spans = sorted(
            (region.base_address, region.base_address + region.length_bytes)
            for region in regions
            if region.place == place and not region.private
        )
        begin = end = 0
        for start, stop in spans:
            if start < end:
                end = max(end, stop)
                continue
            if end:
                found.append((begin, end - begin, place))
            begin, end = start, stop
        if end:
            found.append((begin, end - begin, place))
    return sorted(found, key=lambda one: one[0])


class SharedMemory:
    """A POSIX shared-memory object, mapped. The one who created it removes its name on `close`.

    Unlike `multiprocessing.shared_memory`, attaching leaves the object to its owner: no resource
    tracker removes it when an attached process ends.
    """

    def __init__(self, name: str, size_bytes: int, mapping: mmap.mmap, owned: bool) -> None:
        """Use `create` or `attach`."""
        self.name = name
        self.size_bytes = size_bytes
        self.address = address_of(mapping)
        self._mapping = mapping
        self._owned = owned

    @classmethod
    def create(cls, size_bytes: int, name: str | None = None) -> SharedMemory:
        """A new object of zeroes, readable by this user only; without a name it gets a random one.

        Raises `RegionInvalidError` if the name exists or the size is not positive.
        """
        name = name or f"restow-{secrets.token_hex(8)}"
        if size_bytes < 1:
            raise RegionInvalidError(f"shared memory {name} of {size_bytes} bytes", name=name)
        try:
            fd = os.open(_path(name), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RegionInvalidError(
                f"shared memory {name} can't be created: {error.strerror}", name=name
            ) from None
        try:
            os.posix_fallocate(fd, 0, size_bytes)  # fails here instead of by SIGBUS later
            mapping = mmap.mmap(fd, size_bytes)
        except OSError as error:
            os.unlink(_path(name))
            raise RegionInvalidError(
                f"shared memory {name} of {size_bytes} bytes can't be had: {error.strerror}",
                name=name,
            ) from None
        finally:
            os.close(fd)
        return cls(name, size_bytes, mapping, owned=True)

    @classmethod
    def attach(cls, name: str) -> SharedMemory:
        """Map another's object, whole. Raises `RegionInvalidError` if there is none."""
        try:
            fd = os.open(_path(name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise RegionInvalidError(
                f"shared memory {name} can't be attached: {error.strerror}", name=name
            ) from None
        try:
            size_bytes = os.fstat(fd).st_size
            mapping = mmap.mmap(fd, size_bytes)
        except (OSError, ValueError) as error:
            raise RegionInvalidError(
                f"shared memory {name} can't be mapped: {error}", name=name
            ) from None
        finally:
            os.close(fd)
        return cls(name, size_bytes, mapping, owned=False)

    @property
    def buffer(self) -> memoryview:
        """The bytes. Views of them keep the mapping alive after `close`."""
        return memoryview(self._mapping)

    def close(self) -> None:
        """Unmap, as soon as no view is left; the owner removes the name. May be repeated."""
        if self._owned:
            self._owned = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_path(self.name))
        try:
            self._mapping.close()
        except BufferError:
            return  # a view is left: the mapping ends with it

    def __enter__(self) -> Self:
        """The object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """The memory of one region inside a shared-memory object, page 0 at ``offset_bytes``.

    ``private``: as of `RegionMemory`.
    """

    name: str
    shared_memory: str
    offset_bytes: int
    page_count: int
    page_stride_bytes: int
    private: bool = False

    def memory(self, shared: SharedMemory) -> RegionMemory:
        """The region in this process. Raises `RegionInvalidError` if it leaves the object."""
        end = self.offset_bytes + self.page_count * self.page_stride_bytes
        if self.offset_bytes < 0 or end > shared.size_bytes:
            raise RegionInvalidError(
                f"region {self.name}: bytes [{self.offset_bytes}, {end}) lie outside of shared "
                f"memory {shared.name} of {shared.size_bytes} bytes",
                region=self.name,
            )
        address = shared.address + self.offset_bytes
        return RegionMemory(
            self.name, address, self.page_count, self.page_stride_bytes, private=self.private
        )


class Staging(Protocol):
    """Memory for staged runs."""

    address: int
    size_bytes: int


class HostStaging:
    """Anonymous host memory, which costs nothing until it is used.

    In pages of 4 KiB, as engines' memory mostly is: what reading costs is measured in it, and in
    huge pages small pieces would seem cheaper than they are.
    """

    def __init__(self, size_bytes: int) -> None:
        """Map at least one page."""
        self.size_bytes = size_bytes
        self._mapping = mmap.mmap(-1, max(size_bytes, mmap.PAGESIZE))
        self.address = address_of(self._mapping)


class CudaStaging:
    """Memory of a CUDA device."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        """Allocate on the device."""
        self.size_bytes = size_bytes
        self._tensor = torch.empty(max(size_bytes, mmap.PAGESIZE), dtype=torch.uint8, device=device)
        self.address = self._tensor.data_ptr()


def staging_place(places: Sequence[Place]) -> Place:
    """Where an agent keeps its staging: on its regions' device if they share one, else the host."""
    return places[0] if len(set(places)) == 1 else HOST


def staging_at(place: Place, size_bytes: int) -> Staging:
    """Staging beside the regions that it serves."""
    if place.kind is MemoryKind.HOST:
        return HostStaging(size_bytes)
    return CudaStaging(size_bytes, place.device)


def _path(name: str) -> str:
    if not name or "/" in name or name.startswith("."):
        raise RegionInvalidError(f"{name!r} is no name of a shared-memory object", name=name)
    return f"{SHARED_MEMORY_FOLDER}/{name}"


def address_of(mapping: mmap.mmap) -> int:
    """Where a mapping begins."""
    return np.frombuffer(mapping, np.uint8).ctypes.data
