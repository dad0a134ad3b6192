"""A lane: one NIXL agent that only reads, for one thread at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from restow.agents.binding.pieces import Descriptors
from restow.agents.errors import (
    AgentClosedError,
    AgentError,
    PeerLostError,
    ReadDeadlineError,
    ReadNotBegunError,
)
from restow.agents.memory.regions import Place
from restow.agents.reading.nixl_transport import Flight, NixlTransport
from restow.agents.reading.same_host import HostPeer


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Pieces to read from one peer, all from one place to one place."""

    peer: str
    descriptors: Descriptors
    src: Place
    dst: Place


class Known(NamedTuple):
    """How a peer is read."""

    metadata: bytes
    """By NIXL."""
    host_peer: HostPeer | None = None
    """By this process itself, if it can."""


class Lane:
    """A NIXL agent that reads, and what flies on it.

    `post` may be called on any thread and may take as long as the bytes need. Everything else
    belongs to the event loop, and does nothing (``busy``) while another thread posts.
    """

    def __init__(self, transport: NixlTransport) -> None:
        """Nothing flies yet."""
        self.readers = 0
        """Calls of `Reader.read` that have not given up on the lane."""
        self.retired = False
        self.closed = asyncio.Event()
        self._closing = False
        self._transport = transport
        self._lock = threading.Lock()
        self._flying: set[Flight] = set()
        """Reads that may still write, those that were given up too."""
        self._broken: set[str] = set()
        """Peers whose connection broke: to be added anew."""
        self._leaving: set[str] = set()
        """Peers to forget as soon as no read of theirs may still write."""

    @property
    def busy(self) -> bool:
        """Whether a thread posts right now."""
        return self._lock.locked()

    def post(
        self, read: Read, known: Known, deadline_s: float, clock: Callable[[], float]
    ) -> Flight:
        """Begin to read; between processes of one host all is read when this returns.

        Raises `ReadNotBegunError`, `ReadDeadlineError`, `PeerLostError`, `ReadFailedError` and
        `AgentClosedError`.
        """
        peer, host_peer = read.peer, known.host_peer

        def check() -> None:
            if self._closing:
                raise AgentClosedError("the agent was closed before a read")
            if clock() > deadline_s:
                raise late()

        with self._lock:
            if not self._closing and clock() > deadline_s:
                raise not_begun()
            check()
            self._tidy()
            if host_peer is not None and host_peer.gains(read.descriptors, read.src, read.dst):
                host_peer.read(read.descriptors, check)
                return Flight(peer, None, True)
            self._leaving.discard(peer)
            if peer in self._broken and not self._flies_from(peer):
                self._transport.forget_peer(peer)
                self._broken.discard(peer)
            try:
                self._transport.add_peer(peer, known.metadata)
                flight = self._transport.read(peer, read.descriptors, read.src, read.dst)
            except PeerLostError:
                self._broken.add(peer)
                raise
            self._flying.add(flight)
            return flight

    def has_ended(self, flight: Flight) -> bool:
        """Whether a read will write no more; what it held is then free.

        Raises `PeerLostError` and `ReadFailedError`: it ended, but not well.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self.closed.is_set() and not self._transport.poll(flight):
                return False
            self._drop(flight)
            return True
        except AgentError:
            self._broken.add(flight.peer)
            self._drop(flight)
            raise
        finally:
            self._lock.release()

    def _drop(self, flight: Flight) -> None:
        self._transport.release(flight)
        self._flying.discard(flight)

    def progress(self) -> None:
        """Let connections be made and broken."""
        if self._lock.acquire(blocking=False):
            try:
                self._transport.progress()
                self._tidy()
            finally:
                self._lock.release()

    def forget_peer(self, peer: str) -> None:
        """Forget a peer's metadata, as soon as no read of it can land any more."""
        self._leaving.add(peer)
        if self._lock.acquire(blocking=False):
            try:
                self._tidy()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Stop all writing. Waits for a post to end. May be repeated."""
        self._closing = True
        with self._lock:
            if self.closed.is_set():
                return
            for flight in self._flying:
                self._transport.release(flight)
            self._flying.clear()
            self._transport.close()
            self.closed.set()

    def _flies_from(self, peer: str) -> bool:
        return any(flight.peer == peer for flight in self._flying)

    def _tidy(self) -> None:
        if self._leaving and not self.closed.is_set():
            for peer in [peer for peer in self._leaving if not self._flies_from(peer)]:
                self._transport.forget_peer(peer)
                self._broken.discard(peer)
                self._leaving.discard(peer)


def not_begun() -> ReadNotBegunError:
    """The grant is over, and nothing was read."""
    return ReadNotBegunError("others were read until the grant ended")


def late() -> ReadDeadlineError:
    """The grant is over."""
    return ReadDeadlineError("the grant ended before the last byte was in place")
