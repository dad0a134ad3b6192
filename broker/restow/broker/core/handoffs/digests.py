"""Digests of content: of which handoffs, and how many were compared."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from restow.broker.core.actions import State
from restow.broker.core.events import Failure, Settlement, StagedRun
from restow.broker.words import Worded

DIGEST_BYTES = 16
MISMATCH = "DIGEST_MISMATCH"
_MASK = (1 << 64) - 1


class DigestMode(StrEnum):
    """Of which handoffs the content is hashed by P and compared by D."""

    OFF = "off"
    SAMPLED = "sampled"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Digests(Worded):
    """The choice of handoffs; one of ``every`` if they are sampled."""

    mode: DigestMode = DigestMode.OFF
    every: int = 64

    def choose(self, number: int) -> bool:
        """Whether the handoff of that number is checked: always the same for the same number."""
        if self.mode is not DigestMode.SAMPLED:
            return self.mode is DigestMode.ALL
        return _mixed(number) % self.every == 0


def _mixed(number: int) -> int:
    """All bits of a number in each bit of another (splitmix64).

    Numbers are times: their low bits are nearly always zero, and clients that keep a rhythm would
    be chosen always or never.
    """
    mixed = (number + 0x9E3779B97F4A7C15) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


def not_hashed(run: StagedRun, rank: int) -> Failure | None:
    """Why a run can't be read, if it came without the digest that was asked for."""
    if len(run.digest) == DIGEST_BYTES:
        return None
    return _missing(f"rank {rank} of P was to hash what is read from it, and answered no digest")


def not_compared(settlement: Settlement, rank: int) -> Failure | None:
    """Why a state can't be used, if a rank did not compare what it was to compare."""
    if settlement.compared:
        return None
    return _missing(f"rank {rank} of D was to compare digests, and did not say that it has")


def _missing(words: str) -> Failure:
    return Failure(State.FAILED, "DIGEST_MISSING", f"{words}: is its agent older than the broker?")


@dataclass(slots=True)
class Checks:
    """Handoffs whose digests were compared."""

    checked: int = 0
    mismatches: int = 0

    def count(self, state: State, failure: Failure | None) -> None:
        """One that was to be checked has ended: one that failed otherwise was not compared."""
        mismatch = failure is not None and failure.reason == MISMATCH
        self.checked += state is State.DONE or mismatch
        self.mismatches += mismatch
