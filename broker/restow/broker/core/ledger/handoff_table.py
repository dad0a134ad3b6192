"""The table of handoffs by id and number, and the deadlines at which the clock checks them."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator

from restow.broker.core.common.limits import Limits, Numbering
from restow.broker.core.engines.account import HANDOFF_BYTES, Account, Tenants
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.ledger.ends import Quarantine
from restow.broker.errors import DirectoryFullError, HandoffUnknownError, RequestError


class Deadlines:
    """Handoff numbers in buckets of time: adding is cheap, and a stale entry costs a single check.

    An entry is due at the end of its bucket: up to ``bucket_s`` late, and never early.
    """

    def __init__(self, bucket_s: float = 0.05) -> None:
        """Start empty."""
        self._bucket_s = bucket_s
        self._buckets: dict[int, list[int]] = defaultdict(list)
        self._next = math.inf

    def add(self, when_s: float, number: int) -> None:
        """Check ``number`` at ``when_s``."""
        bucket = int(when_s / self._bucket_s) + 1
        self._buckets[bucket].append(number)
        if bucket < self._next:
            self._next = bucket

    def due(self, now_s: float) -> list[int]:
        """Remove and return all entries that are due."""
        now = now_s / self._bucket_s
        if now < self._next:
            return []
        ripe = sorted(bucket for bucket in self._buckets if bucket <= now)
        numbers = [number for bucket in ripe for number in self._buckets.pop(bucket)]
        self._next = min(self._buckets, default=math.inf)
        return numbers

    def numbers(self) -> set[int]:
        """Return all entries."""
        return {number for bucket in self._buckets.values() for number in bucket}


MAX_ID_LENGTH = 256


def check_handoff_id(handoff_id: str) -> None:
    """Raise `RequestError` for an invalid handoff id."""
    if not 0 < len(handoff_id) <= MAX_ID_LENGTH or not handoff_id.isprintable():
        raise RequestError(
            f"handoff_id {handoff_id[:64]!r} must have 1 to {MAX_ID_LENGTH} printable characters",
            field="handoff_id",
        )


class HandoffTable:
    """Handoffs and their deliveries, within the limits of the broker and its tenants."""

    def __init__(self, limits: Limits, first_us: int) -> None:
        """Start empty; the numbers of handoffs begin at ``first_us``."""
        self.limits = limits
        self.live: dict[tuple[str, str], Handoff] = {}
        self.by_number: dict[int, Handoff] = {}
        """Live handoffs and live deliveries."""
        self.ended: OrderedDict[tuple[str, str], Handoff] = OrderedDict()
        self.tenants = Tenants(limits)
        self.quarantine = Quarantine(self.tenants)
        self.numbering = Numbering(first_us)

    def known(self, tenant: str, handoff_id: str) -> Handoff | None:
        """Return the handoff with this id, live or ended; None if there is none."""
        key = (tenant, handoff_id)
        return self.live.get(key) or self.ended.get(key)

    def find(self, tenant: str, handoff_id: str) -> Handoff:
        """Return a live or ended handoff. Raises `HandoffUnknownError`."""
        handoff = self.known(tenant, handoff_id)
        if handoff is None:
            raise HandoffUnknownError(
                f"handoff {handoff_id} is not known to this broker: it ended long ago, or the id "
                f"is wrong",
                handoff=handoff_id,
            )
        return handoff

    def live_of(self, engine: EngineRecord) -> Iterator[Handoff]:
        """Yield the live handoffs in which an engine has a side, the earliest number first.

        A handoff that ends before its turn is left out.
        """
        for number in sorted(engine.handoffs):
            handoff = self.by_number.get(number)
            if handoff is not None:
                yield handoff

    def make(self, account: Account, handoff_id: str, now_s: float) -> Handoff:
        """Create a handoff of the account's tenant for an unknown id.

        Raises `RequestError`, `QuotaExceededError` or `DirectoryFullError`.
        """
        tenant = account.tenant
        check_handoff_id(handoff_id)
        self.check_room(tenant)
        account.keep(HANDOFF_BYTES)
        number = self.numbering.take(now_s)
        handoff = Handoff(number, tenant, handoff_id, now_s, account)
        self.live[tenant, handoff_id] = handoff
        self.by_number[number] = handoff
        self.tenants.holdings[tenant].live += 1
        return handoff

    def check_room(self, tenant: str) -> None:
        """Raise `QuotaExceededError` or `DirectoryFullError` if no further handoff may begin."""
        if self.limits.tenant_max_live is not None:
            self.tenants.check_handoff(tenant, self.limits.tenant_max_live)
        if len(self.by_number) + len(self.quarantine.held) >= self.limits.max_live:
            raise DirectoryFullError(
                f"the broker holds its maximum of {self.limits.max_live} handoffs: try again later"
            )

    def unmake(self, handoff: Handoff) -> None:
        """Remove all trace of a handoff whose first message was refused."""
        del self.live[handoff.tenant, handoff.handoff_id]
        del self.by_number[handoff.number]
        handoff.account.let_go(HANDOFF_BYTES)
        self.tenants.add(handoff.tenant, live=-1)

    def remember(self, handoff: Handoff) -> None:
        """Remember an ended handoff, and forget the oldest if there are too many."""
        key = (handoff.tenant, handoff.handoff_id)
        del self.live[key]
        self.ended[key] = handoff
        ended, most = self.tenants.holdings[handoff.tenant].ended, self.limits.tenant_max_ended
        ended.append(handoff.handoff_id)
        if most is not None and len(ended) > most:
            del self.ended[handoff.tenant, ended.popleft()]
        if len(self.ended) > self.limits.max_ended:
            self._forget_oldest()

    def forget_ended(self) -> None:
        """Forget all ended handoffs."""
        while self.ended:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        (tenant, _), _ = self.ended.popitem(last=False)
        self.tenants.forget_oldest(tenant)
