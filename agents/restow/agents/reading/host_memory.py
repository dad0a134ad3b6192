"""What a process shows of its host memory, so that other processes of the host may read it.

It corresponds to NIXL's metadata, and adds what that lacks: the address of a *mark* in the
process's memory. No other process has this mark, and it exists exactly as long as the memory may be
read. A reader that finds the mark after it has read the last byte knows that it read this process,
in time.

The ranges that may be read are stored behind the mark, in the process's own memory. So they are the
process's own word, and not that of a party which passed the rest on. Nobody can forge a mark by
sending bytes to a process either: the mark begins a mapping whose name no other mapping has by
chance.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError

from restow.agents.memory.errors import OrderInvalidError
from restow.agents.memory.regions import HOST, MAX_ADDRESS, MemoryPlace, address_of
from restow.broker.layout.rows import Int64s
from restow.v1 import agent_link_pb2 as pb

MAGIC = b"restow host memory 2\0"
MAPPING = "restow-mark"
TOKEN_BYTES = 16
MAX_MARK_BYTES = 1024
MAX_PID = 1 << 31
MAX_RANGES = 1 << 20
MAX_MAPPABLE_BYTES = 1 << 20
NOT_MAPPABLE = pb.MappableMemory()
_COUNT = struct.Struct("=q")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """Return the host's name and boot; each container of a host has a name of its own."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()}/{BOOT_ID.read_text().strip()[:8]}"
    return socket.gethostname()


@dataclass(frozen=True, slots=True, eq=False)
class HostRanges:
    """Memory that may be read or read into: separate ranges ``[begin, end)`` in rising order.

    Raises `OrderInvalidError` for other ranges.
    """

    begin: Int64s
    end: Int64s

    def __post_init__(self) -> None:
        """Check the order of the ranges."""
        if len(self.begin) != len(self.end):
            raise OrderInvalidError("ranges of host memory must have as many ends as beginnings")
        edges = np.stack([self.begin, self.end], axis=1).reshape(-1)
        if len(edges) and (edges[0] < 1 or (np.diff(edges) < 0).any()):
            raise OrderInvalidError("ranges of host memory must rise and must not overlap")

    @classmethod
    def of(
        cls, registered: Iterable[tuple[int, int, MemoryPlace]], place: MemoryPlace = HOST
    ) -> HostRanges:
        """Return the memory at ``place`` among the (address, bytes, place) that are registered."""
        spans = sorted(
            (address, address + length_bytes)
            for address, length_bytes, at in registered
            if at == place
        )
        return cls(*np.array(spans, np.int64).reshape(-1, 2).T)

    def hold(self, address: Int64s, length_bytes: Int64s) -> bool:
        """Return whether each piece lies inside a single range."""
        if not len(self.begin):
            return not len(address)
        index = np.searchsorted(self.begin, address, "right") - 1
        # For an address below the first range, the index -1 wraps to the last range; it is not
        # inside.
        return bool(
            ((index >= 0) & (length_bytes >= 0) & (length_bytes <= self.end[index] - address)).all()
        )


@dataclass(frozen=True, slots=True, eq=False)
class HostMemory:
    """Access to the memory of a process on this host. Raises `OrderInvalidError`."""

    pid: int
    """The pid in the process's own namespace."""
    mark_address: int
    mark: bytes

    def __post_init__(self) -> None:
        """Check pid, address and mark."""
        if (
            not 0 < self.pid < MAX_PID
            or not 0 < self.mark_address < MAX_ADDRESS - MAX_MARK_BYTES
            or not len(MAGIC) + TOKEN_BYTES < len(self.mark) <= MAX_MARK_BYTES
            or not self.mark.startswith(MAGIC)
        ):
            raise OrderInvalidError(
                f"process {self.pid} can't show host memory with a mark of {len(self.mark)} bytes "
                f"at address {self.mark_address}"
            )

    def is_of(self, agent_name: str) -> bool:
        """Return whether the mark names that agent, so that no agent shows another's memory."""
        return self.mark[len(MAGIC) + TOKEN_BYTES :] == agent_name.encode()

    def encoded(self) -> bytes:
        """Return the message for the broker, which passes it on unread."""
        return pb.HostMemory(
            pid=self.pid,
            mark_address=self.mark_address,
            mark=self.mark,
        ).SerializeToString()

    @classmethod
    def decoded(cls, message: bytes) -> HostMemory | None:
        """Return the value of a peer's message; None if empty. Raises `OrderInvalidError`."""
        if not message:
            return None
        try:
            shown = pb.HostMemory.FromString(message)
        except DecodeError:
            raise OrderInvalidError("a peer's host memory can't be decoded") from None
        return cls(shown.pid, shown.mark_address, shown.mark)

    @property
    def is_mapped(self) -> bool:
        """Whether the process itself has a mapping with a mark's name at the address."""
        begins = f"^{self.mark_address:08x}-.* /memfd:{MAPPING} \\(deleted\\)$".encode()
        try:
            maps = Path(f"/proc/{self.pid}/maps").read_bytes()
        except OSError:
            return False
        return re.search(begins, maps, re.MULTILINE) is not None

    def ranges(self, read: Callable[[int, int], bytes]) -> HostRanges:
        """Return the ranges that the process shows; ``read`` reads bytes at an address there.

        Raises `OrderInvalidError` for impossible ranges.
        """
        address = self.mark_address + len(self.mark)
        count = self._count(read, address, MAX_RANGES, "ranges of memory")
        edges = np.frombuffer(read(address + _COUNT.size, 16 * count), np.int64)
        return HostRanges(*edges.reshape(-1, 2).T)

    def mappable(self, read: Callable[[int, int], bytes]) -> pb.MappableMemory:
        """Return the memory that the process lets others map; ``read`` is as for `ranges`.

        Raises `OrderInvalidError` for an impossible message.
        """
        address = self.mark_address + len(self.mark)
        count = self._count(read, address, MAX_RANGES, "ranges of memory")
        address += _COUNT.size + 16 * count
        length = self._count(read, address, MAX_MAPPABLE_BYTES, "bytes about mappable memory")
        try:
            return pb.MappableMemory.FromString(read(address + _COUNT.size, length))
        except DecodeError:
            raise OrderInvalidError(
                f"what process {self.pid} shows of mappable memory can't be decoded"
            ) from None

    def _count(self, read: Callable[[int, int], bytes], address: int, most: int, what: str) -> int:
        count: int
        (count,) = _COUNT.unpack(read(address, _COUNT.size))
        if not 0 <= count <= most:
            raise OrderInvalidError(f"process {self.pid} shows {count} {what}")
        return count


class HostMark:
    """A mark in this process's memory. It ends with the object at the latest."""

    def __init__(
        self,
        agent_name: str,
        ranges: HostRanges,
        mappable: pb.MappableMemory = NOT_MAPPABLE,
    ) -> None:
        """Set the mark: these ranges of this process may be read, and ``mappable`` be mapped."""
        self._bytes = MAGIC + secrets.token_bytes(TOKEN_BYTES) + agent_name.encode()
        edges = np.stack([ranges.begin, ranges.end], axis=1).astype(np.int64)
        shown = mappable.SerializeToString()
        written = self._bytes + _COUNT.pack(len(edges)) + edges.tobytes()
        written += _COUNT.pack(len(shown)) + shown
        # A separate mapping vanishes with its owner, while the heap could keep the bytes.
        fd = os.memfd_create(MAPPING, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, len(written))
            self._page = mmap.mmap(fd, len(written))
        finally:
            os.close(fd)
        self._page[:] = written

    def show(self) -> HostMemory:
        """Return how this process is read while the mark is set."""
        return HostMemory(os.getpid(), address_of(self._page), self._bytes)

    def wipe(self) -> None:
        """Remove the mark, so that no later read succeeds. May be called again."""
        self._page[: len(self._bytes)] = bytes(len(self._bytes))
