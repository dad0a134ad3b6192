"""What a member wants: of the registry, and of the broker that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from restow.broker.layout.values import Pool


@dataclass(frozen=True, slots=True)
class Join:
    """Registry: make a lease and the member's key. Answered by `Joined` or `JoinFailed`."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Registry: have the lease begin anew. Answered by `KeptAlive`, `LeaseGone` or nothing."""

    lease: int


@dataclass(frozen=True, slots=True)
class TakePool:
    """Registry: make the pool's key if there is none. `Claimed`, `ClaimFailed` or `LeaseGone`."""

    pool: Pool
    lease: int
    number: int


@dataclass(frozen=True, slots=True)
class ReleasePool:
    """Registry: delete the pool's key if it is of that epoch. `Released` or nothing."""

    pool: Pool
    epoch: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Registry: delete the member's key if it is of that lease. `Withdrawn` or nothing."""

    lease: int


@dataclass(frozen=True, slots=True)
class Revoke:
    """Registry: end the lease. Nothing is answered."""

    lease: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Broker: the pool is ours, in this epoch. Said again: go on, it stays."""

    pool: Pool
    epoch: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Broker: grant nothing new in the pool, and say `Drained` when nothing is under way."""

    pool: Pool
    epoch: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Broker: the pool is not ours any more: tell its clients where to go, and forget."""

    pool: Pool
    epoch: int
    to: str | None
    """Who has it, or is about to; None: it is not known."""


@dataclass(frozen=True, slots=True)
class Left:
    """Broker: all is handed on."""


Action = Join | KeepAlive | TakePool | ReleasePool | Withdraw | Revoke | Serve | Drain | Lost | Left
