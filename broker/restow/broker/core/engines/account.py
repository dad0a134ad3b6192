"""An account: the bytes that are kept for one tenant, within what it may."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

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
