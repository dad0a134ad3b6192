"""The interface of transports, which read from other agents. A lane tries them in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from restow.agents.binding.reads import Descriptors
from restow.agents.memory.regions import MemoryPlace
from restow.agents.reading.host_memory import HostMemory


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Pieces to read from one peer, all from the same place to the same place."""

    peer: str
    descriptors: Descriptors
    src: MemoryPlace
    dst: MemoryPlace
    alone: bool = False
    """Read on one thread, because the read is measured."""


@dataclass(slots=True, eq=False)
class Flight:
    """A posted read; ``done`` once every byte is in place."""

    peer: str
    handle: Any
    done: bool
    size_bytes: int = 0
    """Bytes of the read, set by the lane for its counts."""


class Known(NamedTuple):
    """The data with which a peer can be read."""

    metadata: bytes
    """The peer's NIXL metadata."""
    host_memory: HostMemory | None = None
    """Access for processes of the peer's host; None if it grants none."""


class Transport(Protocol):
    """A way to read from peers, for one thread at a time.

    A read that failed has ended; a read in flight may still write.
    """

    kind: str
    """Kind under which reads are counted."""

    def prepare(self, peer: str, known: Known) -> None:
        """Make a peer readable; does nothing if it is already.

        Raises `PeerLostError`. A transport that can never read the peer does not take its reads.
        """

    def takes(self, read: Read) -> bool:
        """Return whether this transport should do a read, rather than a later one of the lane."""

    def post(self, read: Read, check: Callable[[], None]) -> Flight:
        """Begin a read; may take as long as the bytes need, and calls ``check`` now and then.

        Raises `PeerLostError`, `ReadFailedError` and what ``check`` raises.
        """

    def poll(self, flight: Flight) -> bool:
        """Return whether every byte is in place. Raises `PeerLostError` and `ReadFailedError`."""

    def release(self, flight: Flight) -> None:
        """Free what is kept for a read. May be called again."""

    def forget(self, peer: str) -> None:
        """Forget a peer that has no reads in flight. May be called again."""

    def progress(self) -> None:
        """Let connections be made and broken."""

    def close(self) -> None:
        """Close: no byte of any read lands after this. Release every flight before."""

    def words(self, peer: str) -> str:
        """Describe how a prepared peer is read, beside NIXL's transport; may be empty."""
