"""Reading by NIXL: takes whatever comes."""

from __future__ import annotations

from collections.abc import Callable

from restow.agents.reading.nixl_transport import NixlTransport
from restow.agents.reading.transport import Flight, Known, Read


class NixlReads:
    """A `Transport` on a NIXL agent that nobody reads from, so that it may be closed at any time.

    A peer is connected by its first read.
    """

    def __init__(self, nixl: NixlTransport) -> None:
        """``nixl`` has registered what reads may land in."""
        self._nixl = nixl

    def prepare(self, peer: str, known: Known) -> None:
        """Add the peer's metadata. Raises `PeerLostError`."""
        self._nixl.add_peer(peer, known.metadata)

    def takes(self, read: Read) -> bool:
        """Any."""
        return True

    def post(self, read: Read, check: Callable[[], None]) -> Flight:
        """Begin; on CMA the bytes are copied before this returns."""
        return self._nixl.read(read.peer, read.descriptors, read.src, read.dst)

    def poll(self, flight: Flight) -> bool:
        """As NIXL says. Makes progress."""
        return self._nixl.poll(flight)

    def release(self, flight: Flight) -> None:
        """Free NIXL's handle."""
        self._nixl.release(flight)

    def forget(self, peer: str) -> None:
        """Drop the peer's metadata."""
        self._nixl.forget_peer(peer)

    def progress(self) -> None:
        """Serve connections."""
        self._nixl.progress()

    def close(self) -> None:
        """End the NIXL agent."""
        self._nixl.close()

    def words(self, peer: str) -> str:
        """Nothing: over which transport NIXL reads is asked of UCX."""
        return ""
