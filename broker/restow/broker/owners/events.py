"""What a member hears: answers of the registry, what its watch saw, what its broker wants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from restow.broker.layout.values import Pool
from restow.broker.owners.claim import Claim


@dataclass(frozen=True, slots=True)
class Joined:
    """The registry has the member under its address."""

    lease: int
    length_s: float
    sent_s: float
    """When that was asked for, by the member's clock."""


@dataclass(frozen=True, slots=True)
class JoinFailed:
    """It has not: it did not answer, or another member has that address."""


@dataclass(frozen=True, slots=True)
class KeptAlive:
    """A lease has begun anew."""

    lease: int
    length_s: float
    sent_s: float


@dataclass(frozen=True, slots=True)
class LeaseGone:
    """A lease has ended, as any call may tell."""

    lease: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """Whose a pool is, as a claim found it or made it."""

    pool: Pool
    claim: Claim
    number: int
    """Of the try."""


@dataclass(frozen=True, slots=True)
class ClaimFailed:
    """It is not known whether a claim was taken: try again."""

    pool: Pool
    number: int


@dataclass(frozen=True, slots=True)
class Released:
    """A pool's key of that epoch is gone."""

    pool: Pool
    epoch: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The others do not count on the member any more."""


@dataclass(frozen=True, slots=True)
class Seen:
    """All there is in the registry at a revision, as a watch begins."""

    revision: int
    members: frozenset[str]
    claims: Mapping[Pool, Claim]


@dataclass(frozen=True, slots=True)
class Changed:
    """What one revision has changed; None: gone."""

    revision: int
    members: Mapping[str, bool]
    claims: Mapping[Pool, Claim | None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Somebody asks for a pool."""

    pool: Pool


@dataclass(frozen=True, slots=True)
class Idle:
    """Nobody uses a pool that the member owns."""

    pool: Pool


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is under way any more in a pool that was to be handed over."""

    pool: Pool
    epoch: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The broker is about to end."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Joined
    | JoinFailed
    | KeptAlive
    | LeaseGone
    | Claimed
    | ClaimFailed
    | Released
    | Withdrawn
    | Seen
    | Changed
    | Wanted
    | Idle
    | Drained
    | Leave
    | Tick
)
