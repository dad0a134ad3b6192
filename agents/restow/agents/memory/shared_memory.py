"""POSIX shared memory, and regions inside it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from dataclasses import dataclass
from typing import Self

from restow.agents.errors import RegionInvalidError
from restow.agents.memory import held_names
from restow.agents.memory.regions import RegionMemory, address_of, check_inside


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
        wanted, name = name, name or held_names.new_name()
        if size_bytes < 1:
            raise RegionInvalidError(f"shared memory {name} of {size_bytes} bytes", name=name)
        try:
            fd = os.open(_path(name), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RegionInvalidError(
                f"shared memory {name} can't be created: {error.strerror}", name=name
            ) from None
        try:
            if not held_names.hold(fd, name):  # taken for one that was left, before it was held
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
            if not held_names.hold(fd, name):
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
        if error.errno != errno.ENOSPC or not held_names.remove_left():
            raise
        os.posix_fallocate(fd, 0, size_bytes)


def _path(name: str) -> str:
    if not name or "/" in name or name.startswith("."):
        raise RegionInvalidError(f"{name!r} is no name of a shared-memory object", name=name)
    return f"{held_names.FOLDER}/{name}"
