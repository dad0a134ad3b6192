"""The engines of one side: which is asked next, and which are better left alone for now."""

from __future__ import annotations

import random
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Engine:
    """One engine, by its base address."""

    base: str
    in_flight: int = 0
    healthy: bool = True
    """Whether it said so when it was last asked."""
    aside_until_s: float = 0.0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """One more request under way."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Engines:
    """All engines that prefill, or all that decode."""

    def __init__(self, bases: Sequence[str], aside_s: float) -> None:
        """Take engines by their addresses; one that fails is left alone for ``aside_s``."""
        self.engines = tuple(Engine(base.rstrip("/")) for base in bases)
        self._aside_s = aside_s

    def choose(self, tried: Container[Engine]) -> Engine:
        """The least busy one that is well and was not ``tried``.

        There always is one: where all are unwell, the next request finds out whether they still
        are. Equals are drawn by lot, so that the two sides do not go in step.
        """
        now_s = time.monotonic()

        def rank(engine: Engine) -> tuple[bool, bool, int, float]:
            unwell = not engine.healthy or now_s < engine.aside_until_s
            return unwell, engine in tried, engine.in_flight, random.random()  # noqa: S311

        return min(self.engines, key=rank)

    def put_aside(self, engine: Engine) -> None:
        """Ask others for a while: it has just failed."""
        engine.aside_until_s = time.monotonic() + self._aside_s
