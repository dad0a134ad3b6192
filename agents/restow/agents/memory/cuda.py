"""CUDA devices: the agent's stream, contexts of threads, and memory shared between processes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64
from dataclasses import dataclass

import torch

from restow.agents.memory.errors import CopyFailedError, CudaUnavailableError, RegionInvalidError
from restow.agents.memory.regions import MemoryKind, MemoryPlace, RegionMemory, check_inside


def require(place: MemoryPlace) -> None:
    """Raise `CudaUnavailableError` if this process does not have the device."""
    count = torch.cuda.device_count()
    if place.kind is MemoryKind.CUDA and not 0 <= place.device_id < count:
        raise CudaUnavailableError(
            f"memory lies on CUDA device {place.device_id}, but this process sees {count} devices: "
            f"check the driver, CUDA_VISIBLE_DEVICES, and that torch is a CUDA build",
            device=place.device_id,
        )


def bind_thread(place: MemoryPlace) -> None:
    """Make the device's context current on this thread, as NIXL and the driver expect.

    Raises `CopyFailedError` if the device is broken.
    """
    if place.kind is MemoryKind.CUDA:
        with _failures():
            torch.cuda.set_device(place.device)
            torch.cuda.current_stream(place.device).query()  # a runtime call binds the context


@contextlib.contextmanager
def finished(device: torch.device) -> Iterator[None]:
    """Run the body's work on the agent's own stream; return or raise when the work has ended.

    On the default stream, this work and the engine's kernels would wait for each other. If a part
    fails, work that was queued before is awaited too, because nobody may reuse its memory earlier.
    Raises `CopyFailedError` for every failure of torch or the device.
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


QUICK_POLLS = 50
POLL_S = 0.001
"""How often an event is looked at: `QUICK_POLLS` times at each turn of the loop, then so often."""


@contextlib.asynccontextmanager
async def finished_later(device: torch.device) -> AsyncIterator[None]:
    """Run the body's launches as `finished` does; the event loop goes on until they have ended.

    Raises `CopyFailedError` for every failure of torch or the device.
    """
    with _failures():
        stream = _own_stream(device)
        try:
            with torch.cuda.stream(stream):
                yield
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record(stream)
            polls = 0
            while not done.query():  # type: ignore[no-untyped-call]
                await asyncio.sleep(0 if polls < QUICK_POLLS else POLL_S)
                polls += 1
        except BaseException:
            stream.synchronize()
            raise


class QueuedWork:
    """Work on the agent's own stream, which may still run. All methods raise `CopyFailedError`."""

    def __init__(self, device: torch.device, launch: Callable[[], None]) -> None:
        """Queue what ``launch`` launches. If that fails, nothing of it runs any more."""
        with _failures():
            stream = _own_stream(device)
            try:
                with torch.cuda.stream(stream):
                    launch()
                    self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    self._done.record(stream)
            except BaseException:
                stream.synchronize()
                raise

    def has_ended(self) -> bool:
        """Return whether all work has ended."""
        with _failures():
            return bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait for the end of all work."""
        with _failures():
            self._done.synchronize()


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Turn each `RuntimeError` of torch or the device into `CopyFailedError`."""
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
_LAZY_PEER_ACCESS = 1  # the only flag of cuIpcOpenMemHandle, which is mandatory


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", c_ubyte * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", c_ubyte * UUID_BYTES),)


class CudaDriver:
    """Calls of the CUDA driver, each in its device's context.

    All methods raise `CudaUnavailableError` and `RegionInvalidError`.
    """

    def __init__(self) -> None:
        """Load and initialise the driver. Raises `CudaUnavailableError`."""
        self._library = _library()

    def device_uuids(self) -> list[bytes]:
        """Return the UUIDs of the devices that this process sees, in order."""
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return [self._uuid(ordinal) for ordinal in range(count.value)]

    def allocation(self, address: int, device_id: int) -> tuple[int, int]:
        """Return address and size of the allocation that contains an address."""
        base, size = c_uint64(), c_size_t()
        self._enter(device_id)
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(address))
        return base.value, size.value

    def export(self, address: int, device_id: int) -> bytes:
        """Return the handle of the allocation at an address."""
        handle = _Handle()
        self._enter(device_id)
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return bytes(handle.bytes)

    def open(self, ipc_handle: bytes, device_id: int) -> int:
        """Map another process's allocation, and return its address here."""
        address = c_uint64()
        handle = _Handle.from_buffer_copy(ipc_handle)
        self._enter(device_id)
        self._call("cuIpcOpenMemHandle_v2", byref(address), handle, c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def close(self, address: int, device_id: int) -> None:
        """Undo one call of `open`."""
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
                f"the CUDA driver's {name} failed with {_words(self._library, status)}; memory of "
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
    """A device allocation, for other processes. Raises `RegionInvalidError` for wrong sizes."""

    ipc_handle: bytes
    device_uuid: bytes

    def __post_init__(self) -> None:
        """Check the sizes, because the driver must not be given other sizes."""
        sizes = (len(self.ipc_handle), len(self.device_uuid))
        if sizes != (HANDLE_BYTES, UUID_BYTES):
            raise RegionInvalidError(
                f"a CUDA allocation has a handle of {HANDLE_BYTES} bytes and a UUID of "
                f"{UUID_BYTES}, not of {sizes[0]} and {sizes[1]}"
            )


@dataclass(frozen=True, slots=True)
class CudaRegion:
    """A region inside an allocation of a device; `of` creates it."""

    name: str
    """Name of the region in the rank's layout."""
    handle: CudaHandle
    """The allocation, as the driver shares it."""
    offset_bytes: int
    """Offset of page 0 in the allocation."""
    page_count: int
    """Number of pages."""
    page_stride_bytes: int
    """Bytes from one page to the next."""
    private: bool = False
    """Whether no peer reads it and no handoff writes it."""

    @classmethod
    def of(cls, region: RegionMemory, driver: CudaDriver | None = None) -> CudaRegion:
        """Export a ``region`` of this process, whose memory must outlive all who open it.

        ``driver`` None means the host's driver. Raises `CudaUnavailableError`, and
        `RegionInvalidError` if the region is not device memory or the driver cannot share it.
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
        """Return the region in this process, where its allocation is ``opened``.

        Raises `RegionInvalidError` if the region leaves the allocation.
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
    """Another process's allocation, until `close`; the driver, not the peer, states its size."""

    def __init__(self, handle: CudaHandle, driver: CudaDriver | None = None) -> None:
        """Open it. Raises `CudaUnavailableError` and `RegionInvalidError`."""
        self._driver = driver or CudaDriver()
        uuids = self._driver.device_uuids()
        if handle.device_uuid not in uuids:
            raise CudaUnavailableError(
                f"the memory lies on CUDA device {handle.device_uuid.hex()}, but this process sees "
                f"{len(uuids)} others: check CUDA_VISIBLE_DEVICES"
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
        """Close it. May be called again."""
        if self._open:
            self._open = False
            self._driver.close(self.address, self.device_id)
