"""Shared memory objects, and the removal of objects that no process has mapped any more.

Each process that maps an object whose name begins with `PREFIX` holds a shared lock on it (`flock`)
for as long as the mapping lives, however the process ends. The pid of an owner would not tell,
because engines and their daemon may run in containers with separate pid namespaces.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from restow.agents.memory.cuda import CudaDriver, CudaHandle, CudaRegion, OpenedAllocation
from restow.agents.memory.errors import AgentError, RegionInvalidError
from restow.agents.memory.regions import (
    MemoryKind,
    MemoryPlace,
    RegionMemory,
    address_of,
    check_inside,
)
from restow.v1 import agent_link_pb2 as link
from restow.v1 import daemon_pb2 as pb

FOLDER = "/dev/shm"  # noqa: S108 - where POSIX shared memory lives on Linux
PREFIX = "restow-mem-"


def new_name() -> str:
    """Return an unused random name."""
    return f"{PREFIX}{secrets.token_hex(8)}"


def hold(fd: int, name: str) -> bool:
    """Lock an object that is about to be mapped; return False if it was removed as abandoned.

    Objects without `PREFIX` have no lock. The lock ends with the mapping, which duplicates ``fd``.
    """
    if not name.startswith(PREFIX):
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # another process removes it, which it does only if nobody holds it
        return False
    return os.fstat(fd).st_nlink > 0


def remove_left() -> list[str]:
    """Remove this user's objects that nobody has mapped; return their names."""
    return [name for name in os.listdir(FOLDER) if name.startswith(PREFIX) and _is_removed(name)]


def _is_removed(name: str) -> bool:
    path = f"{FOLDER}/{name}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # another user's object, not a file, or removed meanwhile
        return False
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except OSError:  # another process holds it, or removes it
        return False
    finally:
        os.close(fd)
    return True


class SharedMemory:
    """A mapped POSIX shared-memory object. Its creator removes the name on `close`.

    Unlike `multiprocessing.shared_memory`, attaching leaves the object to its owner: no resource
    tracker removes it when an attached process ends. If an owner is killed, its objects that
    nobody has mapped are removed by the host's daemon, or when room is short.
    """

    def __init__(self, name: str, size_bytes: int, mapping: mmap.mmap, owned: bool) -> None:
        """Take over a ``mapping``, ``owned`` or not; use `create` or `attach` instead."""
        self.name = name
        """Name by which other processes attach it."""
        self.size_bytes = size_bytes
        """Size of the object."""
        self.address = address_of(mapping)
        """Address in this process."""
        self._mapping = mapping
        self._owned = owned

    @classmethod
    def create(cls, size_bytes: int, name: str | None = None) -> SharedMemory:
        """Create an object of ``size_bytes`` zeroes that only this user can read.

        Without a ``name`` it gets a random name. An object with a given name remains if its owner
        is killed. Raises `RegionInvalidError` if the name exists or the size is not positive.
        """
        wanted, name = name, name or new_name()
        if size_bytes < 1:
            raise RegionInvalidError(
                f"shared memory {name} would have {size_bytes} bytes, but needs at least 1",
                name=name,
            )
        try:
            fd = os.open(_path(name), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RegionInvalidError(
                f"shared memory {name} can't be created: {error.strerror}", name=name
            ) from None
        try:
            if not hold(fd, name):  # removed as abandoned before this process held it
                return cls.create(size_bytes, wanted)
            _allocate(fd, size_bytes)
            mapping = mmap.mmap(fd, size_bytes)
        except OSError as error:
            os.unlink(_path(name))
            raise RegionInvalidError(
                f"shared memory {name} of {size_bytes} bytes can't be allocated: {error.strerror}",
                name=name,
            ) from None
        finally:
            os.close(fd)
        return cls(name, size_bytes, mapping, owned=True)

    @classmethod
    def attach(cls, name: str) -> SharedMemory:
        """Map the whole object ``name`` of another process.

        Raises `RegionInvalidError` if it does not exist.
        """
        try:
            fd = os.open(_path(name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise RegionInvalidError(
                f"shared memory {name} can't be attached: {error.strerror}", name=name
            ) from None
        try:
            if not hold(fd, name):
                raise RegionInvalidError(
                    f"shared memory {name} can't be attached: the process that created it is gone",
                    name=name,
                )
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
        """Unmap once no view is left; the owner removes the name. May be called again."""
        if self._owned:
            self._owned = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_path(self.name))
        try:
            self._mapping.close()
        except BufferError:
            return  # a view is left, and the mapping ends with it

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the object."""
        self.close()


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """A region inside a shared-memory object. Other fields are as in `RegionMemory`."""

    name: str
    """Name of the region in the rank's layout."""
    shared_memory: str
    """Name of the object."""
    offset_bytes: int
    """Offset of page 0 in the object."""
    page_count: int
    """Number of pages."""
    page_stride_bytes: int
    """Bytes from one page to the next."""
    private: bool = False
    """Whether no peer reads it and no handoff writes it."""

    def memory(self, shared: SharedMemory) -> RegionMemory:
        """Return the region in this process, where the object is mapped as ``shared``.

        Raises `RegionInvalidError` if the region leaves the object.
        """
        length_bytes = self.page_count * self.page_stride_bytes
        check_inside(
            self.name,
            self.offset_bytes,
            length_bytes,
            f"shared memory {shared.name}",
            shared.size_bytes,
        )
        address = shared.address + self.offset_bytes
        return RegionMemory(
            self.name, address, self.page_count, self.page_stride_bytes, private=self.private
        )


def _allocate(fd: int, size_bytes: int) -> None:
    """Allocate all pages now, not by SIGBUS later; remove abandoned objects to make room."""
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC or not remove_left():
            raise
        os.posix_fallocate(fd, 0, size_bytes)


def _path(name: str) -> str:
    if not name or "/" in name or name.startswith("."):
        raise RegionInvalidError(f"{name!r} is not a name of a shared-memory object", name=name)
    return f"{FOLDER}/{name}"


def region_to_proto(region: SharedRegion | CudaRegion) -> pb.SharedRegion:
    """Return the message with which an engine hands over a region."""
    message = pb.SharedRegion(
        name=region.name,
        offset_bytes=region.offset_bytes,
        page_count=region.page_count,
        page_stride_bytes=region.page_stride_bytes,
        private=region.private,
    )
    if isinstance(region, SharedRegion):
        message.shared_memory = region.shared_memory
    else:
        message.cuda.ipc_handle = region.handle.ipc_handle
        message.cuda.device_uuid = region.handle.device_uuid
    return message


def region_from_proto(message: pb.SharedRegion) -> SharedRegion | CudaRegion:
    """Return the region of a message. Raises `RegionInvalidError`."""
    where = (message.offset_bytes, message.page_count, message.page_stride_bytes, message.private)
    if bool(message.shared_memory) == message.HasField("cuda"):
        raise RegionInvalidError(
            f"region {message.name}: give either shared memory or a CUDA allocation",
            region=message.name,
        )
    if message.shared_memory:
        return SharedRegion(message.name, message.shared_memory, *where)
    handle = CudaHandle(message.cuda.ipc_handle, message.cuda.device_uuid)
    return CudaRegion(message.name, handle, *where)


def mappable(
    registered: Sequence[tuple[int, int, MemoryPlace]], driver: CudaDriver | None = None
) -> link.MappableMemory:
    """Export the device memory among the (address, bytes, place) that are registered.

    ``driver`` None means the host's driver. Raises `CudaUnavailableError`, and `RegionInvalidError`
    if the driver cannot share it.
    """
    shown = link.MappableMemory()
    for address, length_bytes, place in registered:
        if place.kind is MemoryKind.CUDA:
            area = RegionMemory("area", address, 1, length_bytes, place.kind, place.device_id)
            shown.areas.append(region_to_proto(CudaRegion.of(area, driver)))
            shown.addresses.append(address)
    return shown


class OpenedRegions:
    """The objects and allocations of a rank; opens each of them once, and closes them together."""

    def __init__(
        self, messages: Sequence[pb.SharedRegion], driver: CudaDriver | None = None
    ) -> None:
        """Prepare; ``with`` opens them. Raises `RegionInvalidError`."""
        self._regions = [region_from_proto(message) for message in messages]
        self._driver = driver
        self._objects: dict[str, SharedMemory] = {}
        self._allocations: dict[CudaHandle, OpenedAllocation] = {}

    def __enter__(self) -> list[RegionMemory]:
        """Return the regions here. Raises `RegionInvalidError` and `CudaUnavailableError`."""
        try:
            return [self._open(region) for region in self._regions]
        except AgentError:
            self._close()
            raise

    def __exit__(self, *_: object) -> None:
        """Close all objects and allocations."""
        self._close()

    def _open(self, region: SharedRegion | CudaRegion) -> RegionMemory:
        if isinstance(region, SharedRegion):
            name = region.shared_memory
            if name not in self._objects:
                self._objects[name] = SharedMemory.attach(name)
            return region.memory(self._objects[name])
        if region.handle not in self._allocations:
            self._allocations[region.handle] = OpenedAllocation(region.handle, self._driver)
        return region.memory(self._allocations[region.handle])

    def _close(self) -> None:
        for shared in self._objects.values():
            shared.close()
        for allocation in self._allocations.values():
            allocation.close()
