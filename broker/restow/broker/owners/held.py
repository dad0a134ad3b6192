"""How far a pool is that a member owns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from restow.broker.words import Worded


class Stage(Enum):
    """How far a pool is that the member owns."""

    SERVING = "serving"
    DRAINING = "draining"
    """What is under way ends; nothing new is granted."""
    DRAINED = "drained"
    """Nothing is under way; it is to be released as soon as others know that we leave."""
    RELEASING = "releasing"
    """It may be another one's at any moment."""


@dataclass(frozen=True, slots=True)
class Held(Worded):
    """A pool that the member owns."""

    epoch: int
    stage: Stage = Stage.SERVING
    due_s: float = 0.0
    """When draining is over; releasing: when to ask once more."""
