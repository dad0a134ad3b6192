"""Tenants: the bytes, live handoffs and engines that each holds, and its quotas."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from restow.broker.core.common.keys import State
from restow.broker.core.common.limits import Limits
from restow.broker.core.common.pair import Checks
from restow.broker.core.common.traffic import PairTally, TallySeries, Traffic
from restow.broker.errors import DirectoryFullError, QuotaExceededError

HANDOFF_BYTES = 6656
"""Bytes of a live handoff without its block lists: it may have the longest id and timeline."""
ENGINE_BYTES = 16 << 10
"""Overhead of an engine beside its layout: its names and those of its former incarnations."""
FENCE_BYTES = 512
"""Overhead of a fence that came before its publication, beside its id."""


@dataclass(slots=True, eq=False)
class Total:
    """The bytes of all tenants."""

    limit_bytes: int
    size_bytes: int = 0
    keeping: dict[str, Account] = field(default_factory=dict)
    """The accounts with stored bytes, by tenant."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Account:
    """The bytes of a tenant: what the directory stores, and messages in transit."""

    tenant: str
    limit_bytes: int | None
    total: Total
    kept_bytes: int = 0
    """Stored by the directory until a handoff ends, an engine or agent leaves, or a plan is
    dropped."""
    passing_bytes: int = 0
    """In transit: calls that wait, and messages that a stream has not yet taken."""

    @property
    def size_bytes(self) -> int:
        """Return stored bytes and bytes in transit together."""
        return self.kept_bytes + self.passing_bytes

    def keep(self, size_bytes: int) -> None:
        """Store ``size_bytes`` more; a negative number stores fewer. Raises as `check`."""
        total = self.total
        if self.limit_bytes is not None or total.size_bytes + size_bytes > total.limit_bytes:
            self.check(size_bytes)
        self.kept_bytes += size_bytes
        total.size_bytes += size_bytes
        total.keeping[self.tenant] = self

    def let_go(self, size_bytes: int) -> None:
        """Store ``size_bytes`` fewer."""
        self.kept_bytes -= size_bytes
        self.total.size_bytes -= size_bytes
        if not self.kept_bytes:
            self.total.keeping.pop(self.tenant, None)

    def carry(self, size_bytes: int) -> None:
        """Add bytes in transit. Raises as `check`."""
        total = self.total
        if self.limit_bytes is not None or total.size_bytes + size_bytes > total.limit_bytes:
            self.check(size_bytes)
        self.passing_bytes += size_bytes
        total.size_bytes += size_bytes

    def deliver(self, size_bytes: int) -> None:
        """Remove bytes in transit."""
        self.passing_bytes -= size_bytes
        self.total.size_bytes -= size_bytes

    @contextlib.contextmanager
    def carrying(self, size_bytes: int) -> Iterator[None]:
        """Count bytes in transit inside the ``with`` block. Raises as `check`."""
        self.carry(size_bytes)
        try:
            yield
        finally:
            self.deliver(size_bytes)

    def has_ample(self, size_bytes: int) -> bool:
        """Return whether half of each limit stays free after ``size_bytes`` more."""
        both = ((self.limit_bytes, self), (self.total.limit_bytes, self.total))
        return all(
            limit is None or 2 * (holder.size_bytes + size_bytes) <= limit for limit, holder in both
        )

    def check(self, size_bytes: int) -> None:
        """Raise `QuotaExceededError` or `DirectoryFullError` if ``size_bytes`` more do not fit."""
        if size_bytes <= 0:
            return
        limit = self.limit_bytes
        if limit is not None and self.size_bytes + size_bytes > limit:
            raise QuotaExceededError(
                f"tenant {self.tenant} holds {self.size_bytes} bytes, and {size_bytes} more exceed "
                f"its quota of {limit}: wait until handoffs have ended, or have the operator raise "
                f"the quota",
                tenant=self.tenant,
                what="bytes",
                limit=limit,
            )
        if self.total.size_bytes + size_bytes > self.total.limit_bytes:
            raise DirectoryFullError(
                f"the broker holds its maximum of {self.total.limit_bytes} bytes: try again later"
            )


@dataclass(slots=True)
class TenantCounts:
    """What a tenant holds, and how its handoffs ended."""

    engines: int = 0
    live: int = 0
    quarantined: int = 0
    ended: deque[str] = field(default_factory=deque)
    """Ids of its remembered ended handoffs, the oldest first."""
    ended_counts: Counter[State] = field(default_factory=Counter)
    bytes_read: int = 0
    checks: Checks = field(default_factory=Checks)
    traffic: Traffic = field(default_factory=Traffic)


class Tenants:
    """The holdings of all tenants; a tenant without holdings is forgotten, with its counts."""

    def __init__(self, limits: Limits) -> None:
        """Begin without holdings."""
        self.holdings: defaultdict[str, TenantCounts] = defaultdict(TenantCounts)
        self._limits = limits
        self._total = Total(limits.max_bytes)
        self._accounts: WeakValueDictionary[str, Account] = WeakValueDictionary()
        """Each tenant has a single account as long as it has bytes or a caller refers to it."""

    def of(self, tenant: str) -> TenantCounts:
        """Return what a tenant holds, for reading only."""
        return self.holdings.get(tenant) or TenantCounts()

    def account(self, tenant: str) -> Account:
        """Return the tenant's account."""
        account = self._accounts.get(tenant)
        if account is None:
            account = Account(tenant, self._limits.tenant_max_bytes, self._total)
            self._accounts[tenant] = account
        return account

    @property
    def keeping(self) -> Collection[str]:
        """Return the tenants with stored bytes."""
        return self._total.keeping.keys()

    def check_engine(self, tenant: str) -> None:
        """Raise `QuotaExceededError` if the tenant must not register another engine."""
        most = self._limits.tenant_max_engines
        if most is not None:
            _check(tenant, "engines", self.of(tenant).engines, most)

    def check_handoff(self, tenant: str, most: int) -> None:
        """Raise `QuotaExceededError` if the tenant has its ``most`` handoffs already."""
        held = self.of(tenant)
        _check(tenant, "handoffs", held.live + held.quarantined, most)

    def add(self, tenant: str, *, engines: int = 0, live: int = 0, quarantined: int = 0) -> None:
        """Count what came: engines, live handoffs, handoffs in quarantine; negative: what left."""
        held = self.holdings[tenant]
        held.engines += engines
        held.live += live
        held.quarantined += quarantined
        self._forget_if_empty(tenant)

    def count_end(
        self, tenant: str, state: State, bytes_read: int, pair: tuple[str, str] | None
    ) -> list[TallySeries]:
        """Count a live handoff that ends, and return the series in which to count it as well.

        ``pair`` has the ids of P and D if both are known.
        """
        held = self.holdings[tenant]
        held.live -= 1
        held.ended_counts[state] += 1
        held.bytes_read += bytes_read
        traffic = held.traffic
        if not held.live and not held.ended:
            self._forget_if_empty(tenant)
        return [traffic.series] if pair is None else [traffic.series, traffic.of(pair)]

    def pairs(self, tenant: str | None, now_s: float) -> Iterator[PairTally]:
        """Yield the recent ends by pair of engines, of a tenant or of all tenants for None."""
        names = self.holdings if tenant is None else self.holdings.keys() & {tenant}
        for name in names:
            yield from self.holdings[name].traffic.pairs(name, now_s)

    def forget_oldest(self, tenant: str) -> None:
        """Forget the oldest ended handoff of a tenant."""
        self.holdings[tenant].ended.popleft()
        self._forget_if_empty(tenant)

    def _forget_if_empty(self, tenant: str) -> None:
        held = self.holdings[tenant]
        if not (held.ended or held.engines or held.live or held.quarantined):
            del self.holdings[tenant]


def _check(tenant: str, what: str, held: int, most: int) -> None:
    if held >= most:
        raise QuotaExceededError(
            f"tenant {tenant} has {held} {what}, and its quota is {most}: wait until some have "
            f"ended, or have the operator raise the quota",
            tenant=tenant,
            what=what,
            limit=most,
        )
