"""Reading from peers, so that the end of a read is the end of its writing.

NIXL does not cancel: a read that timed out may still write, even when its handle was released and
its peer removed; only the end of the NIXL agent stops it. Hence

    Law: when `Reader.read` returns or raises, no byte of its reads lands any more.

A read that failed is first given ``quarantine_s`` to end by itself. If it does not (a peer that is
stopped, not dead), the lane that it flew on is retired: it takes no new reads, and when its other
reads have ended, its NIXL agent is closed. New reads get a new lane meanwhile. Nobody reads from a
lane, so that closing one is nobody else's business.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from restow.agents.binding import Descriptors
from restow.agents.errors import AgentClosedError, AgentError, PeerLostError, ReadDeadlineError
from restow.agents.memory import Place
from restow.agents.transport import Flight, NixlTransport

SPIN_S = 0.002
POLL_S = 0.001


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Pieces to read from one peer, all from one place to one place."""

    peer: str
    descriptors: Descriptors
    src: Place
    dst: Place


@dataclass(slots=True, eq=False)
class _Lane:
    """A NIXL agent that reads, and what flies on it."""

    transport: NixlTransport
    readers: int = 0
    """Calls of `Reader.read` that have not given up on the lane."""
    flying: set[Flight] = field(default_factory=set)
    """Reads that may still write, those that were given up too."""
    broken: set[str] = field(default_factory=set)
    """Peers whose connection broke: to be added anew."""
    retired: bool = False
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def flies_from(self, peer: str) -> bool:
        """Whether a read of the peer may still write."""
        return any(flight.peer == peer for flight in self.flying)

    def close(self) -> None:
        """Stop all writing."""
        for flight in self.flying:
            self.transport.release(flight)
        self.flying.clear()
        self.transport.close()
        self.closed.set()


class Reader:
    """Reads from peers. Belongs to one event loop, on which it keeps others running."""

    def __init__(
        self,
        open_transport: Callable[[], NixlTransport],
        quarantine_s: float = 6.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the first lane. ``open_transport`` registers what reads may land in."""
        self._open_transport = open_transport
        self._quarantine_s = quarantine_s
        self._clock = clock
        self._metadata: dict[str, bytes] = {}
        self._lane: _Lane | None = _Lane(open_transport())
        self._retired: list[_Lane] = []
        self._closed = False
        self._log = structlog.get_logger("restow.agent")

    @property
    def retired_lanes(self) -> int:
        """Lanes that wait for their last reads."""
        return len(self._retired)

    def add_peer(self, peer: str, metadata: bytes) -> None:
        """Know a peer; it is connected by its first read."""
        self._metadata[peer] = metadata

    def forget_peer(self, peer: str) -> None:
        """A peer is gone: its reads in flight fail, new ones are refused. May be repeated."""
        self._metadata.pop(peer, None)
        for lane in self._lanes():
            self._disconnect(lane, peer)

    async def read(self, reads: Sequence[Read], deadline_s: float) -> None:
        """Read everything before ``deadline_s`` of the clock.

        Raises `ReadDeadlineError`, `PeerLostError`, `ReadFailedError`, `TransportFailedError` and
        `AgentClosedError`.
        """
        if self._lane is None:
            self._lane = _Lane(self._open_transport())
        lane = self._lane
        lane.readers += 1
        try:
            failure, stuck = await self._fly(lane, reads, deadline_s)
        finally:
            self._leave(lane)
        if stuck:
            await lane.closed.wait()
        if failure is not None:
            raise failure

    def progress(self) -> None:
        """Let connections be made and broken while nothing is read."""
        if self._lane is not None:
            self._lane.transport.progress()

    def close(self) -> None:
        """End all lanes: nothing lands any more."""
        self._closed = True
        for lane in self._lanes():
            lane.close()
        self._lane = None
        self._retired.clear()

    # -- inside -----------------------------------------------------------------------------------

    def _lanes(self) -> list[_Lane]:
        return [*self._retired, *([self._lane] if self._lane else [])]

    async def _fly(
        self, lane: _Lane, reads: Sequence[Read], deadline_s: float
    ) -> tuple[AgentError | None, bool]:
        """Post, and wait for the end of every read or of the quarantine.

        Returns the failure, and whether a read may still write.
        """
        flying: list[Flight] = []
        failure: AgentError | None = None
        for read in reads:
            if self._clock() > deadline_s:
                failure = _late()
                break
            try:
                flying.append(self._post(lane, read))
            except AgentError as error:
                failure = error
                break
            await asyncio.sleep(0)
        spin_until_s = self._clock() + SPIN_S
        give_up_s = float("inf")
        while True:
            flying, broken = self._still_flying(lane, flying)
            failure = failure or broken
            if self._closed:
                return AgentClosedError("the agent was closed during a read"), False
            now_s = self._clock()
            if failure is None:
                failure = self._refusal(flying, now_s, deadline_s)
            if not flying:
                return failure, False
            if failure is not None:
                give_up_s = min(give_up_s, now_s + self._quarantine_s)
            if now_s > give_up_s:
                self._retire(lane, flying)
                return failure, True
            await asyncio.sleep(0 if now_s < spin_until_s else POLL_S)

    def _post(self, lane: _Lane, read: Read) -> Flight:
        metadata = self._metadata.get(read.peer)
        if metadata is None:
            raise PeerLostError(f"agent {read.peer} is not known here", agent=read.peer)
        if read.peer in lane.broken and not lane.flies_from(read.peer):
            lane.transport.forget_peer(read.peer)
            lane.broken.discard(read.peer)
        try:
            lane.transport.add_peer(read.peer, metadata)
            flight = lane.transport.read(read.peer, read.descriptors, read.src, read.dst)
        except PeerLostError:
            lane.broken.add(read.peer)
            raise
        lane.flying.add(flight)
        return flight

    def _still_flying(
        self, lane: _Lane, flying: list[Flight]
    ) -> tuple[list[Flight], AgentError | None]:
        """Poll all; those that have not ended, and the first failure."""
        rest, failure = [], None
        for flight in flying:
            try:
                ended = self._closed or lane.transport.poll(flight)
            except AgentError as error:
                failure = failure or error
                lane.broken.add(flight.peer)
                ended = True
            if not ended:
                rest.append(flight)
                continue
            lane.transport.release(flight)
            lane.flying.discard(flight)
            if flight.peer not in self._metadata:
                self._disconnect(lane, flight.peer)
        return rest, failure

    def _refusal(
        self, flying: Sequence[Flight], now_s: float, deadline_s: float
    ) -> AgentError | None:
        """Why reads that may still be well are not waited for."""
        if now_s > deadline_s:
            return _late()
        for flight in flying:
            if flight.peer not in self._metadata:
                return PeerLostError(f"agent {flight.peer} is gone", agent=flight.peer)
        return None

    def _disconnect(self, lane: _Lane, peer: str) -> None:
        """Forget a peer's metadata, unless a read of it may still land."""
        if not lane.flies_from(peer) and not lane.closed.is_set():
            lane.transport.forget_peer(peer)
            lane.broken.discard(peer)

    def _retire(self, lane: _Lane, stuck: Sequence[Flight]) -> None:
        if lane.retired:
            return
        peers = sorted({flight.peer for flight in stuck})
        self._log.warning("reads do not end, so their lane is given up", peers=peers)
        lane.retired = True
        self._retired.append(lane)
        self._lane = None

    def _leave(self, lane: _Lane) -> None:
        lane.readers -= 1
        if lane.retired and not lane.readers and not lane.closed.is_set():
            self._retired.remove(lane)
            lane.close()


def _late() -> ReadDeadlineError:
    return ReadDeadlineError("the grant ended before the last byte was in place")
