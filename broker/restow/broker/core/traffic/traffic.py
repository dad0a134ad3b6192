"""The traffic of a tenant: what ended lately, in all and between each two of its engines."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import nlargest
from itertools import islice
from typing import Final, NamedTuple

from restow.broker.core.traffic.series import Series
from restow.broker.core.traffic.tally import End, Tally

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
