"""What commands about single states want, and how they end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from restow.broker.words import Worded


class Verb(StrEnum):
    """What a command wants of a store."""

    PREFETCH = "prefetch"
    """Get the state from an engine, or from another store, that holds it."""
    PIN = "pin"
    """Keep the state in memory for a time."""
    RELEASE = "release"
    """End the pins of the state."""
    EVICT = "evict"
    """Drop the state."""
    MOVE = "move"
    """Drop the state once another store has got it."""


class Outcome(StrEnum):
    """How a command stands."""

    ACCEPTED = "ACCEPTED"
    """It is being carried out."""
    DONE = "DONE"
    """It was carried out."""
    CLIPPED = "CLIPPED"
    """It was carried out for a shorter state of the same prompt."""
    REFUSED = "REFUSED"
    """It was not carried out."""
    MISSING = "MISSING"
    """Nobody holds the state, or the store does not."""


@dataclass(frozen=True, slots=True)
class Answer(Worded):
    """How a store, or the broker for it, ends a command."""

    outcome: Outcome
    """How the command ended."""
    tokens: int = 0
    """Tokens of the state for which it was carried out."""
    reason: str = ""
    """A stable word, if it was not carried out."""
    detail: str = ""
    """The reason in words."""
    left_s: float = 0.0
    """How long its pin still lasts; 0: it has ended, or there is none."""


def refused(reason: str, words: str) -> Answer:
    """Return the answer to a command that is not carried out."""
    return Answer(Outcome.REFUSED, 0, reason, words)
