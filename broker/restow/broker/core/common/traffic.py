"""Count what ended in the last quarter of an hour, by tenant and by pair of engines."""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import accumulate, islice
from typing import Final, NamedTuple

from restow.broker.core.common.keys import State

SHORTEST_S: Final = 1e-4
PER_OCTAVE: Final = 4
SLOTS: Final = 96
"""Up to 23 minutes; what lasts longer is in the last one."""


def slot_of(seconds: float) -> int:
    """Where a duration is counted."""
    if seconds <= SHORTEST_S:
        return 0
    return min(SLOTS - 1, math.ceil(math.log2(seconds / SHORTEST_S) * PER_OCTAVE))


class QuantileCounts:
    """A histogram whose bounds grow by the same factor. Its size does not depend on what is said.

    Slot 0 has durations up to `SHORTEST_S`, slot k those up to ``SHORTEST_S * 2**(k/PER_OCTAVE)``.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        """Nothing is counted."""
        self._counts = array("I", bytes(SLOTS * 4))

    def add(self, slot: int) -> None:
        """Count one, whose `slot_of` it is."""
        self._counts[slot] += 1

    def add_all(self, other: QuantileCounts) -> None:
        """Count what ``other`` counted."""
        counts = self._counts
        for slot, count in enumerate(other._counts):
            if count:
                counts[slot] += count

    def take_away(self, other: QuantileCounts) -> None:
        """Count no more what ``other`` counted, which was counted here as well."""
        counts = self._counts
        for slot, count in enumerate(other._counts):
            if count:
                counts[slot] -= count

    def quantile(self, share: float) -> float | None:
        """The duration in seconds that ``share`` of all do not exceed; None: nothing is counted.

        >>> found = QuantileCounts()
        >>> for ms in range(1, 1001):
        ...     found.add(slot_of(ms / 1000))
        >>> round(found.quantile(0.5), 2), round(found.quantile(0.99), 2)
        (0.53, 1.06)
        """
        upto = list(accumulate(self._counts))
        if not upto[-1]:
            return None
        # That of the nearest rank; half a count off keeps rounding from going one rank further.
        wanted = share * upto[-1] - 0.5
        slot = next(at for at, count in enumerate(upto) if count >= wanted and count)
        return SHORTEST_S * 2 ** (max(slot - 0.5, 0) / PER_OCTAVE)


class End(NamedTuple):
    """What is counted of a handoff that has ended."""

    state: State
    bytes_read: int
    transfer_s: float | None
    """From the grant to its end; None: it was not granted."""
    slot: int
    """Of that duration, which several tallies count."""

    @classmethod
    def of(cls, state: State, bytes_read: int, transfer_s: float | None) -> End:
        """Note what is counted."""
        return cls(state, bytes_read, transfer_s, slot_of(transfer_s or 0.0))


@dataclass(slots=True)
class Tally:
    """Counts of ends. Bounded, however many are counted."""

    done: int = 0
    failed: int = 0
    """FAILED or EXPIRED."""
    cancelled: int = 0
    bytes_read: int = 0
    done_bytes: int = 0
    reading_s: float = 0.0
    """Those of DONE: what reading so much took, each handoff by itself."""
    transfers: QuantileCounts = field(default_factory=QuantileCounts)
    """Of DONE: what broke off early or hung would hide how long reading takes."""

    def count(self, end: End) -> None:
        """Count one."""
        self.bytes_read += end.bytes_read
        if end.state is State.DONE:
            self.done += 1
            if end.transfer_s is not None:
                self.done_bytes += end.bytes_read
                self.reading_s += end.transfer_s
                self.transfers.add(end.slot)
        elif end.state is State.CANCELLED:
            self.cancelled += 1
        else:
            self.failed += 1

    def add(self, other: Tally) -> None:
        """Count what ``other`` counted."""
        self.done += other.done
        self.failed += other.failed
        self.cancelled += other.cancelled
        self.bytes_read += other.bytes_read
        self.done_bytes += other.done_bytes
        self.reading_s += other.reading_s
        self.transfers.add_all(other.transfers)

    def take_away(self, other: Tally) -> None:
        """Count no more what ``other`` counted, which was counted here as well."""
        self.done -= other.done
        self.failed -= other.failed
        self.cancelled -= other.cancelled
        self.bytes_read -= other.bytes_read
        self.done_bytes -= other.done_bytes
        self.reading_s = max(0.0, self.reading_s - other.reading_s)
        self.transfers.take_away(other.transfers)

    @property
    def ended(self) -> int:
        """How many ended, whatever way."""
        return self.done + self.failed + self.cancelled

    @property
    def bytes_per_s(self) -> float | None:
        """How fast one handoff was read, on average over the bytes; None: not known."""
        return self.done_bytes / self.reading_s if self.reading_s else None


KEPT_S: Final = 900.0
"""How far back a series goes."""


class Series:
    """Tallies of the latest steps, and of all of them together. Steps of no end take no room.

    Every end is counted here, so it goes into one tally at first, and from that into both when the
    step is over or somebody looks.
    """

    def __init__(self, step_s: float) -> None:
        """Nothing has ended. ``step_s`` divides `KEPT_S`."""
        self.step_s = step_s
        self.steps = round(KEPT_S / step_s)
        self._tallies: OrderedDict[int, Tally] = OrderedDict()
        self._whole = Tally()
        self._fresh = Tally()
        """Of the step that ends at ``_fresh_until_s``, and in no other tally yet."""
        self._fresh_step = 0
        self._fresh_until_s = -math.inf

    def count(self, end: End, now_s: float) -> None:
        """Count one that ends now."""
        if now_s >= self._fresh_until_s:
            self._fresh_step = self._forget(now_s)
            self._fresh_until_s = (self._fresh_step + 1) * self.step_s
        self._fresh.count(end)

    def whole(self, now_s: float) -> Tally:
        """All steps together, to look at."""
        self._forget(now_s)
        return self._whole

    def latest(self, now_s: float, since_s: float = 0.0) -> list[Tally]:
        """One tally for each step since then, the oldest first, to look at.

        As many as are kept; the last step is under way.
        """
        step = self._forget(now_s)
        first = max(step - self.steps + 1, int(since_s // self.step_s))
        nothing = Tally()
        return [self._tallies.get(at, nothing) for at in range(first, step + 1)]

    def _forget(self, now_s: float) -> int:
        """The step that is now; those that are too old for the ring are forgotten."""
        if self._fresh.ended:
            self._tallies.setdefault(self._fresh_step, Tally()).add(self._fresh)
            self._whole.add(self._fresh)
            self._fresh = Tally()
        step = int(now_s // self.step_s)
        while self._tallies:
            oldest = next(iter(self._tallies))
            if oldest > step - self.steps:
                break
            self._whole.take_away(self._tallies.pop(oldest))
        # A clock that is set back must not open a step behind the latest.
        return max(step, next(reversed(self._tallies), step))


STEP_S: Final = 10.0
PAIR_STEP_S: Final = 60.0
"""Between two engines it is only the sum of them that is shown."""
MAX_PAIRS: Final = 256
"""Of a tenant; the one that ended a handoff longest ago is forgotten for another."""
MAX_LOOKED_AT: Final = 4096
"""Of all tenants, however many there are: a look must not hold the broker up."""


class PairTally(NamedTuple):
    """What ended lately between two engines."""

    tenant: str
    source: str
    destination: str
    tally: Tally


class Traffic:
    """A series of all handoffs, and one for each P and D. Bounded, whoever hands over to whom."""

    def __init__(self) -> None:
        """Nothing has ended."""
        self.series = Series(STEP_S)
        self._pairs: OrderedDict[tuple[str, str], Series] = OrderedDict()

    def count(self, end: End, pair: tuple[str, str] | None, now_s: float) -> None:
        """Count one that ends now, between the engines of ``pair``; None: one was not known."""
        self.series.count(end, now_s)
        if pair is None:
            return
        series = self._pairs.get(pair)
        if series is None:
            series = self._pairs[pair] = Series(PAIR_STEP_S)
            if len(self._pairs) > MAX_PAIRS:
                self._pairs.popitem(last=False)
        self._pairs.move_to_end(pair)
        series.count(end, now_s)

    def pairs(self, tenant: str, now_s: float) -> Iterator[PairTally]:
        """Each P and D between which anything ended, the latest first; ``tenant`` is whose."""
        for (source, destination), series in reversed(self._pairs.items()):
            whole = series.whole(now_s)
            if whole.ended:
                yield PairTally(tenant, source, destination, whole)


def busiest(pairs: Iterable[PairTally], most: int) -> tuple[list[PairTally], int]:
    """Those of most bytes, and how many there were besides; `MAX_LOOKED_AT` are looked at."""
    looked_at = list(islice(pairs, MAX_LOOKED_AT))
    found = nlargest(most, looked_at, key=lambda one: (one.tally.bytes_read, one.tally.ended))
    return found, len(looked_at) - len(found)
