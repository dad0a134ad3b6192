"""Read from peers, so that the end of a read is the end of its writing.

NIXL cannot cancel: a read that timed out may still write, even if its handle was released and its
peer removed. Only the end of the NIXL agent stops it. Hence

    Law: when `Reader.read` returns or raises, no byte of its reads lands any more.

A read that failed first gets ``quarantine_s`` to end by itself. If it does not end (its peer is
stopped, not dead), its lane is retired: the lane takes no new reads, and when its other reads have
ended, or after `RETIRED_S`, its transports are closed. New reads use a new lane meanwhile. No peer
reads from a lane, so closing a lane disturbs nobody.

Between processes of one host, the thread that posts a read copies all of it. So large reads are
posted on threads beside the event loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from restow.agents.memory.errors import (
    AgentClosedError,
    AgentError,
    PeerLostError,
    ReadNotBegunError,
)
from restow.agents.reading.host_memory import HostMemory
from restow.agents.reading.lane import (
    NIXL,
    CountsByKind,
    Flight,
    Known,
    Lane,
    Read,
    Transport,
    add_all,
    late,
    no_reads,
)
from restow.broker.logs import get_logger

SPIN_S = 0.002
POLL_S = 0.001
LARGE_BYTES = 1 << 20
"""A read of this size or more could block the event loop for too long."""
RETIRED_S = 10.0
"""How long other reads of a retired lane may take; they then fail as late, and can be repeated."""
POSTING_THREADS = 2
"""A lane posts one read at a time; the second thread serves while a given-up lane still posts."""


async def _accept_peer(peer: str, metadata: bytes) -> None:
    """Accept every peer."""


class Reader:
    """Reads from peers. Belongs to one event loop, which it does not block."""

    def __init__(
        self,
        open_transports: Callable[[], Sequence[Transport]],
        quarantine_s: float = 6.0,
        clock: Callable[[], float] = time.monotonic,
        try_peer: Callable[[str, bytes], Awaitable[None]] = _accept_peer,
    ) -> None:
        """Open a lane; ``open_transports`` opens its transports, in the order that `Lane` expects.

        ``try_peer`` is called for each peer that is added, and raises if the peer's metadata must
        not be loaded. The first read of the peer waits for its end.
        """
        self._open_transports = open_transports
        self._quarantine_s = quarantine_s
        self._clock = clock
        self._threads = ThreadPoolExecutor(POSTING_THREADS, thread_name_prefix="restow-read")
        self._known: dict[str, Known] = {}
        self._try_peer = try_peer
        self._trials: dict[str, asyncio.Future[None]] = {}
        """Trials whose end no read has seen yet."""
        self._passed: dict[str, Known] = {}
        self._lane: Lane | None = Lane(open_transports())
        """The lane of new reads; None after the last lane was retired."""
        self._retired: list[Lane] = []
        """Lanes that wait for their last reads."""
        self.lanes_given_up = 0
        self._past = no_reads()
        """Counts of closed lanes."""
        self._counting = threading.Lock()
        """Held while a lane changes its list, so that `counts` counts each lane once."""
        self._closed = False
        self._log = get_logger("restow.agent")

    def add_peer(self, peer: str, metadata: bytes, host_memory: HostMemory | None = None) -> None:
        """Add a peer and try its metadata; the first read connects it."""
        self._drop_trial(peer)
        known = self._known[peer] = Known(metadata, host_memory)
        self._trial(peer, known)

    def forget_peer(self, peer: str) -> None:
        """Forget a peer that is gone: reads of it fail or are refused. May be called again."""
        self._known.pop(peer, None)
        self._drop_trial(peer)
        for lane in self._lanes():
            lane.forget_peer(peer)

    async def read(self, reads: Sequence[Read], deadline_s: float) -> None:
        """Read everything before ``deadline_s`` of the clock.

        Raises `ReadNotBegunError`, `ReadDeadlineError`, `PeerLostError`, `ReadFailedError`,
        `TransportFailedError`, `AgentClosedError`, and what ``try_peer`` or a transport raises.
        """
        if self._closed:
            raise AgentClosedError("the agent is closed")
        if self._lane is None:
            self._lane = Lane(self._open_transports())
        lane = self._lane
        lane.readers += 1
        try:
            failure, is_stuck = await self._fly(lane, reads, deadline_s)
        finally:
            self._leave(lane)
        if is_stuck:
            await lane.closed.wait()
        if failure is not None:
            raise failure

    @property
    def lanes(self) -> int:
        """Number of open lanes."""
        return len(self._lanes())

    @property
    def counts(self) -> CountsByKind:
        """Counts of all reads so far, by kind of transport. May be read on any thread."""
        total = no_reads()
        with self._counting:
            for counts in (self._past, *(lane.counts for lane in self._lanes())):
                add_all(total, counts)
        return total

    def progress(self) -> None:
        """Let connections be made and broken while nothing is read."""
        if self._lane is not None:
            self._lane.progress()

    def close(self) -> None:
        """Close all lanes, after which nothing lands; waits for copies. May be called again."""
        self._closed = True
        for lane in self._lanes():
            lane.close()
        self._threads.shutdown()
        with self._counting:
            for lane in self._lanes():
                add_all(self._past, lane.counts)
            self._lane = None
            self._retired.clear()

    # -- lanes ------------------------------------------------------------------------------------

    def _lanes(self) -> list[Lane]:
        return self._retired if self._lane is None else [self._lane, *self._retired]

    def _retire(self, lane: Lane, peers: set[str]) -> None:
        if lane is self._lane:
            self._log.warning("reads do not end, so their lane is given up", peers=sorted(peers))
            with self._counting:
                self._lane = None
                self._retired.append(lane)
            lane.until_s = self._clock() + RETIRED_S
            self.lanes_given_up += 1

    def _leave(self, lane: Lane) -> None:
        lane.readers -= 1
        if lane in self._retired and not lane.readers:
            lane.close()
            with self._counting:
                self._retired.remove(lane)
                add_all(self._past, lane.counts)

    # -- reads ------------------------------------------------------------------------------------

    async def _fly(
        self, lane: Lane, reads: Sequence[Read], deadline_s: float
    ) -> tuple[Exception | None, bool]:
        """Post the reads, and wait for the end of every read or of the quarantine.

        Returns the failure, and whether a read may still write.
        """
        flying: list[Flight] = []
        failure: Exception | None = None
        try:
            for read in reads:
                flying.append(await self._post(lane, read, deadline_s))
        except Exception as error:  # noqa: BLE001 - raised when the reads in flight have ended
            failure = late() if flying and isinstance(error, ReadNotBegunError) else error
        spin_until_s = self._clock() + SPIN_S
        give_up_s = float("inf")
        while True:
            flying, broken = self._still_flying(lane, flying)
            failure = failure or broken
            if self._closed:
                return AgentClosedError("the agent was closed during a read"), False
            now_s = self._clock()
            if failure is None:
                failure = self._refusal(flying, now_s, min(deadline_s, lane.until_s))
            if not flying:
                return failure, False
            if failure is not None:
                give_up_s = min(give_up_s, now_s + self._quarantine_s)
            if now_s > min(give_up_s, lane.until_s):
                self._retire(lane, {flight.peer for flight in flying})
                return failure, True
            await asyncio.sleep(0 if now_s < spin_until_s else POLL_S)

    async def _post(self, lane: Lane, read: Read, deadline_s: float) -> Flight:
        known = self._known.get(read.peer)
        if known is None:
            raise PeerLostError(f"agent {read.peer} is not known here", agent=read.peer)
        if self._passed.get(read.peer) is not known:
            await self._pass_trial(read.peer, known, deadline_s)
        if self._closed:
            raise AgentClosedError("the agent was closed before a read")
        if read.descriptors.size_bytes < LARGE_BYTES and not lane.busy:
            flight = lane.post(read, known, deadline_s, self._clock)
            await asyncio.sleep(0)
            return flight
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lane.post, read, known, deadline_s, self._clock
        )

    async def _pass_trial(self, peer: str, known: Known, deadline_s: float) -> None:
        """Wait for a peer's trial. A trial that takes longer than this read serves the next."""
        trial = self._trial(peer, known)
        await asyncio.wait([trial], timeout=max(0.0, deadline_s - self._clock()))
        if not trial.done():
            raise ReadNotBegunError(f"the trial of agent {peer} lasted until the grant ended")
        if self._trials.get(peer) is trial:
            del self._trials[peer]
        try:
            trial.result()
        except AgentError:
            self._past[NIXL].errors += 1
            raise
        if self._known.get(peer) is known:
            self._passed[peer] = known

    def _trial(self, peer: str, known: Known) -> asyncio.Future[None]:
        """Return the peer's trial, which begins unless it has begun.

        A read does not fail for a trial that failed before it: the peer is tried again.
        """

        def after_trial(trial: asyncio.Future[None]) -> None:
            if trial.cancelled() or trial.exception() is not None:
                if self._trials.get(peer) is trial:
                    del self._trials[peer]
                return
            lane = self._lane
            if lane is not None and not lane.busy and self._known.get(peer) is known:
                lane.connect(peer, known)

        trial = self._trials.get(peer)
        if trial is None:
            loop = asyncio.get_running_loop()
            trial = asyncio.ensure_future(self._try_peer(peer, known.metadata), loop=loop)
            trial.add_done_callback(after_trial)
            self._trials[peer] = trial
        return trial

    def _drop_trial(self, peer: str) -> None:
        self._trials.pop(peer, None)
        self._passed.pop(peer, None)

    def _still_flying(
        self, lane: Lane, flying: Sequence[Flight]
    ) -> tuple[list[Flight], Exception | None]:
        """Poll all reads; return those still in flight, and the first failure."""
        rest: list[Flight] = []
        failure: Exception | None = None
        for flight in flying:
            try:
                if not lane.has_ended(flight):
                    rest.append(flight)
                    continue
            except AgentError as error:
                failure = failure or error
            except Exception as error:  # noqa: BLE001 - raised when the lane is closed
                # Nothing tells whether this read has ended.
                failure = failure or error
                rest.append(flight)
            if flight.peer not in self._known:
                lane.forget_peer(flight.peer)
        return rest, failure

    def _refusal(
        self, flying: Sequence[Flight], now_s: float, deadline_s: float
    ) -> AgentError | None:
        """Return why reads in flight are no longer waited for, or None."""
        if now_s > deadline_s:
            return late()
        for flight in flying:
            if flight.peer not in self._known:
                return PeerLostError(f"agent {flight.peer} is gone", agent=flight.peer)
        return None
