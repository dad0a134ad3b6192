"""The CUDA driver's few calls for memory of other processes, through ctypes.

The driver's library has one stable interface wherever there is a GPU, whatever torch brings along.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64

from restow.agents.errors import CudaUnavailableError, RegionInvalidError
from restow.agents.memory.device import bind_thread, require
from restow.agents.memory.regions import MemoryKind, MemoryPlace

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
