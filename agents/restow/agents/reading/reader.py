"""Reading from peers, so that the end of a read is the end of its writing.

NIXL does not cancel: a read that timed out may still write, even when its handle was released and
its peer removed; only the end of the NIXL agent stops it. Hence

    Law: when `Reader.read` returns or raises, no byte of its reads lands any more.

A read that failed is first given ``quarantine_s`` to end by itself. If it does not (a peer that is
stopped, not dead), the lane that it flew on is retired: it takes no new reads, and when its other
reads have ended, its transports are closed. New reads get a new lane meanwhile. Nobody reads from a
lane, so that closing one is nobody else's business.

Between processes of one host the thread that posts a read copies all of it, by NIXL (CMA) or by
`same_host`, so large reads are posted on threads of their own, and those from a peer that is known
to be read so are shared out over several lanes, while there are cores for them (`spreading`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import structlog

from restow.agents.errors import (
    AgentClosedError,
    AgentError,
    PeerLostError,
    ReadNotBegunError,
)
from restow.agents.reading.host_memory import HostMemory
from restow.agents.reading.lane import Lane, late, not_begun
from restow.agents.reading.spreading import Spreading
from restow.agents.reading.transport import Flight, Known, Read, Transport

SPIN_S = 0.002
POLL_S = 0.001
LARGE_BYTES = 1 << 20
"""From here on a read may keep a thread for longer than an event loop should be kept."""
SHARE_BYTES = 4 << 20
"""What a lane must get for the share to be worth another thread."""

_Posted = list[tuple[Lane, Flight]]


class Reader:
    """Reads from peers. Belongs to one event loop, on which it keeps others running."""

    def __init__(
        self,
        open_transports: Callable[[], Sequence[Transport]],
        quarantine_s: float = 6.0,
        clock: Callable[[], float] = time.monotonic,
        threads: int = 1,
    ) -> None:
        """Open the first lane; others, up to ``threads``, when they can help.

        ``open_transports`` opens those of a lane, as `Lane` wants them; on other threads too.
        """
        self._open_transports = open_transports
        self._quarantine_s = quarantine_s
        self._clock = clock
        self._width = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="restow-read")
        self._known: dict[str, Known] = {}
        self._lanes = [Lane(open_transports())]
        self._opening: Future[Sequence[Transport]] | None = None
        self._retired: list[Lane] = []
        self._copied: set[str] = set()
        """Peers whose bytes are copied by the thread that posts."""
        self._spreading = Spreading()
        self._closed = False
        self._log = structlog.get_logger("restow.agent")

    @property
    def retired_lanes(self) -> int:
        """Lanes that wait for their last reads."""
        return len(self._retired)

    @property
    def lanes(self) -> int:
        """Lanes that take new reads."""
        return len(self._lanes)

    def add_peer(self, peer: str, metadata: bytes, host_memory: HostMemory | None = None) -> None:
        """Know a peer; what has to connect does so with its first read."""
        self._known[peer] = Known(metadata, host_memory)

    def words(self, peer: str) -> str:
        """What to say of how a peer is read, beside NIXL's transport; "": nothing."""
        known = self._known.get(peer)
        return self._lanes[0].words(peer, known) if known is not None and self._lanes else ""

    def forget_peer(self, peer: str) -> None:
        """A peer is gone: its reads in flight fail, new ones are refused. May be repeated."""
        self._known.pop(peer, None)
        self._copied.discard(peer)
        for lane in (*self._lanes, *self._retired):
            lane.forget_peer(peer)

    async def read(self, reads: Sequence[Read], deadline_s: float, alone: bool = False) -> None:
        """Read everything before ``deadline_s`` of the clock; ``alone``: by one thread.

        Raises `ReadNotBegunError`, `ReadDeadlineError`, `PeerLostError`, `ReadFailedError`,
        `TransportFailedError` and `AgentClosedError`.
        """
        shares = self._share_out(reads, 1 if alone else self._width)
        lanes = [lane for lane, _ in shares]
        for lane in lanes:
            lane.readers += 1
        try:
            failure, stuck = await self._fly(shares, deadline_s)
        finally:
            for lane in lanes:
                self._leave(lane)
        for lane in stuck:
            await lane.closed.wait()
        if failure is not None:
            raise failure

    def progress(self) -> None:
        """Let connections be made and broken while nothing is read."""
        for lane in self._lanes:
            lane.progress()

    def close(self) -> None:
        """End all lanes: nothing lands any more. Waits for threads that copy. May be repeated."""
        self._closed = True
        for lane in (*self._lanes, *self._retired):
            lane.close()
        self._threads.shutdown()
        if self._opening is not None and self._opening.exception() is None:
            for transport in self._opening.result():
                transport.close()
        self._opening = None
        self._lanes.clear()
        self._retired.clear()

    # -- lanes ------------------------------------------------------------------------------------

    def _share_out(self, reads: Sequence[Read], most: int) -> list[tuple[Lane, Sequence[Read]]]:
        """Which lane reads what: shares of about equal bytes, if several lanes make it faster."""
        if self._closed:
            raise AgentClosedError("the agent is closed")
        self._take_opened()
        if not self._lanes:
            self._lanes.append(Lane(self._open_transports()))
        count = 1
        most = min(most, len(self._lanes))
        if most > 1 and all(read.peer in self._copied for read in reads):
            size_bytes = sum(read.descriptors.size_bytes for read in reads)
            count = max(1, min(most, size_bytes // SHARE_BYTES))
        if count == 1 or not self._spreading.allows():
            return [(next((lane for lane in self._lanes if not lane.busy), self._lanes[0]), reads)]
        shares: list[list[Read]] = [[] for _ in range(count)]
        for read in reads:
            for share, part in zip(shares, read.descriptors.split(count), strict=True):
                if len(part.length_bytes):
                    share.append(replace(read, descriptors=part))
        return list(zip(self._lanes, shares, strict=False))

    def _take_opened(self) -> None:
        if self._opening is None or not self._opening.done():
            return
        opening, self._opening = self._opening, None
        try:
            self._lanes.append(Lane(opening.result()))
        except AgentError as error:
            self._log.warning("no further lane", reason=error.reason, detail=error.message)
            self._width = len(self._lanes)

    def _saw(self, read: Read, flight: Flight) -> None:
        """A large read was posted: learn whether more threads would make such reads faster."""
        if flight.done and self._width > 1 and read.peer in self._known:
            self._copied.add(read.peer)
            if len(self._lanes) < self._width and self._opening is None and not self._closed:
                self._opening = self._threads.submit(self._open_transports)

    def _retire(self, lane: Lane, peers: set[str]) -> None:
        if not lane.retired:
            self._log.warning("reads do not end: their lane is given up", peers=sorted(peers))
            lane.retired = True
            self._lanes.remove(lane)
            self._retired.append(lane)

    def _leave(self, lane: Lane) -> None:
        lane.readers -= 1
        if lane.retired and not lane.readers and not lane.closed.is_set():
            self._retired.remove(lane)
            lane.close()

    # -- reads ------------------------------------------------------------------------------------

    async def _fly(
        self, shares: Sequence[tuple[Lane, Sequence[Read]]], deadline_s: float
    ) -> tuple[AgentError | None, set[Lane]]:
        """Post, and wait for the end of every read or of the quarantine.

        Returns the failure, and the lanes on which a read may still write.
        """
        flying: _Posted = []
        began_s = time.perf_counter()
        posted = await asyncio.gather(
            *(self._post_all(lane, reads, deadline_s, flying) for lane, reads in shares)
        )
        failure = next((one for one, _ in posted if one is not None), None)
        if flying and isinstance(failure, ReadNotBegunError):
            failure = late()
        if len(shares) > 1 and failure is None:
            ran_s = sum(ran_s for _, ran_s in posted)
            self._spreading.saw(ran_s, time.perf_counter() - began_s)
        spin_until_s = self._clock() + SPIN_S
        give_up_s = float("inf")
        while True:
            flying, broken = self._still_flying(flying)
            failure = failure or broken
            if self._closed:
                return AgentClosedError("the agent was closed during a read"), set()
            now_s = self._clock()
            if failure is None:
                failure = self._refusal(flying, now_s, deadline_s)
            if not flying:
                return failure, set()
            if failure is not None:
                give_up_s = min(give_up_s, now_s + self._quarantine_s)
            if now_s > give_up_s:
                stuck = {lane for lane, _ in flying}
                for lane in stuck:
                    self._retire(lane, {flight.peer for on, flight in flying if on is lane})
                return failure, stuck
            await asyncio.sleep(0 if now_s < spin_until_s else POLL_S)

    async def _post_all(
        self, lane: Lane, reads: Sequence[Read], deadline_s: float, flying: _Posted
    ) -> tuple[AgentError | None, float]:
        """Post one after the other onto a lane, until one fails; for how long threads ran."""
        ran_s = 0.0
        for read in reads:
            try:
                flight, posting_s = await self._post(lane, read, deadline_s)
            except AgentError as error:
                return error, ran_s
            flying.append((lane, flight))
            ran_s += posting_s
        return None, ran_s

    async def _post(self, lane: Lane, read: Read, deadline_s: float) -> tuple[Flight, float]:
        """Post; for how long a thread ran for it, if it was one beside the event loop."""
        known = self._known.get(read.peer)
        if known is None:
            raise PeerLostError(f"agent {read.peer} is not known here", agent=read.peer)
        if self._clock() > deadline_s:
            raise not_begun()
        if self._closed:
            raise AgentClosedError("the agent was closed before a read")
        large = read.descriptors.size_bytes >= LARGE_BYTES
        if not large and not lane.busy:
            flight = lane.post(read, known, deadline_s, self._clock)
            await asyncio.sleep(0)
            return flight, 0.0
        loop = asyncio.get_running_loop()
        flight, ran_s = await loop.run_in_executor(
            self._threads, self._timed_post, lane, read, known, deadline_s
        )
        if large:
            self._saw(read, flight)
        return flight, ran_s

    def _timed_post(
        self, lane: Lane, read: Read, known: Known, deadline_s: float
    ) -> tuple[Flight, float]:
        """Post, and for how long this thread ran for it."""
        began_s = time.thread_time()
        flight = lane.post(read, known, deadline_s, self._clock)
        return flight, time.thread_time() - began_s

    def _still_flying(self, flying: _Posted) -> tuple[_Posted, AgentError | None]:
        """Poll all; those that have not ended, and the first failure."""
        rest: _Posted = []
        failure: AgentError | None = None
        for lane, flight in flying:
            try:
                if not lane.has_ended(flight):
                    rest.append((lane, flight))
                    continue
            except AgentError as error:
                failure = failure or error
            if flight.peer not in self._known:
                lane.forget_peer(flight.peer)
        return rest, failure

    def _refusal(self, flying: _Posted, now_s: float, deadline_s: float) -> AgentError | None:
        """Why reads that may still be well are not waited for."""
        if now_s > deadline_s:
            return late()
        for _, flight in flying:
            if flight.peer not in self._known:
                return PeerLostError(f"agent {flight.peer} is gone", agent=flight.peer)
        return None
