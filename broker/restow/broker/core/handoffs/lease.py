"""The lease: how long P's pages may be read, and how long the broker waits for each step.

    granted             grant ends                     lease ends
    |------ reads ------|------- margin, at least -------|
                        |------ grace for reports ------|

This file has every rule of a lease; `Limits` has the length of each span.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from restow.broker.core.common.events import Failure
from restow.broker.core.common.keys import State
from restow.broker.core.common.limits import Limits

MAX_SLOW_READS = 6
"""Slow reads of a demand; the grant after them would be longer than any timeout."""


@dataclass(slots=True, eq=False)
class Lease:
    """The deadlines of a handoff; 0: not set, or nothing to wait for."""

    until_s: float = 0.0
    """P keeps its pages unchanged until then."""
    patience_until_s: float = 0.0
    """D waits for the state until then."""
    agents_until_s: float = 0.0
    """The broker waits for missing agents until then."""
    unasked_until_s: float = 0.0
    """The broker waits for a first or another demand until then; 0: as long as P's lease."""
    grant_until_s: float = 0.0
    settle_until_s: float = 0.0
    """D may read until the first time; reports may arrive until the second; 0: reports have no
    deadline."""
    slow_reads: int = 0
    """Reads that outlasted their grant; each of them doubles the next grant."""

    def renew(self, lease_s: float, now_s: float) -> None:
        """Extend P's lease; a shorter lease does not shorten it."""
        self.until_s = max(self.until_s, now_s + lease_s)

    def ask(self, timeout_s: float, now_s: float) -> None:
        """Record that D has asked and waits for ``timeout_s``."""
        self.patience_until_s = now_s + timeout_s
        self.unasked_until_s = 0.0

    def forget_demand(self) -> None:
        """Record that nobody waits any more."""
        self.patience_until_s = self.agents_until_s = 0.0
        self.slow_reads = 0

    def wait_for_demand(self, limits: Limits, now_s: float) -> bool:
        """Wait for a demand from now on; return False if the wait has already begun."""
        if self.unasked_until_s:
            return False
        self.unasked_until_s = now_s + limits.unasked_s
        return True

    def wait_for_agents(self, limits: Limits, now_s: float) -> bool:
        """Wait for missing agents from now on; return False if the wait has already begun."""
        if self.agents_until_s:
            return False
        self.agents_until_s = now_s + limits.agent_wait_s
        return True

    def agents_came(self) -> None:
        """Record that no agent is missing; a later wait has its full time again."""
        self.agents_until_s = 0.0

    def grant(self, limits: Limits, now_s: float) -> Failure | None:
        """Let D read until before the lease and D's timeout end, or return why no time is left."""
        lease_s = self.until_s - limits.lease_margin_s
        grant_s = limits.grant_s * 2**self.slow_reads
        end_s = min(now_s + grant_s, lease_s, self.patience_until_s)
        if end_s - now_s < limits.min_grant_s:
            if lease_s - now_s < limits.min_grant_s:
                words = "P's lease leaves no time for a read: renew it"
                return Failure(State.EXPIRED, "LEASE_TOO_SHORT", words)
            words = "D's timeout leaves no time for a read"
            if self.slow_reads:
                words += f"; earlier reads that took longer than their grants: {self.slow_reads}"
                return Failure(State.FAILED, "READ_DEADLINE", words)
            return Failure(State.EXPIRED, "TIMEOUT_TOO_SHORT", words)
        self.grant_until_s = end_s
        self.settle_until_s = end_s + limits.settle_grace_s
        return None

    def reads_again(self, limits: Limits, now_s: float) -> bool:
        """Return whether a read that outlasted its grant has time for another, longer grant."""
        end_s = min(self.until_s - limits.lease_margin_s, self.patience_until_s)
        if self.slow_reads == MAX_SLOW_READS or end_s - now_s < limits.min_grant_s:
            return False
        self.slow_reads += 1
        return True

    def revoke(self) -> None:
        """Revoke the grant."""
        self.grant_until_s = self.settle_until_s = 0.0

    def left_ms(self, now_s: float) -> int:
        """Return how many milliseconds an order of the grant may still read."""
        return max(1, int((self.grant_until_s - now_s) * 1000))

    def used_up(self, limits: Limits, now_s: float) -> Failure | None:
        """Return why no more orders of the grant can be given; None if they can."""
        if self.grant_until_s - now_s < limits.min_grant_s:
            return Failure(State.FAILED, "READ_DEADLINE", "staging took the whole grant")
        return None

    def outlived(self, limits: Limits, now_s: float) -> Failure | None:
        """Return why a read that ends now is useless: P's pages may have changed. None if not."""
        if now_s > self.grant_until_s + limits.lease_margin_s:
            return Failure(State.FAILED, "GRANT_OUTLIVED", "the read ended after its grant")
        return None

    def next_look_s(self) -> float:
        """Return when the clock must act if no message comes."""
        return self.settle_until_s or min(
            self.until_s or inf,
            self.patience_until_s or inf,
            self.agents_until_s or inf,
            self.unasked_until_s or inf,
        )

    def wrong(self, granted_s: float) -> Iterator[str]:
        """Yield what is inconsistent about a grant that began at ``granted_s``."""
        if not granted_s < self.grant_until_s < (self.settle_until_s or inf):
            yield "its grant does not end before its settlement"
        if self.grant_until_s >= self.until_s:
            yield "its grant may be used after its lease"


def unpublished_until_s(limits: Limits, now_s: float) -> float:
    """Return until when a fence without a publication is kept: for a default lease."""
    return now_s + limits.lease_s
