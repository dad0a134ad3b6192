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
"""Slots for durations up to 23 minutes; the last slot also counts longer durations."""


def slot_of(seconds: float) -> int:
    """Return the slot in which a duration is counted."""
    if seconds <= SHORTEST_S:
        return 0
    return min(SLOTS - 1, math.ceil(math.log2(seconds / SHORTEST_S) * PER_OCTAVE))


class QuantileCounts:
    """A histogram of fixed size whose bounds grow by a constant factor.

    Slot 0 has durations up to `SHORTEST_S`, slot k those up to ``SHORTEST_S * 2**(k/PER_OCTAVE)``.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        """Begin with empty slots."""
        self.counts = array("I", bytes(SLOTS * 4))

    def add(self, slot: int) -> None:
        """Count a duration by its `slot_of`."""
        self.counts[slot] += 1

    def merge(self, other: QuantileCounts, sign: int) -> None:
        """Add the counts of ``other``, or subtract them if ``sign`` is -1."""
        counts = self.counts
        for slot, count in enumerate(other.counts):
            if count:
                counts[slot] += sign * count

    def quantile(self, share: float) -> float | None:
        """Return the duration in seconds that a ``share`` of all do not exceed; None: no counts.

        >>> found = QuantileCounts()
        >>> for ms in range(1, 1001):
        ...     found.add(slot_of(ms / 1000))
        >>> round(found.quantile(0.5), 2), round(found.quantile(0.99), 2)
        (0.53, 1.06)
        """
        upto = list(accumulate(self.counts))
        if not upto[-1]:
            return None
        # Take the nearest rank; half a count less keeps rounding from choosing the rank above.
        wanted = share * upto[-1] - 0.5
        slot = next(at for at, count in enumerate(upto) if count >= wanted and count)
        return SHORTEST_S * 2 ** (max(slot - 0.5, 0) / PER_OCTAVE)


@dataclass(slots=True)
class Tally:
    """Counts of ended handoffs, of constant size."""

    done: int = 0
    failed: int = 0
    """Handoffs that ended FAILED or EXPIRED."""
    cancelled: int = 0
    bytes_read: int = 0
    done_bytes: int = 0
    reading_s: float = 0.0
    """Bytes and time of DONE handoffs that were granted; times of concurrent handoffs add up."""
    transfers: QuantileCounts = field(default_factory=QuantileCounts)
    """Durations of DONE handoffs only: broken or hanging reads would hide how long a read takes."""

    def merge(self, other: Tally, sign: int = 1) -> None:
        """Add the counts of ``other``, or subtract them if ``sign`` is -1."""
        self.done += sign * other.done
        self.failed += sign * other.failed
        self.cancelled += sign * other.cancelled
        self.bytes_read += sign * other.bytes_read
        self.done_bytes += sign * other.done_bytes
        self.reading_s = max(0.0, self.reading_s + sign * other.reading_s)
        self.transfers.merge(other.transfers, sign)

    @property
    def ended(self) -> int:
        """Return the number of all ended handoffs."""
        return self.done + self.failed + self.cancelled

    @property
    def bytes_per_s(self) -> float | None:
        """Return the mean read rate of a handoff, weighted by bytes; None if it is unknown."""
        return self.done_bytes / self.reading_s if self.reading_s else None


KEPT_S: Final = 900.0
"""How far back a series goes."""


class TallySeries:
    """Tallies of the latest time steps, and their sum. Steps without ends take no memory.

    An end goes into a single tally first (`count_end`). That tally is added to its step and to the
    sum when the step is over or somebody reads the series.
    """

    def __init__(self, step_s: float) -> None:
        """Begin without ends; ``step_s`` must divide `KEPT_S`."""
        self.step_s = step_s
        self.steps = round(KEPT_S / step_s)
        self._tallies: OrderedDict[int, Tally] = OrderedDict()
        self._whole = Tally()
        self.fresh = Tally()
        """The tally of the step that ends at ``fresh_until_s``; no other tally includes it yet."""
        self._fresh_step = 0
        self.fresh_until_s = -math.inf

    def begin_step(self, now_s: float) -> None:
        """Begin the step of the present time."""
        self._fresh_step = self._forget(now_s)
        self.fresh_until_s = (self._fresh_step + 1) * self.step_s

    def whole(self, now_s: float) -> Tally:
        """Return the sum of all steps; callers must not change it."""
        self._forget(now_s)
        return self._whole

    def latest(self, now_s: float, since_s: float = 0.0) -> list[Tally]:
        """Return a tally for each step since ``since_s``, the oldest first, for reading only.

        Returns as many steps as are kept; the last step is still running.
        """
        step = self._forget(now_s)
        first = max(step - self.steps + 1, int(since_s // self.step_s))
        nothing = Tally()
        return [self._tallies.get(at, nothing) for at in range(first, step + 1)]

    def _forget(self, now_s: float) -> int:
        """Forget steps that are too old, and return the number of the current step."""
        if self.fresh.ended:
            self._tallies.setdefault(self._fresh_step, Tally()).merge(self.fresh)
            self._whole.merge(self.fresh)
            self.fresh = Tally()
        step = int(now_s // self.step_s)
        while self._tallies:
            oldest = next(iter(self._tallies))
            if oldest > step - self.steps:
                break
            self._whole.merge(self._tallies.pop(oldest), -1)
        # A clock that is set back must not open a step before the latest step.
        return max(step, next(reversed(self._tallies), step))


def count_end(
    every: Iterable[TallySeries], state: State, bytes_read: int, took_s: float | None, now_s: float
) -> None:
    """Count a handoff that ends now in each series.

    ``took_s`` is the time from the grant to the end; None if the handoff was never granted.
    """
    slot = 0 if took_s is None else slot_of(took_s)
    for series in every:
        if now_s >= series.fresh_until_s:
            series.begin_step(now_s)
        tally = series.fresh
        tally.bytes_read += bytes_read
        if state is State.DONE:
            tally.done += 1
            if took_s is not None:
                tally.done_bytes += bytes_read
                tally.reading_s += took_s
                tally.transfers.counts[slot] += 1
        elif state is State.CANCELLED:
            tally.cancelled += 1
        else:
            tally.failed += 1


STEP_S: Final = 10.0
PAIR_STEP_S: Final = 60.0
"""A longer step suffices for a pair, because only the sum of its steps is shown."""
MAX_PAIRS: Final = 256
"""Pairs per tenant; the pair whose last handoff ended longest ago makes room for a new pair."""
MAX_LOOKED_AT: Final = 4096
"""Pairs that a query looks at over all tenants, because it must not delay the broker."""


class PairTally(NamedTuple):
    """What ended recently between two engines of a tenant."""

    tenant: str
    source: str
    destination: str
    tally: Tally


class Traffic:
    """A series of all handoffs, and a series for each pair of P and D, of bounded size."""

    def __init__(self) -> None:
        """Begin without ends."""
        self.series = TallySeries(STEP_S)
        self._pairs: OrderedDict[tuple[str, str], TallySeries] = OrderedDict()

    def of(self, pair: tuple[str, str]) -> TallySeries:
        """Return the series of a pair between whose engines a handoff ends now."""
        series = self._pairs.get(pair)
        if series is None:
            series = self._pairs[pair] = TallySeries(PAIR_STEP_S)
            if len(self._pairs) > MAX_PAIRS:
                self._pairs.popitem(last=False)
        self._pairs.move_to_end(pair)
        return series

    def pairs(self, tenant: str, now_s: float) -> Iterator[PairTally]:
        """Yield each pair with ended handoffs, the latest first; all belong to ``tenant``."""
        for (source, destination), series in reversed(self._pairs.items()):
            whole = series.whole(now_s)
            if whole.ended:
                yield PairTally(tenant, source, destination, whole)


def busiest(pairs: Iterable[PairTally], most: int) -> tuple[list[PairTally], int]:
    """Return the pairs with the most bytes and the number of the others; see `MAX_LOOKED_AT`."""
    looked_at = list(islice(pairs, MAX_LOOKED_AT))
    chosen = nlargest(most, looked_at, key=lambda pair: (pair.tally.bytes_read, pair.tally.ended))
    return chosen, len(looked_at) - len(chosen)
