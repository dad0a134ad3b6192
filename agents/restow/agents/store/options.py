"""How a store is run, and what it has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from restow.agents.store.books.worth import Recomputing

ATTENTION_AT_10_000 = Recomputing(1.0, 1e-4)
"""From 10,000 tokens on attention costs more than the rest of the model."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a store is run.

    ``block_tokens`` None: as few as any block of the layout that it is made from. ``disk`` is a
    folder, of which states take up to ``disk_bytes``; None: what is evicted is gone.
    """

    engine_id: str
    broker: str | None
    memory_bytes: int
    block_tokens: int | None = None
    disk: Path | None = None
    disk_bytes: int = 0
    recomputing: Recomputing = ATTENTION_AT_10_000


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """What a store has at the moment, and what it has done since it started."""

    states: int
    """In memory."""
    used_bytes: int
    memory_bytes: int
    evictions: int
    """States that others took the place of, in memory."""
    disk_runs: int
    disk_used_bytes: int
    disk_lost: int
    """States that were not written, and runs that could not be read."""
    waiting: int
    """States to be asked for, as soon as fewer are on their way."""
    dropped: int
    """Those that waited in vain, because too many did."""
    asked: int
    """Demands for states that engines said are worth keeping."""
    kept: int
    """Those of them whose states came."""
    offered: int
    """States that were asked for."""
    given: int
    """Those of them that D has."""
    declined: int
    """Those of them that were not there, or could not be read."""
