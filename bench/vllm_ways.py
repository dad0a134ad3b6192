"""`Way` hands prompts over in one way, and keeps how long each took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from restow.agents.engines.recall.task import Prompt
from vllm_harness.engine import Answer, VllmEngine

PATIENCE_S = 30.0
"""What takes longer has failed."""
MOST_FAILURES = 3
"""After so many, a way is asked no more until the next case."""


@dataclass(frozen=True)
class Taken:
    """Seconds from P's answer to D's first token and to its second, and how right replies were."""

    first_s: list[float]
    second_s: list[float]
    asked_s: list[tuple[float, float]]
    """From the question to both."""
    note: str


Measured = dict[str, Taken]
"""By way."""


@dataclass
class Found:
    """Of all ways of a pair."""

    one: Measured = field(default_factory=dict)
    """One request after the other."""
    at_once: Measured = field(default_factory=dict)
    """All of them: ``first_s`` has how long it took."""
    clients: dict[int, Measured] = field(default_factory=dict)
    """By their number."""

    def add(self, other: Found) -> None:
        self.one |= other.one
        self.at_once |= other.at_once
        for count, measured in other.clients.items():
            self.clients[count] = self.clients.get(count, {}) | measured


@dataclass
class Way:
    """One way to hand over, and what came of it."""

    name: str
    engines: Sequence[VllmEngine]
    """P and D, or the one that serves alone."""
    early: bool
    more: dict[str, Any] = field(default_factory=dict)
    first_s: list[float] = field(default_factory=list)
    second_s: list[float] = field(default_factory=list)
    asked_s: list[tuple[float, float]] = field(default_factory=list)
    right: int = 0
    failed: int = 0
    asked: int = 0

    async def hand_over(self, prompt: Prompt, handoff_id: str) -> None:
        """One prompt; the reply is looked at, and a failure has no time."""
        if self.failed >= MOST_FAILURES:
            return
        self.asked += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._hand_over(prompt, handoff_id)
        except TimeoutError:
            self.failed += 1

    async def _hand_over(self, prompt: Prompt, handoff_id: str) -> None:
        ids, (*others, decode) = list(prompt.token_ids), self.engines
        began_s = time.monotonic()
        if not others:
            first = answer = await decode.ask(ids, len(prompt.answer_ids))
        elif self.early:
            params = {"handoff_id": handoff_id, **self.more}
            number = others[0].begin(ids, 1, params)
            answer = await decode.ask(ids, len(prompt.answer_ids), params)
            first = await others[0].answer(number)
        else:
            first = await others[0].ask(ids, 1, {"do_remote_decode": True})
            answer = await decode.ask(ids, len(prompt.answer_ids), first.params)
        self._look_at(prompt, began_s, first, answer)

    def _look_at(self, prompt: Prompt, began_s: float, first: Answer, answer: Answer) -> None:
        self.right += answer.tokens == prompt.answer_ids
        if not answer.tokens:
            self.failed += 1
            return
        self.first_s.append(answer.first_s - first.done_s)
        self.second_s.append(answer.second_s - first.done_s)
        self.asked_s.append((answer.first_s - began_s, answer.second_s - began_s))

    def take(self) -> Taken:
        """What was measured since the last call."""
        note = f"{self.right} of {self.asked} right"
        note += f", {self.failed} failed" if self.failed else ""
        found = Taken(self.first_s, self.second_s, self.asked_s, note)
        self.first_s, self.second_s, self.asked_s = [], [], []
        self.right, self.failed, self.asked = 0, 0, 0
        return found
