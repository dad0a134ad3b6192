"""Handoffs that nothing stands against but what befalls brokers: all of them should end DONE."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from stamped.stamps import Violation

if TYPE_CHECKING:
    from simulation_harness.history import History

HANDOFFS = 4
SLOW_S = 9.0
"""Grants are as long, and agents are waited for, by a clock that may be a tenth too fast."""
BEFORE_S = 10.0
"""So long before all heals the last one begins."""


class Unhindered:
    """A few of them, if somebody looks at how they end."""

    def __init__(self, history: History) -> None:
        self.looks = False
        self._history = history
        self._rng = Random(history.report.seed + 3)  # noqa: S311 - numbers of its own
        self._names: list[str] = []

    def plan(self, within_s: float) -> None:
        """Decide on handoffs whose patience and leases outlast all that goes wrong."""
        history, rng = self._history, self._rng
        for number in range(HANDOFFS if self.looks else 0):
            prompt = history.prompt(f"unhindered{number}", healthy=True)
            self._names.append(prompt.name)
            at_s = rng.uniform(0.0, within_s - BEFORE_S)
            for side in "PD":
                history.loop.call_later(at_s + rng.uniform(0.0, 1.0), history.begin, side, prompt)

    def count(self) -> None:
        """Count the ends of these handoffs, but not of handoffs that found no free pages.

        Raises `Violation` if one failed without need.
        """
        report = self._history.report
        for name in self._names:
            p, d = (self._history.lives[side][-1].requests.said.get(name) for side in "PD")
            if p is None or d is None or ("", "NO_PAGES") in (p, d):
                continue
            report.unhindered[" ".join(d).strip()] += 1
            if not self._is_explained(p, d):
                raise Violation(f"{name} ended as {d} at D and {p} at P: only brokers failed")

    @property
    def _a_read_was_slow(self) -> bool:
        return self._history.fabric.longest_s > SLOW_S

    def _is_explained(self, p: tuple[str, str], d: tuple[str, str]) -> bool:
        match d:
            case "DONE", _:  # the broker that told D may have died before it told P
                return p == d
            case _, "READ_DEADLINE":  # a slow wire between engines
                return True
            case _, "AGENT_MISSING" | "GRANT_OUTLIVED" if self._a_read_was_slow:
                return True  # an agent says hello when its read is over; its report may be slow too
            # An agent that still reads when its stream breaks may be cut off before its next hello.
            case _, "AGENT_MISSING" | "AGENT_LOST" | "GRANT_OUTLIVED":
                faults = self._history.report.faults
                return any("cut_from_agents" in fault for fault in faults)
        return False
