"""What is asked for by its content in a history: who computes it, who asks, who evicts it, when."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from stamped.requests import Prompt

if TYPE_CHECKING:
    from simulation_harness.history import History

MOST = 3
WITHIN_S = 30.0
EVICTED = 0.7
"""How often one is evicted."""
EVICTED_BEFORE = 0.2
"""How often that happens just before it is asked for."""


class Prefixes:
    """Up to so many of them, each computed by one engine or two, and asked for now and then."""

    def __init__(self, history: History) -> None:
        self._history = history
        # Numbers of its own: what else happens in a history stays as it is.
        self._rng = Random(history.report.seed + 1)  # noqa: S311

    def plan(self) -> None:
        """Plan which states engines compute, and when they are asked for and evicted."""
        rng = self._rng
        for number in range(rng.randint(0, MOST)):
            prompt = self._history.prompt(f"kept{number}")
            for side in rng.sample("PDE", rng.randint(1, 2)):
                self._later(WITHIN_S / 3, self._compute, side, prompt)
            for asked in range(rng.randint(1, 3)):
                name = f"kept{number}?{asked}"
                at_s = self._later(WITHIN_S, self._ask, rng.choice("PDE"), prompt, name)
                if rng.random() < EVICTED_BEFORE:
                    for side in "PDE":
                        before_s = max(at_s - rng.random(), 0.0)
                        self._history.loop.call_later(before_s, self._evict, side, prompt)
            if rng.random() < EVICTED:
                self._later(WITHIN_S, self._evict, rng.choice("PDE"), prompt)

    def _later(self, within_s: float, call: Callable[..., object], *given: object) -> float:
        """Call something within some time; return when that will be."""
        at_s = self._rng.uniform(0.0, within_s)
        self._history.loop.call_later(at_s, call, *given)
        return at_s

    def _compute(self, side: str, prompt: Prompt) -> None:
        engine = self._history.lives[side][-1]
        engine.spawn(engine.kept.compute(prompt, self._history.computed))

    def _ask(self, side: str, prompt: Prompt, name: str) -> None:
        history, keeps = self._history, self._rng.random() < 0.5
        engine = history.lives[side][-1]
        engine.ask(prompt, name, history.computed, self._right, keeps)

    def _right(self, name: str) -> set[int]:
        return self._history.held_stamps.get(name, set())

    def _evict(self, side: str, prompt: Prompt) -> None:
        engine = self._history.lives[side][-1]
        engine.spawn(engine.kept.evict(prompt))
