"""Tenants: what each holds in bytes, live handoffs and engines, and its bounds."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from restow.broker.core.common.keys import State
from restow.broker.core.common.limits import Limits
from restow.broker.core.common.pair import Checks
from restow.broker.core.common.traffic import End, PairTally, Traffic
from restow.broker.errors import DirectoryFullError, QuotaExceededError
from restow.broker.text_bytes import text_bytes

HANDOFF_BYTES = 4096
"""Of a live handoff beside its id and its lists; its story is a part of it."""
ENGINE_BYTES = 16 << 10
"""Of an engine beside its layout: its names, and those of its lives before."""
FENCE_BYTES = 512
"""Of a fence that came before its publication, beside its id."""


def handoff_bytes(handoff_id: str) -> int:
    """What a live handoff counts beside its lists."""
    return HANDOFF_BYTES + text_bytes(handoff_id)


@dataclass(slots=True, eq=False)
class Total:
    """The bytes of all tenants."""

    limit_bytes: int
    size_bytes: int = 0
    keeping: dict[str, Account] = field(default_factory=dict)
    """The accounts for which anything is kept, by tenant."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Account:
    """One tenant's bytes: what the directory keeps, and what is on its way."""

    tenant: str
    limit_bytes: int | None
    total: Total
    kept_bytes: int = 0
    """By the directory, until a handoff ends, an engine or agent goes, a plan is dropped."""
    passing_bytes: int = 0
    """On its way in or out: calls that wait, and messages that a stream has not taken."""

    @property
    def size_bytes(self) -> int:
        """All of them."""
        return self.kept_bytes + self.passing_bytes

    def keep(self, size_bytes: int) -> None:
        """Keep ``size_bytes`` more, or fewer if it is negative. Raises as `check`."""
        if size_bytes > 0:
            self.check(size_bytes)
        self.let_go(-size_bytes)

    def let_go(self, size_bytes: int) -> None:
        """Keep ``size_bytes`` fewer."""
        size_bytes = -size_bytes
        before_bytes = self.kept_bytes
        self.kept_bytes = left_bytes = before_bytes + size_bytes
        self.total.size_bytes += size_bytes
        if not before_bytes or not left_bytes:
            if left_bytes:
                self.total.keeping[self.tenant] = self
            else:
                self.total.keeping.pop(self.tenant, None)

    def carry(self, size_bytes: int) -> None:
        """So many more are on their way. Raises as `check`."""
        self.check(size_bytes)
        self.passing_bytes += size_bytes
        self.total.size_bytes += size_bytes

    def deliver(self, size_bytes: int) -> None:
        """So many have arrived."""
        self.passing_bytes -= size_bytes
        self.total.size_bytes -= size_bytes

    @contextlib.contextmanager
    def carrying(self, size_bytes: int) -> Iterator[None]:
        """Count so many inside of the ``with``. Raises as `check`."""
        self.carry(size_bytes)
        try:
            yield
        finally:
            self.deliver(size_bytes)

    def has_ample(self, size_bytes: int) -> bool:
        """Whether half of what it may keep, and half of all tenants' bytes, is free even then."""
        both = ((self.limit_bytes, self), (self.total.limit_bytes, self.total))
        return all(
            limit is None or 2 * (one.size_bytes + size_bytes) <= limit for limit, one in both
        )

    def check(self, size_bytes: int) -> None:
        """Raise `QuotaExceededError` or `DirectoryFullError` if so many more are too many."""
        if size_bytes <= 0:
            return
        limit = self.limit_bytes
        if limit is not None and self.size_bytes + size_bytes > limit:
            raise QuotaExceededError(
                f"tenant {self.tenant} has {self.size_bytes} bytes kept here, and {size_bytes} "
                f"more are above the {limit} that it may: wait until handoffs have ended, or have "
                f"the operator raise its quota",
                tenant=self.tenant,
                what="bytes",
                limit=limit,
            )
        if self.total.size_bytes + size_bytes > self.total.limit_bytes:
            raise DirectoryFullError(
                f"the broker keeps as many bytes as it may, {self.total.limit_bytes}: try again "
                f"later"
            )


@dataclass(slots=True)
class Holdings:
    """What one tenant holds, and how its handoffs ended."""

    engines: int = 0
    live: int = 0
    quarantined: int = 0
    ended: deque[str] = field(default_factory=deque)
    """Ids of its ended handoffs that are remembered, the oldest first."""
    ended_counts: Counter[State] = field(default_factory=Counter)
    bytes_read: int = 0
    checks: Checks = field(default_factory=Checks)
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def empty(self) -> bool:
        """Whether nothing of the tenant is left."""
        return not (self.ended or self.engines or self.live or self.quarantined)


class Tenants:
    """The holdings of all tenants that have any; the counts of one that has none are forgotten."""

    def __init__(self, limits: Limits) -> None:
        """Nobody holds anything."""
        self.holdings: dict[str, Holdings] = {}
        self._limits = limits
        self._total = Total(limits.max_bytes)
        self._accounts: WeakValueDictionary[str, Account] = WeakValueDictionary()

    def of(self, tenant: str) -> Holdings:
        """What a tenant holds, to look at."""
        return self.holdings.get(tenant) or Holdings()

    def account(self, tenant: str) -> Account:
        """The bytes that are kept for a tenant: one account, as long as there are any.

        Or as long as somebody holds it.
        """
        account = self._accounts.get(tenant)
        if account is None:
            account = Account(tenant, self._limits.tenant_max_bytes, self._total)
            self._accounts[tenant] = account
        return account

    @property
    def keeping(self) -> Collection[str]:
        """The tenants for which bytes are kept."""
        return self._total.keeping.keys()

    def check_engine(self, tenant: str) -> None:
        """Raise `QuotaExceededError` if the tenant may not register another engine."""
        _check(tenant, "engines", self.of(tenant).engines, self._limits.tenant_max_engines)

    def check_handoff(self, tenant: str) -> None:
        """Raise `QuotaExceededError` if the tenant may not begin another handoff."""
        held = self.of(tenant)
        _check(tenant, "handoffs", held.live + held.quarantined, self._limits.tenant_max_live)

    def add_engines(self, tenant: str, count: int) -> None:
        """Engines came or, with a negative ``count``, went."""
        self._known(tenant).engines += count
        self._forget_if_empty(tenant)

    def add_live(self, tenant: str, count: int) -> None:
        """Handoffs began, or are live no more."""
        self._known(tenant).live += count
        if count < 0:
            self._forget_if_empty(tenant)

    def add_quarantined(self, tenant: str, count: int) -> None:
        """Handoffs came into quarantine or left it."""
        self._known(tenant).quarantined += count
        self._forget_if_empty(tenant)

    def count_end(self, tenant: str, end: End, pair: tuple[str, str] | None, now_s: float) -> None:
        """A handoff ended. ``pair``: ids of P and D, where both are known."""
        held = self._known(tenant)
        held.ended_counts[end.state] += 1
        held.bytes_read += end.bytes_read
        held.traffic.count(end, pair, now_s)

    def remember(self, tenant: str, handoff_id: str) -> str | None:
        """An ended handoff is remembered; the id of one that is to be forgotten for it."""
        held = self._known(tenant)
        held.ended.append(handoff_id)
        bound = self._limits.tenant_max_ended
        return held.ended.popleft() if bound is not None and len(held.ended) > bound else None

    def pairs(self, tenant: str | None, now_s: float) -> Iterator[PairTally]:
        """What ended lately between each two engines of a tenant; None: of all tenants."""
        names = self.holdings if tenant is None else self.holdings.keys() & {tenant}
        for name in names:
            yield from self.holdings[name].traffic.pairs(name, now_s)

    def forget_oldest(self, tenant: str) -> None:
        """The oldest ended handoff of a tenant is not remembered any more."""
        self._known(tenant).ended.popleft()
        self._forget_if_empty(tenant)

    def _known(self, tenant: str) -> Holdings:
        held = self.holdings.get(tenant)
        if held is None:
            held = self.holdings[tenant] = Holdings()
        return held

    def _forget_if_empty(self, tenant: str) -> None:
        if self.holdings[tenant].empty:
            del self.holdings[tenant]


def _check(tenant: str, what: str, held: int, bound: int | None) -> None:
    if bound is not None and held >= bound:
        raise QuotaExceededError(
            f"tenant {tenant} has {held} {what}, as many as it may: wait until some have ended, or "
            f"have the operator raise its quota",
            tenant=tenant,
            what=what,
            limit=bound,
        )
