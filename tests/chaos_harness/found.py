"""What was seen of a cluster."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Found:
    """What was seen, over all lives."""

    stamps: dict[str, set[int]] = field(default_factory=dict)
    """Of each handoff, what P wrote."""
    ends: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Side, state and reason; LOST where the scheduler was killed before it heard."""
    said: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    """By side and handoff: state and reason."""
    late_s: dict[str, float] = field(default_factory=dict)
    """Side: how much later than promised an engine heard an end, at most."""
    violations: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    """Processes that nobody killed, and what their log said last."""
    kept: set[str] = field(default_factory=set)
    """What was computed to be kept by its content."""

    def check(self, side: str, name: str, stamps: set[int]) -> None:
        """Note it if a state that is DONE is not the one that was written."""
        right = self.stamps.get(name, set())
        # What two engines have computed alike, a store may have parts of from either.
        alike = len(stamps) == 1 or name in self.kept
        if not stamps or not alike or not stamps <= right:
            self.violations.append(f"{name} is DONE at {side} with {stamps} instead of {right}")
