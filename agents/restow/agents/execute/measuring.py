"""What probes ask of a reader: what copying and reading cost, and over what a peer is read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from restow.agents.link.orders import Peer, ProbeOrder
from restow.agents.memory.regions import MemoryPlace
from restow.agents.memory.staging import Staging
from restow.agents.memory.staging_pool import StagingPool
from restow.agents.probing.costs import check_room, measure_copying, measure_reading
from restow.agents.probing.transport_name import TransportName, find_transport
from restow.agents.probing.transport_probe import OneRead
from restow.agents.reading.reader import Reader
from restow.broker.planner import CopyCosts, ReadCosts

PROBE_S = 2.0
"""How long the reads of a measurement may take."""
EXAMINED_BYTES = 1 << 20


class Measuring:
    """Measures in the staging that arriving bytes have. Belongs to one event loop."""

    def __init__(
        self,
        place: MemoryPlace,
        staging: Staging,
        pool: StagingPool,
        reader: Reader,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Measure in runs of ``pool``, which hands ``staging`` at ``place`` out."""
        self._place = place
        self._staging, self._pool = staging, pool
        self._reader = reader
        self._clock = clock

    async def measure(self, order: ProbeOrder, peer: Peer) -> tuple[CopyCosts, ReadCosts]:
        """What copying costs here, and what reading from the peer does.

        Raises `StagingExhaustedError`, and what `Reader.read` raises.
        """
        size_bytes = min(order.size_bytes, self._staging.size_bytes // 2)
        check_room(size_bytes)
        run = await self._pool.acquire(size_bytes)
        try:
            address = self._staging.address + run.offset_bytes
            copying = await measure_copying(address, size_bytes, self._place)
            return copying, await measure_reading(
                self._reader,
                peer.agent_name,
                order.address,
                address,
                size_bytes,
                (peer.place, self._place),
                self._clock() + PROBE_S,
            )
        finally:
            self._pool.release(run)

    async def name_transport(self, order: ProbeOrder, peer: Peer) -> TransportName:
        """Over what the peer is read. Raises `ReadFailedError`."""
        size_bytes = min(order.size_bytes, EXAMINED_BYTES)
        ends = peer.place, self._place
        one = OneRead(peer.agent_name, order.address, size_bytes, *ends, PROBE_S)
        found = await asyncio.to_thread(find_transport, one, peer.metadata)
        words = self._reader.words(peer.agent_name)
        return found._replace(method=f"{found.method}, {words}") if words else found
