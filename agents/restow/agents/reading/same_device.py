"""Copy from the pages of other processes that use the same device, without NIXL and staging.

A process exports the memory that it registers, and names it behind its mark (`host_memory`). A
peer on the device maps it and reads with the kernel that also gathers and scatters. So thousands
of short pieces are a single launch, where NIXL needs a copy for each. After the last byte the
reader looks for the mark, as `same_host` does: it is gone before its owner frees the memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import numpy as np

from restow.agents.binding.reads import Descriptors
from restow.agents.memory.cuda import CudaDriver
from restow.agents.memory.errors import AgentError, CopyFailedError, PeerLostError, ReadFailedError
from restow.agents.memory.regions import MemoryPlace
from restow.agents.memory.shared_memory import OpenedRegions
from restow.agents.reading.host_memory import HostMemory, HostRanges
from restow.agents.reading.lane import MAPPED, Flight, Known, Read
from restow.agents.reading.same_host import HostPeer
from restow.broker.layout.rows import Int64s

PIECE_BYTES = 1 << 30
"""Longest piece of a launch, whose kernel counts the bytes of a piece in 32 bits."""
NO_RANGES = HostRanges.of([])


class RunningCopy(Protocol):
    """Copies that a device makes. Both methods raise `CopyFailedError`."""

    def has_ended(self) -> bool:
        """Return whether every byte is in place."""

    def wait(self) -> None:
        """Wait until no byte of the copies lands any more."""


class MappedPeer:
    """A peer whose memory is mapped into this process, until `close`."""

    def __init__(
        self, name: str, memory: HostMemory, place: MemoryPlace, driver: CudaDriver | None
    ) -> None:
        """Map what the peer shows. Raises an `AgentError` if not all of it is at ``place``."""
        self._process = HostPeer(name, memory, NO_RANGES)
        shown = memory.mappable(self._process.bytes_at)
        if not shown.areas or len(shown.areas) != len(shown.addresses):
            raise PeerLostError(f"agent {name} lets nobody map its memory", agent=name)
        with contextlib.ExitStack() as stack:
            areas = stack.enter_context(OpenedRegions(shown.areas, driver))
            if {area.place for area in areas} != {place}:
                raise PeerLostError(f"the memory of agent {name} is not at {place}", agent=name)
            begin = np.array(shown.addresses, np.uint64).astype(np.int64)
            order = np.argsort(begin)
            length = np.array([area.length_bytes for area in areas], np.int64)
            here = np.array([area.base_address for area in areas], np.int64)
            self._ranges = HostRanges(begin[order], (begin + length)[order])
            self._moved_bytes = (here - begin)[order]
            self.close = stack.pop_all().close

    def holds(self, descriptors: Descriptors) -> bool:
        """Return whether all pieces lie inside the memory that is mapped."""
        return self._ranges.hold(descriptors.src_address, descriptors.length_bytes)

    def addresses_here(self, address: Int64s) -> Int64s:
        """Return where bytes of the peer lie in this process."""
        index = np.searchsorted(self._ranges.begin, address, "right") - 1
        return address + self._moved_bytes[index]

    def check_mark(self) -> None:
        """Raise `PeerLostError` or `ReadFailedError` unless the peer shows its memory still."""
        self._process.check_mark()


class SameDevice:
    """A `Transport` for memory of other processes that lies at the same place as this rank's."""

    kind = MAPPED

    def __init__(
        self,
        place: MemoryPlace,
        own: HostRanges,
        copy: Callable[[Int64s, Int64s, Int64s], RunningCopy],
        driver: CudaDriver | None = None,
    ) -> None:
        """Read into ``own`` memory at ``place``.

        ``copy`` begins to copy pieces of these source addresses, destination addresses and lengths,
        and raises `CopyFailedError`. ``driver`` None means the host's driver.
        """
        self._place = place
        self._own = own
        self._copy = copy
        self._driver = driver
        self._peers: dict[str, MappedPeer | None] = {}
        """Peers by name; None for a peer that can't be mapped."""

    def prepare(self, peer: str, known: Known) -> None:
        """Map the peer's memory, once."""
        if peer in self._peers:
            return
        self._peers[peer] = None
        if known.host_memory is not None:
            with contextlib.suppress(AgentError):
                self._peers[peer] = MappedPeer(peer, known.host_memory, self._place, self._driver)

    def takes(self, read: Read) -> bool:
        """Return whether all that is read is mapped."""
        peer = self._peers.get(read.peer)
        is_here = read.src.kind is self._place.kind and read.dst == self._place
        return is_here and peer is not None and peer.holds(read.descriptors)

    def post(self, read: Read, check: Callable[[], None]) -> Flight:
        """Begin to copy."""
        peer = self._mapped(read.peer)
        pieces = read.descriptors.cut(PIECE_BYTES)
        if not self._own.hold(pieces.dst_address, pieces.length_bytes):
            raise ReadFailedError(
                f"pieces of agent {read.peer} would land outside of the memory registered here",
                agent=read.peer,
            )
        check()
        here = peer.addresses_here(pieces.src_address)
        try:
            copy = self._copy(here, pieces.dst_address, pieces.length_bytes)
        except CopyFailedError as error:
            raise ReadFailedError(str(error), agent=read.peer) from error
        return Flight(read.peer, copy, False)

    def poll(self, flight: Flight) -> bool:
        """Return whether every byte is in place, and was the peer's until then."""
        try:
            if not flight.done and flight.handle.has_ended():
                self._mapped(flight.peer).check_mark()
                flight.done = True
        except CopyFailedError as error:
            raise ReadFailedError(str(error), agent=flight.peer) from error
        return flight.done

    def _mapped(self, name: str) -> MappedPeer:
        peer = self._peers.get(name)
        if peer is None:
            raise PeerLostError(f"the memory of agent {name} is not mapped", agent=name)
        return peer

    def release(self, flight: Flight) -> None:
        """Wait for a copy that was given up: the device can't be told to stop it."""
        copy, flight.handle = flight.handle, None
        if copy is not None and not flight.done:
            with contextlib.suppress(CopyFailedError):  # a broken device writes no more
                copy.wait()

    def forget(self, peer: str) -> None:
        """Unmap the peer's memory."""
        mapped = self._peers.pop(peer, None)
        if mapped is not None:
            with contextlib.suppress(AgentError):
                mapped.close()

    def progress(self) -> None:
        """Do nothing, because there are no connections."""

    def close(self) -> None:
        """Unmap all memory; no read is in flight."""
        for peer in list(self._peers):
            self.forget(peer)
