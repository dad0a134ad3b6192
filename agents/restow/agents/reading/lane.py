"""Transports that read from other agents, and lanes: transports with their reads in flight."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, Protocol

from restow.agents.binding.reads import Descriptors
from restow.agents.memory.errors import (
    AgentClosedError,
    AgentError,
    PeerLostError,
    ReadDeadlineError,
    ReadFailedError,
    ReadNotBegunError,
)
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
        """Return whether this transport of a lane should do a read, and not a later transport."""

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


NIXL = "nixl"
PROCESS_VM_READV = "process_vm_readv"
MAPPED = "mapped"
KINDS = (NIXL, PROCESS_VM_READV, MAPPED)
"""Kinds of all transports."""


@dataclass(slots=True)
class ReadCounts:
    """Counts the reads of one kind of transport since its agent started."""

    reads: int = 0
    """Reads that succeeded."""
    read_bytes: int = 0
    """Bytes of the reads that succeeded."""
    errors: int = 0
    """Reads that failed, and connections that failed before a read."""

    def add(self, other: ReadCounts) -> None:
        """Add another's counts."""
        self.reads += other.reads
        self.read_bytes += other.read_bytes
        self.errors += other.errors


CountsByKind = dict[str, ReadCounts]


def no_reads(transports: Iterable[Transport] = ()) -> CountsByKind:
    """Return zero counts for all kinds, and for those of ``transports``."""
    return {kind: ReadCounts() for kind in (*KINDS, *(transport.kind for transport in transports))}


def add_all(counts: CountsByKind, others: Mapping[str, ReadCounts]) -> None:
    """Add the counts of each kind in ``others``."""
    for kind, other in others.items():
        counts.setdefault(kind, ReadCounts()).add(other)


BUSY_S = 0.001
ALERT_S = 0.005
ALERT_FOR_S = 10.0
REST_S = 0.1
SUSPECT_FOR_S = 0.05
WORK_S = 150e-6
"""Ticks that take longer had work to do; an idle tick takes 2 to 80 us.

A tick after a large read, which leaves nothing in the caches, may take longer without work, but not
the next tick too.
"""


class Ticker:
    """Calls ``work`` on an event loop, for peers that read over transports which need this side.

    A long tick may have had work to do, so the next tick follows at once. After two long ticks in
    a row more work is likely. A rank that nobody reads ticks rarely, because a host has many
    ranks.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        """Prepare; `start` begins, and ``work`` must not block."""
        self._work = work
        self._worked_s = self._suspected_s = -ALERT_FOR_S
        self._took_long = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Tick on ``loop``, or on the running loop."""
        self._loop = loop or asyncio.get_running_loop()
        self._plan()

    def stop(self) -> None:
        """Stop ticking. May be called again."""
        self._loop = None
        if self._next is not None:
            self._next.cancel()

    def expect_work(self) -> None:
        """Tick often, because work is about to come."""
        self._worked_s = time.monotonic()
        self._plan()

    def _tick(self) -> None:
        # Count processor time, because on a crowded host an idle tick may last long too.
        began_s = time.thread_time()
        try:
            self._work()
        finally:
            took_long = time.thread_time() - began_s > WORK_S
            if took_long and self._took_long:
                self._worked_s = time.monotonic()
            elif took_long:
                self._suspected_s = time.monotonic()
            self._took_long = took_long
            self._plan()

    def _plan(self) -> None:
        if self._next is not None:
            self._next.cancel()
        if self._loop is not None:
            now_s = time.monotonic()
            pause = pause_s(now_s - self._worked_s)
            if now_s - self._suspected_s < SUSPECT_FOR_S:
                pause = min(pause, pause_s(now_s - self._suspected_s))
            self._next = self._loop.call_later(pause, self._tick)


def pause_s(idle_s: float) -> float:
    """Return the pause after ``idle_s`` without work: a quarter of it, within bounds."""
    if idle_s >= ALERT_FOR_S:
        return REST_S
    return min(max(idle_s / 4, BUSY_S), ALERT_S)


class Lane:
    """Transports that read, and their reads in flight.

    `post` may be called on any thread and may take as long as the bytes need. All other methods
    belong to the event loop, and do nothing while another thread posts (``busy``).
    """

    def __init__(self, transports: Sequence[Transport]) -> None:
        """Use ``transports``, of which the last takes every read that no other takes."""
        self.readers = 0
        """Calls of `Reader.read` that still use the lane."""
        self.until_s = inf
        """When its last reads are given up, after the lane was retired."""
        self.closed = asyncio.Event()
        self._closing = False
        self._transports = transports
        self._lock = threading.Lock()
        self._flying: dict[Flight, Transport] = {}
        """Reads that may still write, including reads that were given up."""
        self._broken: set[tuple[Transport, str]] = set()
        """Peers whose connection broke and must be prepared again."""
        self._leaving: set[str] = set()
        """Peers to forget once none of their reads may still write."""
        self.counts = no_reads(transports)
        """Counts of its reads, changed under the lock."""

    @property
    def busy(self) -> bool:
        """Whether a thread posts now."""
        return self._lock.locked()

    def post(
        self, read: Read, known: Known, deadline_s: float, clock: Callable[[], float]
    ) -> Flight:
        """Begin a read; between processes of one host all is read when this returns.

        Raises `ReadNotBegunError`, `ReadDeadlineError`, `PeerLostError`, `ReadFailedError` and
        `AgentClosedError`.
        """

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
            self._leaving.discard(read.peer)
            transport = self._prepared(read, known)
            try:
                flight = transport.post(read, check)
            except Exception as error:
                self.counts[transport.kind].errors += 1
                if isinstance(error, PeerLostError):
                    self._broken.add((transport, read.peer))
                raise
            flight.size_bytes = read.descriptors.size_bytes
            self._flying[flight] = transport
            return flight

    def connect(self, peer: str, known: Known) -> None:
        """Prepare a peer before its first read. If that fails, the first read tries it again."""
        with self._lock, suppress(AgentError):
            if not self._closing and peer not in self._leaving:
                for transport in self._transports:
                    transport.prepare(peer, known)

    def _prepared(self, read: Read, known: Known) -> Transport:
        """Return the transport for a read, with the peer prepared. Raises `PeerLostError`."""
        for transport in self._transports:
            broken = transport, read.peer
            if broken in self._broken and not self._flies_from(read.peer):
                transport.forget(read.peer)
                self._broken.discard(broken)
            try:
                transport.prepare(read.peer, known)
            except PeerLostError:
                self.counts[transport.kind].errors += 1
                self._broken.add(broken)
                raise
            if transport.takes(read):
                return transport
        raise ReadFailedError(f"no transport takes a read from {read.peer}", agent=read.peer)

    def has_ended(self, flight: Flight) -> bool:
        """Return whether a read will write no more, and free what it held if so.

        Raises `PeerLostError` and `ReadFailedError` if the read has ended with a failure.
        """
        if not self._lock.acquire(blocking=False):
            return False
        transport = self._flying.get(flight)
        try:
            if transport is None:
                return True
            if not self.closed.is_set():
                if not transport.poll(flight):
                    return False
                counts = self.counts[transport.kind]
                counts.reads += 1
                counts.read_bytes += flight.size_bytes
            self._drop(flight)
            return True
        except AgentError:
            if transport is not None:
                self.counts[transport.kind].errors += 1
                self._broken.add((transport, flight.peer))
            self._drop(flight)
            raise
        finally:
            self._lock.release()

    def _drop(self, flight: Flight) -> None:
        transport = self._flying.pop(flight, None)
        if transport is not None:
            transport.release(flight)

    def progress(self) -> None:
        """Let connections be made and broken."""
        if self._lock.acquire(blocking=False):
            try:
                for transport in self._transports:
                    transport.progress()
                self._tidy()
            finally:
                self._lock.release()

    def forget_peer(self, peer: str) -> None:
        """Forget a peer's metadata once none of its reads can land any more."""
        self._leaving.add(peer)
        if self._lock.acquire(blocking=False):
            try:
                self._tidy()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Stop all writing. Waits for a post to end. May be called again."""
        self._closing = True
        with self._lock:
            if self.closed.is_set():
                return
            for flight, transport in list(self._flying.items()):
                self.counts[transport.kind].errors += 1
                self._drop(flight)
            for transport in self._transports:
                transport.close()
            self.closed.set()

    def _flies_from(self, peer: str) -> bool:
        return any(flight.peer == peer for flight in self._flying)

    def _tidy(self) -> None:
        if self._leaving and not self.closed.is_set():
            for peer in [peer for peer in self._leaving if not self._flies_from(peer)]:
                for transport in self._transports:
                    transport.forget(peer)
                    self._broken.discard((transport, peer))
                self._leaving.discard(peer)


def not_begun() -> ReadNotBegunError:
    """Return the error of a grant that ended before anything was read."""
    return ReadNotBegunError("other handoffs were read until the grant ended")


def late() -> ReadDeadlineError:
    """Return the error of a grant that ended during a read."""
    return ReadDeadlineError("the grant ended before the last byte was in place")
