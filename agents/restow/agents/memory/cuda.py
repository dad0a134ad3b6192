"""A CUDA device, as far as an agent needs it: its stream, and its context on a thread."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64
from dataclasses import dataclass

import torch

from restow.agents.memory.errors import CopyFailedError, CudaUnavailableError, RegionInvalidError
from restow.agents.memory.regions import MemoryKind, MemoryPlace, RegionMemory, check_inside


def require(place: MemoryPlace) -> None:
    """Raise `CudaUnavailableError` where this process has no such device."""
    count = torch.cuda.device_count()
    if place.kind is MemoryKind.CUDA and not 0 <= place.device_id < count:
        raise CudaUnavailableError(
            f"memory lies on CUDA device {place.device_id}, but this process sees {count} devices: "
            f"check the driver, CUDA_VISIBLE_DEVICES, and that torch is a CUDA build",
            device=place.device_id,
        )


def bind_thread(place: MemoryPlace) -> None:
    """Make the device's context this thread's, for NIXL and the driver work in the current one.

    Raises `CopyFailedError` if the device is broken.
    """
    if place.kind is MemoryKind.CUDA:
        with _failures():
            torch.cuda.set_device(place.device)
            torch.cuda.current_stream(place.device).query()  # only a call of the runtime binds it


@contextlib.contextmanager
def finished(device: torch.device) -> Iterator[None]:
    """Run what is queued inside on a stream of the agent's own; return or raise when it has ended.

    On the default stream it would wait for the engine's kernels, and they for it. Where something
    fails, what was queued before is waited for as well: nobody may have its memory earlier. Raises
    `CopyFailedError` for whatever torch or the device can't do.
    """
    with _failures():
        if device.type != "cuda":
            yield
            return
        stream = _own_stream(device)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Give their type to errors of torch and of a full or broken device: a `RuntimeError` each."""
    try:
        yield
    except RuntimeError as error:
        raise CopyFailedError(f"torch or the device failed: {error}") from error


@functools.cache
def _own_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
UUID_BYTES = 16
_LAZY_PEER_ACCESS = 1  # the only flag of cuIpcOpenMemHandle, and it is mandatory


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", c_ubyte * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", c_ubyte * UUID_BYTES),)


class CudaDriver:
    """The calls, each in its device's context.

    All raise `CudaUnavailableError` and `RegionInvalidError`.
    """

    def __init__(self) -> None:
        """Load and initialise. Raises `CudaUnavailableError`."""
        self._library = _library()

    def device_uuids(self) -> list[bytes]:
        """UUIDs of the devices that this process sees, in their order."""
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return [self._uuid(ordinal) for ordinal in range(count.value)]

    def allocation(self, address: int, device_id: int) -> tuple[int, int]:
        """Address and size of the allocation that holds an address."""
        base, size = c_uint64(), c_size_t()
        self._enter(device_id)
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(address))
        return base.value, size.value

    def export(self, address: int, device_id: int) -> bytes:
        """Handle of the allocation at an address."""
        handle = _Handle()
        self._enter(device_id)
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return bytes(handle.bytes)

    def open(self, ipc_handle: bytes, device_id: int) -> int:
        """Address at which another process's allocation appears here."""
        address = c_uint64()
        handle = _Handle.from_buffer_copy(ipc_handle)
        self._enter(device_id)
        self._call("cuIpcOpenMemHandle_v2", byref(address), handle, c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def close(self, address: int, device_id: int) -> None:
        """Undo one `open`."""
        self._enter(device_id)
        self._call("cuIpcCloseMemHandle", c_uint64(address))

    def _uuid(self, ordinal: int) -> bytes:
        device, uuid = c_int(), _Uuid()
        self._call("cuDeviceGet", byref(device), c_int(ordinal))
        self._call("cuDeviceGetUuid_v2", byref(uuid), device)
        return bytes(uuid.bytes)

    def _enter(self, device_id: int) -> None:
        place = MemoryPlace(MemoryKind.CUDA, device_id)
        require(place)
        bind_thread(place)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RegionInvalidError(
                f"{name} of the CUDA driver says {_words(self._library, status)}; memory of "
                f"cuMemMap (torch's expandable_segments) and of ended processes can't be shared"
            )


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise CudaUnavailableError(f"there is no CUDA driver here: {error}") from None
    status = library.cuInit(0)
    if status:
        raise CudaUnavailableError(
            f"the CUDA driver does not start: {_words(library, status)}"
        ) from None
    return library


def _words(library: ctypes.CDLL, status: int) -> str:
    name = c_char_p()
    library.cuGetErrorName(status, byref(name))
    return name.value.decode() if name.value else f"error {status}"


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
