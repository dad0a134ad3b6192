"""A reader on transports whose reads end when the test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from agent_harness.waiting import until
from restow.agents.binding.reads import Descriptors
from restow.agents.memory.errors import AgentError
from restow.agents.memory.regions import HOST
from restow.agents.reading.lane import Flight, Known, Read, Transport
from restow.agents.reading.reader import Reader

QUARANTINE_S = 10.0


def one_byte(peer: str) -> Read:
    return Read(peer, Descriptors.single(1, 1, 1), HOST, HOST)


class FakeTransport:
    """Reads fly until `end` or `fail`; writing on is what a closed transport must not do."""

    kind = "fake"

    def __init__(self) -> None:
        self.peers: list[str] = []
        self.added: list[str] = []
        self.ends: dict[str, Exception | None] = {}
        self.closed = False
        self.posted: list[Flight] = []
        self.pieces: list[Descriptors] = []
        self.threads: list[int] = []
        self.copies = False
        """Whether all is read when a post returns, as on CMA."""
        self.go_on = threading.Event()
        """Posts wait for it."""
        self.go_on.set()
        self.refusal: AgentError | None = None
        """What a post raises."""

    def prepare(self, peer: str, known: Known) -> None:
        if peer not in self.peers:
            self.peers.append(peer)
            self.added.append(peer)

    def takes(self, read: Read) -> bool:
        return True

    def forget(self, peer: str) -> None:
        if peer in self.peers:
            assert all(f.peer != peer or f.handle is None for f in self.posted), "still flying"
            self.peers.remove(peer)

    def post(self, read: Read, check: Callable[[], None]) -> Flight:
        assert not self.closed
        if self.refusal is not None:
            raise self.refusal
        flight = Flight(read.peer, object(), self.copies)
        self.threads.append(threading.get_ident())
        self.pieces.append(read.descriptors)
        self.posted.append(flight)
        assert self.go_on.wait(10)
        return flight

    def poll(self, flight: Flight) -> bool:
        assert not self.closed
        if flight.done:
            return True
        if flight.peer not in self.ends:
            return False
        failure = self.ends[flight.peer]
        if failure is not None:
            raise failure
        return True

    def release(self, flight: Flight) -> None:
        flight.handle = None

    def close(self) -> None:
        assert all(flight.handle is None for flight in self.posted), "a flight was not released"
        self.closed = True

    def progress(self) -> None:
        return


class Scene:
    """A reader, its clock, and all transports that it opened."""

    def __init__(self, copies: bool = False) -> None:
        self.now_s = 100.0
        self.copies = copies
        self.lanes: list[FakeTransport] = []
        self.reader = Reader(self._open, QUARANTINE_S, lambda: self.now_s)
        for peer in ("a", "b"):
            self.reader.add_peer(peer, b"metadata")

    def _open(self) -> list[Transport]:
        self.lanes.append(FakeTransport())
        self.lanes[-1].copies = self.copies
        return [self.lanes[-1]]

    async def begin(self, *peers: str, deadline_s: float = 101.0) -> asyncio.Task[None]:
        """Start one read from each peer; return the reader's task once all reads are posted."""
        before = sum(len(lane.posted) for lane in self.lanes)
        reads = map(one_byte, peers)
        task = asyncio.create_task(self.reader.read(list(reads), deadline_s))
        await until(lambda: sum(len(x.posted) for x in self.lanes) == before + len(peers))
        return task

    async def be_late(self) -> None:
        """Pass the usual deadline."""
        self.now_s = 101.1
        await self.settle()

    async def settle(self) -> None:
        """Let every task see the present time and the present state."""
        for _ in range(20):
            await asyncio.sleep(0.001)
