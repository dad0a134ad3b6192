"""Flow: a destination is given as much to read at once as it reads in a second or so.

Orders that queue at an agent use up their grants there. What waits here keeps its lease and D's
patience alone, in the order in which it could have begun; small states do not wait behind large
ones, and large ones not for ever: what small ones may take beside the queue is bounded too. A small
one costs more than its bytes, so their number follows a measured rate of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from restow.broker.core.common.keys import EngineKey

FIRST_WINDOW_BYTES = 256 << 20
LEAST_WINDOW_BYTES = 32 << 20
SMALL_BYTES = 1 << 20
SMALL_WINDOW_BYTES = 16 << 20
LEAST_SMALL_READS = 32
UNDER_WAY_S = 1.0
"""How long what is under way should take: well inside a grant, and long beside a tick."""
LEARNING = 0.2
"""Weight of the newest rate."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A handoff that is being read."""

    size_bytes: int
    with_it_bytes: int
    """All that was under way when it began, itself included."""
    with_it_reads: int
    """Small ones among them."""
    began_s: float


@dataclass(slots=True)
class _Inbound:
    """What one engine reads, and what waits for that."""

    reads: dict[int, _Read] = field(default_factory=dict)
    waiting: OrderedDict[int, int] = field(default_factory=OrderedDict)
    small_waiting: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Numbers and bytes."""
    called: set[int] = field(default_factory=set)
    """Those whose turn it is."""
    under_way_bytes: int = 0
    small_bytes: int = 0
    small_reads: int = 0
    bytes_per_s: float = 0.0
    small_reads_per_s: float = 0.0
    """0: not known yet."""

    @property
    def window_bytes(self) -> float:
        if not self.bytes_per_s:
            return FIRST_WINDOW_BYTES
        return max(LEAST_WINDOW_BYTES, self.bytes_per_s * UNDER_WAY_S)

    @property
    def window_small_reads(self) -> float:
        return max(LEAST_SMALL_READS, self.small_reads_per_s * UNDER_WAY_S)

    def count(self, size_bytes: int, sign: int) -> None:
        """One more is under way, or (-1) one less."""
        self.under_way_bytes += sign * size_bytes
        if size_bytes <= SMALL_BYTES:
            self.small_bytes += sign * size_bytes
            self.small_reads += sign

    def learn(self, read: _Read, now_s: float) -> None:
        """How fast it was read."""
        took_s = max(now_s - read.began_s, 1e-4)
        self.bytes_per_s = _learned(self.bytes_per_s, read.with_it_bytes / took_s)
        if read.size_bytes <= SMALL_BYTES:
            self.small_reads_per_s = _learned(self.small_reads_per_s, read.with_it_reads / took_s)

    def queue_of(self, size_bytes: int) -> OrderedDict[int, int]:
        return self.small_waiting if size_bytes <= SMALL_BYTES else self.waiting

    def has_room(self, size_bytes: int) -> bool:
        if size_bytes <= SMALL_BYTES:
            if self.small_reads >= self.window_small_reads:
                return False
            if self.small_bytes + size_bytes <= SMALL_WINDOW_BYTES:
                return True
        return not self.reads or self.under_way_bytes + size_bytes <= self.window_bytes


def _learned(before: float, newest: float) -> float:
    return before + LEARNING * (newest - before) if before else newest


class Flow:
    """What is under way at each destination, and who is next. By numbers of handoffs."""

    def __init__(self) -> None:
        """Nothing is under way."""
        self._engines: dict[EngineKey, _Inbound] = {}

    def begin(self, engine: EngineKey, number: int, size_bytes: int, now_s: float) -> bool:
        """Whether a handoff may be read now; if not, it waits until `next` names it."""
        one = self._engines.setdefault(engine, _Inbound())
        queue = one.queue_of(size_bytes)
        first = number in one.called or not queue
        one.called.discard(number)
        if not (first and one.has_room(size_bytes)):
            queue.setdefault(number, size_bytes)
            return False
        one.count(size_bytes, 1)
        one.reads[number] = _Read(size_bytes, one.under_way_bytes, one.small_reads, now_s)
        return True

    def leave(self, engine: EngineKey, number: int, now_s: float, done: bool = False) -> None:
        """A handoff is read no more, or waits no more; ``done`` tells how fast it was."""
        one = self._engines.get(engine)
        if one is None:
            return
        one.called.discard(number)
        one.waiting.pop(number, None)
        one.small_waiting.pop(number, None)
        read = one.reads.pop(number, None)
        if read is not None:
            one.count(read.size_bytes, -1)
            if done and read.size_bytes:
                one.learn(read, now_s)

    def next(self, engine: EngineKey) -> int | None:
        """Call the handoff whose turn it is, if there is room for it."""
        one = self._engines.get(engine)
        for queue in (one.small_waiting, one.waiting) if one is not None else ():
            if queue and one is not None:
                number, size_bytes = next(iter(queue.items()))
                if one.has_room(size_bytes):
                    del queue[number]
                    one.called.add(number)
                    return number
        return None

    def engines(self) -> list[EngineKey]:
        """Those for which anything waits."""
        found = self._engines.items()
        return [engine for engine, one in found if one.waiting or one.small_waiting]

    def waits(self, engine: EngineKey, number: int) -> bool:
        """Whether a handoff waits for its turn."""
        one = self._engines.get(engine)
        return one is not None and (number in one.waiting or number in one.small_waiting)

    def forget(self, engine: EngineKey) -> None:
        """An engine is gone."""
        self._engines.pop(engine, None)
