"""The engines of one side: which is asked next, and which are better left alone for now."""

from __future__ import annotations

import random
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Self

from restow.broker.client import PrefixHolder

Held = Mapping[str, PrefixHolder]
"""What engines hold of one prompt, by their ids."""
NOBODY: Final[Held] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Engine:
    """One engine, by its base address."""

    base: str
    engine_id: str = ""
    """As the broker knows it; empty: nobody has said."""
    in_flight: int = 0
    healthy: bool = True
    """Whether it said so when it was last asked."""
    aside_until_s: float = 0.0

    @classmethod
    def named(cls, words: str) -> Self:
        """The engine of ``URL`` or ``ID=URL``.

        >>> Engine.named("p1=http://h:8100/").engine_id, Engine.named("http://h/?a=b").engine_id
        ('p1', '')
        """
        engine_id, equals, base = words.partition("=")
        if is_url(words) or not equals:
            engine_id, base = "", words
        return cls(base.rstrip("/"), engine_id)

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

    def __init__(self, named: Sequence[str], aside_s: float, busy_tokens: int = 0) -> None:
        """Take engines as `Engine.named` does; one that fails is left alone for ``aside_s``.

        ``busy_tokens`` is how many tokens held outweigh one request more under way.
        """
        self.engines = tuple(map(Engine.named, named))
        self._aside_s, self._busy_tokens = aside_s, busy_tokens

    def choose(self, tried: Container[Engine], held: Held = NOBODY) -> Engine:
        """Of those that are well and were not ``tried``, the one that holds most and is not busy.

        Each request under way counts against what an engine holds of the prompt; where nobody holds
        any it is the least busy one. There always is one: where all are unwell, the next request
        finds out whether they still are. Equals are drawn by lot, so that the two sides do not go
        in step.
        """
        now_s = time.monotonic()

        def rank(engine: Engine) -> tuple[bool, bool, int, int, float]:
            unwell = not engine.healthy or now_s < engine.aside_until_s
            busy, tokens = engine.in_flight, 0
            if (holder := held.get(engine.engine_id)) is not None:
                unwell |= holder.draining
                # The broker knows of what other routers have under way.
                busy, tokens = max(busy, holder.open), holder.tokens
            lead_tokens = tokens - busy * self._busy_tokens
            return unwell, engine in tried, -lead_tokens, busy, random.random()  # noqa: S311

        return min(self.engines, key=rank)

    def put_aside(self, engine: Engine) -> None:
        """Ask others for a while: it has just failed."""
        engine.aside_until_s = time.monotonic() + self._aside_s


def is_url(words: str) -> bool:
    """Whether they are one, without an id before it."""
    return words.startswith(("http://", "https://"))
