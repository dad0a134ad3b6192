"""Names of shared memory that somebody has mapped, or nobody any more: a lock tells.

Each process that maps an object whose name begins with `PREFIX` holds a shared lock on it (`flock`)
for as long as the mapping lives, however the process ends. A pid would not tell: engines and their
daemon may be in containers that count processes for themselves.
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
from restow.agents.memory.regions import RegionMemory, address_of, check_inside
from restow.v1 import daemon_pb2 as pb

FOLDER = "/dev/shm"  # noqa: S108 - where POSIX shared memory lives on Linux
PREFIX = "restow-mem-"


def new_name() -> str:
    """A name that nobody has."""
    return f"{PREFIX}{secrets.token_hex(8)}"


def hold(fd: int, name: str) -> bool:
    """Take the lock of an object that is about to be mapped. False: it was removed as left.

    Names of other forms have no lock. It goes with the mapping, which has a copy of ``fd``.
    """
    if not name.startswith(PREFIX):
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # it is being removed: only where nobody holds it
        return False
    return os.fstat(fd).st_nlink > 0


def remove_left() -> list[str]:
    """Remove this user's objects that nobody has mapped; returns their names."""
    return [one for one in os.listdir(FOLDER) if one.startswith(PREFIX) and _is_removed(one)]


def _is_removed(name: str) -> bool:
    path = f"{FOLDER}/{name}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # somebody else's, no file, or removed meanwhile
        return False
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except OSError:  # somebody holds it, or removes it himself
        return False
    finally:
        os.close(fd)
    return True


class SharedMemory:
    """Maps a POSIX shared-memory object. The one who created it removes its name on `close`.

    Unlike `multiprocessing.shared_memory`, attaching leaves the object to its owner: no resource
    tracker removes it when an attached process ends. What a killed owner leaves, and nobody has
    mapped any more, is removed by the host's daemon, or where room is short.
    """

    def __init__(self, name: str, size_bytes: int, mapping: mmap.mmap, owned: bool) -> None:
        """Take a ``mapping`` over: use `create`, whose object is ``owned``, or `attach`."""
        self.name = name
        """By which other processes attach it."""
        self.size_bytes = size_bytes
        """Its length."""
        self.address = address_of(mapping)
        """Where it begins in this process."""
        self._mapping = mapping
        self._owned = owned

    @classmethod
    def create(cls, size_bytes: int, name: str | None = None) -> SharedMemory:
        """Make an object of ``size_bytes`` zeroes, readable by this user only.

        Without a ``name`` it gets a random one; one of a given name stays when its owner is
        killed. Raises `RegionInvalidError` if the name exists or the size is not positive.
        """
        wanted, name = name, name or new_name()
        if size_bytes < 1:
            raise RegionInvalidError(f"shared memory {name} of {size_bytes} bytes", name=name)
        try:
            fd = os.open(_path(name), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RegionInvalidError(
                f"shared memory {name} can't be created: {error.strerror}", name=name
            ) from None
        try:
            if not hold(fd, name):  # taken for one that was left, before it was held
                return cls.create(size_bytes, wanted)
            _allocate(fd, size_bytes)
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
        """Map the object ``name`` of another process, whole.

        Raises `RegionInvalidError` if there is none.
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
                    f"shared memory {name} can't be attached: the process that had it is gone",
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

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """Says where a region is inside a shared-memory object. The rest is as of `RegionMemory`."""

    name: str
    """That of the region in the rank's layout."""
    shared_memory: str
    """The name of the object."""
    offset_bytes: int
    """Where page 0 begins in it."""
    page_count: int
    """How many pages it has."""
    page_stride_bytes: int
    """From one page to the next."""
    private: bool = False
    """Read by no peer and written by no handoff."""

    def memory(self, shared: SharedMemory) -> RegionMemory:
        """Return the region in this process, where the object is mapped as ``shared``.

        Raises `RegionInvalidError` if it leaves the object.
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
    """Have all pages now, not by SIGBUS later; what dead processes left makes room."""
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC or not remove_left():
            raise
        os.posix_fallocate(fd, 0, size_bytes)


def _path(name: str) -> str:
    if not name or "/" in name or name.startswith("."):
        raise RegionInvalidError(f"{name!r} is no name of a shared-memory object", name=name)
    return f"{FOLDER}/{name}"


def region_to_proto(region: SharedRegion | CudaRegion) -> pb.SharedRegion:
    """A region as an engine hands it over."""
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
    """A region that was handed over. Raises `RegionInvalidError`."""
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


class OpenedRegions:
    """The objects and allocations of a rank, each opened once, closed at the end."""

    def __init__(
        self, messages: Sequence[pb.SharedRegion], driver: CudaDriver | None = None
    ) -> None:
        """Prepare; ``with`` opens. Raises `RegionInvalidError`."""
        self._regions = [region_from_proto(message) for message in messages]
        self._driver = driver
        self._objects: dict[str, SharedMemory] = {}
        self._allocations: dict[CudaHandle, OpenedAllocation] = {}

    def __enter__(self) -> list[RegionMemory]:
        """The regions in this process. Raises `RegionInvalidError` and `CudaUnavailableError`."""
        try:
            return [self._open(region) for region in self._regions]
        except AgentError:
            self._close()
            raise

    def __exit__(self, *_: object) -> None:
        """Close."""
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
