"""How long leases are, and what is left of them for doubt."""

from __future__ import annotations

from dataclasses import dataclass

from restow.broker.errors import RequestError


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of membership, in seconds. Raises `RequestError` for what can't be kept."""

    lease_s: float = 2.0
    """How long a member is thought to live that says nothing; the registry may make it longer."""
    margin_s: float = 0.5
    """So long before the end of its lease a member stops: for clocks that differ in their pace, and
    for what is decided and not yet sent."""
    keep_alive_every_s: float = 0.4
    drain_s: float = 1.0
    """How long what is under way may hold up the handing over of a pool."""
    give_up_s: float = 1.0
    """So long after the end of its lease a member takes its pools for another one's, though nobody
    has said so: who is cut off from the registry alone would keep its clients for ever."""
    retry_s: float = 0.3
    """After a call that failed."""

    @classmethod
    def of_lease(cls, lease_s: float) -> Timing:
        """All times for a lease of that length: a quarter is margin, and it is kept five times."""
        return cls(
            lease_s,
            margin_s=lease_s / 4,
            keep_alive_every_s=lease_s / 5,
            give_up_s=lease_s / 2,
        )

    def __post_init__(self) -> None:
        """Raise `RequestError`."""
        usable_s = self.lease_s - self.margin_s
        if self.margin_s < 0 or self.keep_alive_every_s <= 0 or usable_s < self.keep_alive_every_s:
            raise RequestError(
                f"a lease of {self.lease_s:g} s less {self.margin_s:g} s can't be kept by saying "
                f"so every {self.keep_alive_every_s:g} s: make the lease longer",
                field="lease_s",
            )


@dataclass(frozen=True, slots=True)
class Lease:
    """A member's lease, as its own clock has it."""

    number: int
    length_s: float
    sent_s: float
    """When the last of its requests that was answered had been sent: it can't have begun before."""

    def may_act(self, now_s: float, margin_s: float) -> bool:
        """Whether nobody else can own what stands under it, now and for the margin."""
        return now_s < self.sent_s + self.length_s - margin_s

    def is_over(self, now_s: float, since_s: float) -> bool:
        """Whether it has ended so long ago, as far as we have heard."""
        return now_s >= self.sent_s + self.length_s + since_s
