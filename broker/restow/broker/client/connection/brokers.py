"""Which broker to try next, and after what pause."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

from restow.broker.addresses import checked_targets
from restow.broker.errors import AddressInvalidError, NotLeaderError, RestowError

FIRST_S = 0.1
LAST_S = 5.0
JITTER = 0.5
LONGEST_S = LAST_S * (1 + JITTER)
HELD_S = 1.0
"""A connection that held this long has worked, so links that break every few seconds are used."""


class Backoff:
    """Doubling waits with jitter, so that clients that lost a broker do not return all at once.

    They begin anew when a connection has worked for ``HELD_S``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with the shortest wait."""
        self._clock = clock
        self._next_s = FIRST_S
        self._works_since_s = math.inf

    def began(self) -> None:
        """Note that the attempts succeed from now on."""
        self._works_since_s = self._clock()

    def wait_s(self) -> float:
        """Return the seconds to wait now, after a failure."""
        if self._clock() - self._works_since_s >= HELD_S:
            self._next_s = FIRST_S
        self._works_since_s = math.inf
        wait_s = self._next_s * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - no secret
        self._next_s = min(2 * self._next_s, LAST_S)
        return wait_s


class EpochOverError(RestowError, status="UNAVAILABLE", reason="EPOCH_OVER"):
    """A broker speaks in an epoch that is over: another broker leads."""


class Epochs:
    """The highest epoch that a broker has named, in the fleet that was reached last."""

    def __init__(self) -> None:
        """Begin without an epoch."""
        self._fleet = ""
        self._highest = 0

    @property
    def highest(self) -> int:
        """The epoch to name to the next broker, which leads in no lower epoch; 0: none is known."""
        return self._highest

    def opened(self, fleet: str) -> None:
        """Note that a stream to a broker of ``fleet`` begins: epochs of fleets are not compared."""
        if fleet != self._fleet:
            self._fleet, self._highest = fleet, 0

    def take(self, epoch: int) -> None:
        """Take the epoch in which a broker speaks. Raises `EpochOverError`."""
        if epoch == self._highest:
            return
        if epoch < self._highest:
            raise EpochOverError(
                f"the broker speaks in epoch {epoch}, and the fleet is in epoch {self._highest}: "
                f"the broker was stopped or cut off, and another broker leads",
                epoch=epoch,
                highest=self._highest,
            )
        self._highest = epoch


UNREACHED_KEY = "restow-unreached"
"""Metadata of a call: the leader's address that another broker named, and nobody answers there."""
MAX_HOPS = 4
"""Most redirections that are followed at once: brokers may name each other as the leader."""


class Brokers:
    """The given brokers, and the broker that another broker named as the leader."""

    def __init__(self, given: str) -> None:
        """Begin with the first of ``HOST:PORT,...``. Raises `AddressInvalidError`."""
        self._given = checked_targets(given)
        self._next = 0
        self._leader = self._unreached = ""
        self._hops = self._failed = 0
        self.rounds = 0
        """How often all brokers have failed in turn since a broker accepted a stream."""

    @property
    def current(self) -> str:
        """The address to ask now."""
        return self._leader or self._given[self._next]

    @property
    def several(self) -> bool:
        """Whether there is another broker to ask if the current broker does not answer."""
        return bool(self._leader) or len(self._given) > 1

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of a call that opens a stream."""
        return ((UNREACHED_KEY, self._unreached),) if self._unreached else ()

    def works(self) -> None:
        """Note that the current broker has opened the stream."""
        self._hops = self._failed = self.rounds = 0
        self._unreached = ""

    def failed(self) -> bool:
        """Take another broker, because the current broker failed; return whether to ask it at once.

        Returns False when all brokers have failed in turn.
        """
        if self._leader:
            self._leader, self._unreached = "", self._leader
            return True  # the broker that named it waits with us until it has another answer
        self._next = (self._next + 1) % len(self._given)
        self._failed += 1
        if self._failed < len(self._given):
            return True
        self._failed = 0
        self.rounds += 1
        return False

    def refused(self, error: RestowError) -> bool:
        """Return whether a refusal names another broker, which is to be asked at once."""
        if error.reason != NotLeaderError.reason:
            return False
        leader = error.subject.get("leader", "")
        try:
            known = len(checked_targets(leader)) == 1
        except AddressInvalidError:
            known = False
        self._hops += 1
        if not known or leader == self._unreached or self._hops > MAX_HOPS:
            self._hops = 0
            self._leader = self._unreached = ""
            return False
        self._leader = leader
        return True
