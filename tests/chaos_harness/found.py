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
    broken: list[str] = field(default_factory=list)
    """Promises, but for what `violations` adds."""
    crashes: list[str] = field(default_factory=list)
    """Processes that nobody killed, and what their log said last."""
    kept: set[str] = field(default_factory=set)
    """What was computed to be kept by its content."""

    _unlike: list[tuple[str, str, set[int]]] = field(default_factory=list)

    @property
    def violations(self) -> list[str]:
        """Return the promises that were broken.

        P may be heard after D, though P spoke first, because each has its own pipe.
        """
        self._unlike = [one for one in self._unlike if not self._is_right(*one[1:])]
        unlike = (
            f"{name} is DONE at {side} with {stamps} instead of {self.stamps.get(name, set())}"
            for side, name, stamps in self._unlike
        )
        return [*self.broken, *unlike]

    def check(self, side: str, name: str, stamps: set[int]) -> None:
        """Note a state that is DONE and not the state that was written."""
        if not self._is_right(name, stamps):
            self._unlike.append((side, name, stamps))

    def _is_right(self, name: str, stamps: set[int]) -> bool:
        # What two engines have computed alike, a store may have parts of from either.
        alike = len(stamps) == 1 or name in self.kept
        return bool(stamps) and alike and stamps <= self.stamps.get(name, set())
