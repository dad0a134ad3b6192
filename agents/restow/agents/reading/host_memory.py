"""What a process shows of its host memory, so that others of its host may read it themselves.

It is what NIXL's metadata is to NIXL, and says what NIXL's does not: where a *mark* stands in the
process's memory, which no other process has, for exactly as long as its memory may be read. Who
finds the mark behind the last byte that he read, knows that he read this process, and in time.

What may be read stands behind the mark, in the process's own memory, so that it is its own word and
nobody's who handed the rest on. Nor can anybody put a mark there by sending a process bytes: it
begins a mapping with a name that none has by chance.
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
from restow.agents.memory.regions import MAX_ADDRESS, MemoryKind, MemoryPlace, address_of
from restow.broker.layout.rows import Int64s
from restow.v1 import agent_link_pb2 as pb

MAGIC = b"restow host memory 2\0"
MAPPING = "restow-mark"
TOKEN_BYTES = 16
MAX_MARK_BYTES = 1024
MAX_PID = 1 << 31
MAX_RANGES = 1 << 20
_COUNT = struct.Struct("=q")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """The host, and in which life of it: containers on one have names of their own."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()}/{BOOT_ID.read_text().strip()[:8]}"
    return socket.gethostname()


@dataclass(frozen=True, slots=True, eq=False)
class HostRanges:
    """Host memory that may be read, or read into: ranges ``[begin, end)`` that rise and lie apart.

    Raises `OrderInvalidError` for others.
    """

    begin: Int64s
    end: Int64s

    def __post_init__(self) -> None:
        """Check."""
        if len(self.begin) != len(self.end):
            raise OrderInvalidError("ranges of host memory that begin or end only")
        edges = np.stack([self.begin, self.end], axis=1).reshape(-1)
        if len(edges) and (edges[0] < 1 or (np.diff(edges) < 0).any()):
            raise OrderInvalidError("ranges of host memory that overlap or fall")

    @classmethod
    def of(cls, registered: Iterable[tuple[int, int, MemoryPlace]]) -> HostRanges:
        """The host memory among address, bytes and place of what is registered."""
        spans = sorted(
            (address, address + length_bytes)
            for address, length_bytes, place in registered
            if place.kind is MemoryKind.HOST
        )
        return cls(*np.array(spans, np.int64).reshape(-1, 2).T)

    def hold(self, address: Int64s, length_bytes: Int64s) -> bool:
        """Whether each of these pieces lies inside one range."""
        if not len(self.begin):
            return not len(address)
        index = np.searchsorted(self.begin, address, "right") - 1
        # The first range is far from what lies below all: nothing there is inside.
        return bool(
            ((index >= 0) & (length_bytes >= 0) & (length_bytes <= self.end[index] - address)).all()
        )


@dataclass(frozen=True, slots=True, eq=False)
class HostMemory:
    """How a process of the same host is read. Raises `OrderInvalidError`."""

    pid: int
    """As its own namespace numbers it."""
    mark_address: int
    mark: bytes

    def __post_init__(self) -> None:
        """Check."""
        if (
            not 0 < self.pid < MAX_PID
            or not 0 < self.mark_address < MAX_ADDRESS - MAX_MARK_BYTES
            or not len(MAGIC) + TOKEN_BYTES < len(self.mark) <= MAX_MARK_BYTES
            or not self.mark.startswith(MAGIC)
        ):
            raise OrderInvalidError(
                f"host memory of process {self.pid}, marked with {len(self.mark)} bytes at "
                f"{self.mark_address}, can't be"
            )

    def is_of(self, agent_name: str) -> bool:
        """Whether the mark is that agent's: no agent can show another's memory as its own."""
        return self.mark[len(MAGIC) + TOKEN_BYTES :] == agent_name.encode()

    def encoded(self) -> bytes:
        """For the broker, which hands it on unread."""
        return pb.HostMemory(
            pid=self.pid,
            mark_address=self.mark_address,
            mark=self.mark,
        ).SerializeToString()

    @classmethod
    def decoded(cls, message: bytes) -> HostMemory | None:
        """From a peer's bytes; None if it shows nothing. Raises `OrderInvalidError`."""
        if not message:
            return None
        try:
            shown = pb.HostMemory.FromString(message)
        except DecodeError:
            raise OrderInvalidError("host memory that can't be decoded") from None
        return cls(shown.pid, shown.mark_address, shown.mark)

    @property
    def is_mapped(self) -> bool:
        """Whether the process itself put something there that is called a mark."""
        begins = f"^{self.mark_address:08x}-.* /memfd:{MAPPING} \\(deleted\\)$".encode()
        try:
            maps = Path(f"/proc/{self.pid}/maps").read_bytes()
        except OSError:
            return False
        return re.search(begins, maps, re.MULTILINE) is not None

    def ranges(self, read: Callable[[int, int], bytes]) -> HostRanges:
        """What may be read, as the process itself has it; ``read`` reads bytes at an address there.

        Raises `OrderInvalidError` for nonsense.
        """
        address = self.mark_address + len(self.mark)
        (count,) = _COUNT.unpack(read(address, _COUNT.size))
        if not 0 <= count <= MAX_RANGES:
            raise OrderInvalidError(f"process {self.pid} shows {count} ranges of memory")
        edges = np.frombuffer(read(address + _COUNT.size, 16 * count), np.int64)
        return HostRanges(*edges.reshape(-1, 2).T)


class HostMark:
    """A mark in this process's memory. It ends with the object, if not before."""

    def __init__(self, agent_name: str, ranges: HostRanges) -> None:
        """Let it stand: these ranges of this process may be read."""
        self._bytes = MAGIC + secrets.token_bytes(TOKEN_BYTES) + agent_name.encode()
        edges = np.stack([ranges.begin, ranges.end], axis=1).astype(np.int64)
        written = self._bytes + _COUNT.pack(len(edges)) + edges.tobytes()
        # A mapping of its own is gone with its owner, where the heap would keep the bytes.
        fd = os.memfd_create(MAPPING, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, len(written))
            self._page = mmap.mmap(fd, len(written))
        finally:
            os.close(fd)
        self._page[:] = written

    def show(self) -> HostMemory:
        """How this process is read while the mark stands."""
        return HostMemory(os.getpid(), address_of(self._page), self._bytes)

    def wipe(self) -> None:
        """From now on no read is taken for good. May be repeated."""
        self._page[: len(self._bytes)] = bytes(len(self._bytes))
