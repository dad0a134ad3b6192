"""The lease: how long P's pages may be read, and how long is waited for that.

    granted             grant ends                     lease ends
    |------ reads ------|------- margin, at least -------|
                        |------ grace for reports ------|

Every rule of it is here; how much each span is, `Limits` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from restow.broker.core.common.events import Failure
from restow.broker.core.common.keys import State
from restow.broker.core.common.limits import Limits


@dataclass(slots=True, eq=False)
class Lease:
    """Until when, for one handoff; 0: nobody has said so, or nothing is waited for."""

    until_s: float = 0.0
    """P leaves its pages alone."""
    patience_until_s: float = 0.0
    """D waits for the state."""
    agents_until_s: float = 0.0
    """Missing agents are waited for."""
    unasked_until_s: float = 0.0
    """A first or another demand is waited for; 0: as long as P leaves its pages alone."""
    grant_until_s: float = 0.0
    settle_until_s: float = 0.0
    """D may read, and reports of that may still arrive; 0: only its ranks say when."""

    def renew(self, lease_s: float, now_s: float) -> None:
        """P leases its pages, or prolongs that; what it promised before it keeps."""
        self.until_s = max(self.until_s, now_s + lease_s)

    def ask(self, timeout_s: float, now_s: float) -> None:
        """D has asked, and waits for so long."""
        self.patience_until_s = now_s + timeout_s
        self.unasked_until_s = 0.0

    def forget_demand(self) -> None:
        """Nobody waits any more."""
        self.patience_until_s = self.agents_until_s = 0.0

    def wait_for_demand(self, limits: Limits, now_s: float) -> bool:
        """Wait for somebody to ask from now on; False if that is waited for already."""
        if self.unasked_until_s:
            return False
        self.unasked_until_s = now_s + limits.unasked_s
        return True

    def wait_for_agents(self, limits: Limits, now_s: float) -> bool:
        """Wait for missing agents from now on; False if they are waited for already."""
        if self.agents_until_s:
            return False
        self.agents_until_s = now_s + limits.agent_wait_s
        return True

    def agents_came(self) -> None:
        """No agent is missing: when one is again, it is waited for as long."""
        self.agents_until_s = 0.0

    def grant(self, limits: Limits, now_s: float) -> Failure | None:
        """Let D read, until before the lease and D's patience end; or why there is no time."""
        lease_s = self.until_s - limits.lease_margin_s
        end_s = min(now_s + limits.grant_s, lease_s, self.patience_until_s)
        if end_s - now_s < limits.min_grant_s:
            if lease_s - now_s < limits.min_grant_s:
                words = "P's lease leaves no time for a read: renew it"
                return Failure(State.EXPIRED, "LEASE_TOO_SHORT", words)
            words = "D's timeout leaves no time for a read"
            return Failure(State.EXPIRED, "TIMEOUT_TOO_SHORT", words)
        self.grant_until_s = end_s
        self.settle_until_s = end_s + limits.settle_grace_s
        return None

    def revoke(self) -> None:
        """Take the grant back."""
        self.grant_until_s = self.settle_until_s = 0.0

    def left_ms(self, now_s: float) -> int:
        """How long an order of the grant may still read."""
        return max(1, int((self.grant_until_s - now_s) * 1000))

    def used_up(self, limits: Limits, now_s: float) -> Failure | None:
        """Why no order of the grant can be given any more."""
        if self.grant_until_s - now_s < limits.min_grant_s:
            return Failure(State.FAILED, "READ_DEADLINE", "staging took the whole grant")
        return None

    def outlived(self, limits: Limits, now_s: float) -> Failure | None:
        """Why a read that ends now gives no state: P's pages may have changed."""
        if now_s > self.grant_until_s + limits.lease_margin_s:
            return Failure(State.FAILED, "GRANT_OUTLIVED", "the read ended after its grant")
        return None

    def next_look_s(self) -> float:
        """When something happens even if nobody says a word."""
        return self.settle_until_s or min(
            self.until_s or inf,
            self.patience_until_s or inf,
            self.agents_until_s or inf,
            self.unasked_until_s or inf,
        )

    def wrong(self, granted_s: float) -> Iterator[str]:
        """What must not be of a grant that began at ``granted_s``."""
        if not granted_s < self.grant_until_s < (self.settle_until_s or inf):
            yield "its grant does not end before its settlement"
        if self.grant_until_s >= self.until_s:
            yield "its grant may be used after its lease"


def unpublished_until_s(limits: Limits, now_s: float) -> float:
    """Until when a fence is kept of what nobody has published: for a lease that names no length."""
    return now_s + limits.lease_s
