"""CUDA IPC: device memory of one process, opened in another.

An allocation travels as the driver's handle and the device's UUID, both plain bytes, with the
offset of the memory inside it: torch's allocator cuts large allocations into many tensors, and a
handle always means the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from restow.agents.errors import CudaUnavailableError, RegionInvalidError
from restow.agents.memory.cuda_driver import HANDLE_BYTES, UUID_BYTES, CudaDriver
from restow.agents.memory.regions import MemoryKind, RegionMemory, check_inside


@dataclass(frozen=True, slots=True)
class CudaHandle:
    """An allocation of a device, for another process. Raises `RegionInvalidError` for odd sizes."""

    ipc_handle: bytes
    device_uuid: bytes

    def __post_init__(self) -> None:
        """Check: the driver is given nothing of another size."""
        sizes = (len(self.ipc_handle), len(self.device_uuid))
        if sizes != (HANDLE_BYTES, UUID_BYTES):
            raise RegionInvalidError(
                f"a CUDA allocation has a handle of {HANDLE_BYTES} bytes and a UUID of "
                f"{UUID_BYTES}, not of {sizes[0]} and {sizes[1]}"
            )


@dataclass(frozen=True, slots=True)
class CudaRegion:
    """Says where a region is inside an allocation of a device. `of` makes it."""

    name: str
    """That of the region in the rank's layout."""
    handle: CudaHandle
    """The allocation, as the driver shares it."""
    offset_bytes: int
    """Where page 0 begins in it."""
    page_count: int
    """How many pages it has."""
    page_stride_bytes: int
    """From one page to the next."""
    private: bool = False
    """Read by no peer and written by no handoff."""

    @classmethod
    def of(cls, region: RegionMemory, driver: CudaDriver | None = None) -> CudaRegion:
        """Export a ``region`` of this process, whose memory must outlive everybody who opens it.

        ``driver`` None: that of this host. Raises `CudaUnavailableError`, and `RegionInvalidError`
        if the region is no device memory or the driver does not share it.
        """
        if region.kind is not MemoryKind.CUDA:
            raise RegionInvalidError(
                f"region {region.name} lies in host memory, which is shared as a SharedRegion",
                region=region.name,
            )
        driver = driver or CudaDriver()
        base, size_bytes = driver.allocation(region.base_address, region.device_id)
        uuids = driver.device_uuids()
        if not 0 <= region.device_id < len(uuids):
            raise CudaUnavailableError(f"there is no CUDA device {region.device_id} here")
        handle = CudaHandle(driver.export(base, region.device_id), uuids[region.device_id])
        offset = region.base_address - base
        pages = region.page_count, region.page_stride_bytes
        shared = cls(region.name, handle, offset, *pages, region.private)
        shared._check(size_bytes)
        return shared

    def memory(self, opened: OpenedAllocation) -> RegionMemory:
        """Return the region here, where its allocation is ``opened``.

        Raises `RegionInvalidError` if it leaves the allocation.
        """
        self._check(opened.size_bytes)
        return RegionMemory(
            self.name,
            opened.address + self.offset_bytes,
            self.page_count,
            self.page_stride_bytes,
            MemoryKind.CUDA,
            opened.device_id,
            self.private,
        )

    def _check(self, size_bytes: int) -> None:
        length_bytes = self.page_count * self.page_stride_bytes
        check_inside(self.name, self.offset_bytes, length_bytes, "a CUDA allocation", size_bytes)


class OpenedAllocation:
    """Another process's allocation, until `close`. Its size is the driver's word, no peer's."""

    def __init__(self, handle: CudaHandle, driver: CudaDriver | None = None) -> None:
        """Open. Raises `CudaUnavailableError` and `RegionInvalidError`."""
        self._driver = driver or CudaDriver()
        uuids = self._driver.device_uuids()
        if handle.device_uuid not in uuids:
            raise CudaUnavailableError(
                f"the memory lies on CUDA device {handle.device_uuid.hex()}, which is none of the "
                f"{len(uuids)} devices here: check CUDA_VISIBLE_DEVICES"
            )
        self.device_id = uuids.index(handle.device_uuid)
        self.address = self._driver.open(handle.ipc_handle, self.device_id)
        self._open = True
        try:
            base, size_bytes = self._driver.allocation(self.address, self.device_id)
        except RegionInvalidError:
            self.close()
            raise
        self.size_bytes = base + size_bytes - self.address

    def close(self) -> None:
        """Close. May be repeated."""
        if self._open:
            self._open = False
            self._driver.close(self.address, self.device_id)
