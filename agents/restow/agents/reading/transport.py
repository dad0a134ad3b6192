"""A way to read from other agents, behind a few verbs. A lane has one of each, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from restow.agents.binding.reads import Descriptors
from restow.agents.memory.regions import MemoryPlace
from restow.agents.reading.host_memory import HostMemory


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Pieces to read from one peer, all from one place to one place."""

    peer: str
    descriptors: Descriptors
    src: MemoryPlace
    dst: MemoryPlace
    alone: bool = False
    """By one thread, because it is measured."""


@dataclass(slots=True, eq=False)
class Flight:
    """A read that was posted. ``done`` once every byte is in place."""

    peer: str
    handle: Any
    done: bool
    size_bytes: int = 0
    """The lane's, to count."""


class Known(NamedTuple):
    """What a peer shows of itself."""

    metadata: bytes
    """NIXL's."""
    host_memory: HostMemory | None = None
    """For processes of its own host; None: it shows nothing."""


class Transport(Protocol):
    """Used by one thread at a time. A failed read has ended; a read that flies may still write."""

    kind: str
    """What reads are counted under."""

    def prepare(self, peer: str, known: Known) -> None:
        """Make a peer readable; one that is stays as it is.

        Raises `PeerLostError`. Where a peer can't be read in this way at all, it is not taken.
        """

    def takes(self, read: Read) -> bool:
        """Whether this is the way for a read, of this one and those behind it."""

    def post(self, read: Read, check: Callable[[], None]) -> Flight:
        """Begin to read; may take as long as the bytes need, and asks ``check`` now and then.

        Raises `PeerLostError`, `ReadFailedError` and what ``check`` does.
        """

    def poll(self, flight: Flight) -> bool:
        """Whether every byte is in place. Raises `PeerLostError` and `ReadFailedError`."""

    def release(self, flight: Flight) -> None:
        """Free what is kept for a read. May be repeated."""

    def forget(self, peer: str) -> None:
        """Drop what is known of a peer, of which nothing flies. May be repeated."""

    def progress(self) -> None:
        """Let connections be made and broken."""

    def close(self) -> None:
        """End: no byte of any read lands after this. Release every flight before."""

    def words(self, peer: str) -> str:
        """What to say of how a prepared peer is read, beside NIXL's transport; "": nothing."""
