"""How a store is run, and what it has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from restow.agents.store.worth import Recomputing

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
    """What a store has at the moment."""

    states: int
    used_bytes: int
    memory_bytes: int
    evictions: int
    disk_runs: int = 0
    disk_used_bytes: int = 0
    disk_lost: int = 0
