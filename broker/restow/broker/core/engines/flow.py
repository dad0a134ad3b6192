"""Flow control: a destination reads at once only what it can read in about a second.

Orders that queue at an agent use up their grants there. A handoff that queues here spends only its
lease and D's timeout, and keeps its place in the order in which reads could have begun. Small
states do not wait behind large states. Large states do not wait for ever either: what small states
may read beside the queue is bounded. A small state costs more than its bytes, so the number of
small reads follows a measured rate of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from restow.broker.core.common.keys import EngineKey

FIRST_WINDOW_BYTES = 256 << 20
LEAST_WINDOW_BYTES = 32 << 20
SMALL_BYTES = 1 << 20
SMALL_WINDOW_BYTES = 16 << 20
LEAST_SMALL_READS = 32
UNDER_WAY_S = 1.0
"""How long the reads under way should take: well below a grant, and long compared with a tick."""
LEARNING = 0.2
"""Weight of the newest rate."""


class _Read(NamedTuple):
    """A handoff that is being read."""

    size_bytes: int
    with_it_bytes: int
    """All bytes under way when the read began, including its own."""
    with_it_reads: int
    """Small reads under way when the read began."""
    began_s: float


@dataclass(slots=True)
class _Inbound:
    """The reads of an engine, and the handoffs that wait for it."""

    reads: dict[int, _Read] = field(default_factory=dict)
    waiting: OrderedDict[int, int] = field(default_factory=OrderedDict)
    small_waiting: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Sizes in bytes by handoff number."""
    called: set[int] = field(default_factory=set)
    """Handoffs whose turn it is."""
    under_way_bytes: int = 0
    small_bytes: int = 0
    small_reads: int = 0
    bytes_per_s: float = 0.0
    small_reads_per_s: float = 0.0
    """0 while the rate is unknown."""

    def learn(self, read: _Read, now_s: float) -> None:
        """Update the rates from a finished read."""
        took_s = max(now_s - read.began_s, 1e-4)
        newest = read.with_it_bytes / took_s
        known = self.bytes_per_s or newest
        self.bytes_per_s = known + LEARNING * (newest - known)
        if read.size_bytes <= SMALL_BYTES:
            newest = read.with_it_reads / took_s
            known = self.small_reads_per_s or newest
            self.small_reads_per_s = known + LEARNING * (newest - known)

    def has_room(self, size_bytes: int) -> bool:
        """Return whether a read of ``size_bytes`` may begin beside those under way."""
        if size_bytes <= SMALL_BYTES:
            if self.small_reads >= max(LEAST_SMALL_READS, self.small_reads_per_s * UNDER_WAY_S):
                return False
            if self.small_bytes + size_bytes <= SMALL_WINDOW_BYTES:
                return True
        window_bytes: float = FIRST_WINDOW_BYTES
        if self.bytes_per_s:
            window_bytes = max(LEAST_WINDOW_BYTES, self.bytes_per_s * UNDER_WAY_S)
        return not self.reads or self.under_way_bytes + size_bytes <= window_bytes


class Flow:
    """Reads under way at each destination, and the handoffs that wait, by handoff number."""

    def __init__(self) -> None:
        """Begin without reads."""
        self._engines: dict[EngineKey, _Inbound] = {}

    def begin(self, engine: EngineKey, number: int, size_bytes: int, now_s: float) -> bool:
        """Return whether a handoff may be read now; otherwise it waits until `next` returns it."""
        inbound = self._engines.get(engine)
        if inbound is None:
            inbound = self._engines[engine] = _Inbound()
        small = size_bytes <= SMALL_BYTES
        queue = inbound.small_waiting if small else inbound.waiting
        first = number in inbound.called or not queue
        inbound.called.discard(number)
        if not (first and inbound.has_room(size_bytes)):
            queue.setdefault(number, size_bytes)
            return False
        inbound.under_way_bytes += size_bytes
        if small:
            inbound.small_bytes += size_bytes
            inbound.small_reads += 1
        inbound.reads[number] = _Read(
            size_bytes, inbound.under_way_bytes, inbound.small_reads, now_s
        )
        return True

    def leave(self, engine: EngineKey, number: int, now_s: float, done: bool = False) -> None:
        """Remove a handoff from reads and queues; ``done`` updates the measured rates."""
        inbound = self._engines.get(engine)
        if inbound is None:
            return
        inbound.called.discard(number)
        inbound.waiting.pop(number, None)
        inbound.small_waiting.pop(number, None)
        read = inbound.reads.pop(number, None)
        if read is not None:
            inbound.under_way_bytes -= read.size_bytes
            if read.size_bytes <= SMALL_BYTES:
                inbound.small_bytes -= read.size_bytes
                inbound.small_reads -= 1
            if done and read.size_bytes:
                inbound.learn(read, now_s)

    def next(self, engine: EngineKey) -> int | None:
        """Return the handoff whose turn it is, if there is room for it."""
        inbound = self._engines.get(engine)
        for queue in (inbound.small_waiting, inbound.waiting) if inbound is not None else ():
            if queue and inbound is not None:
                number, size_bytes = next(iter(queue.items()))
                if inbound.has_room(size_bytes):
                    del queue[number]
                    inbound.called.add(number)
                    return number
        return None

    def engines(self) -> list[EngineKey]:
        """Return the engines for which a handoff waits."""
        inbounds = self._engines.items()
        return [engine for engine, inbound in inbounds if inbound.waiting or inbound.small_waiting]

    def waits(self, engine: EngineKey, number: int) -> bool:
        """Return whether a handoff waits for its turn."""
        inbound = self._engines.get(engine)
        return inbound is not None and (
            number in inbound.waiting or number in inbound.small_waiting
        )

    def reads(self) -> set[tuple[EngineKey, int]]:
        """Return the reads under way: each destination, and the handoff's number."""
        return {(key, number) for key, inbound in self._engines.items() for number in inbound.reads}

    def queued(self) -> set[tuple[EngineKey, int]]:
        """Return the handoffs that wait, or whose turn it is: the destination, and the number."""
        return {
            (key, number)
            for key, inbound in self._engines.items()
            for number in (*inbound.waiting, *inbound.small_waiting, *inbound.called)
        }

    def forget(self, engine: EngineKey) -> None:
        """Forget an engine that is gone."""
        self._engines.pop(engine, None)
