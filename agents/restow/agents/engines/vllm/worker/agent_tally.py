"""An `AgentTally` tells what a worker's agent has read since it was asked last."""

from __future__ import annotations

from typing import Any

from restow.agents.engines.vllm.interval import POOLS, nothing
from restow.agents.link.settings import AgentFigures


class AgentTally:
    """Compares figures with those before. Belongs to the worker's thread."""

    def __init__(self) -> None:
        """Nothing was told."""
        self._told = AgentFigures()

    def take(self, figures: AgentFigures) -> dict[str, Any] | None:
        """Return what is new, as an interval's values; None: nothing is.

        Staging is told as long as any is in use, and once when none is any more: of several ranks
        the most counts, so that one which tells nothing must have none.
        """
        told, self._told = self._told, figures
        reads = {}
        for kind, counts in figures.reads.items():
            before = told.reads[kind]
            new = [
                counts.reads - before.reads,
                counts.read_bytes - before.read_bytes,
                counts.errors - before.errors,
            ]
            if any(new):
                reads[kind] = new
        used = [figures.gather.used_bytes, figures.scatter.used_bytes]
        used_before = [told.gather.used_bytes, told.scatter.used_bytes]
        lanes_given_up = figures.lanes_given_up - told.lanes_given_up
        if not (reads or lanes_given_up or any(used) or any(used_before)):
            return None
        return nothing() | {
            "reads": reads,
            "lanes_given_up": lanes_given_up,
            "staging_used_bytes": dict(zip(POOLS, used, strict=True)),
        }
