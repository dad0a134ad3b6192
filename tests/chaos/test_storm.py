"""The storm's own promise: when all has healed, both sides of every handoff have begun."""

from __future__ import annotations

from random import Random

import pytest

from chaos_harness import storm as storm_module
from chaos_harness.cluster import Cluster
from chaos_harness.storm import Storm
from restow.broker.state_commands import Verb
from stamped.requests import Prompt


class Heard(Cluster):
    """A cluster of no engines, that notes what it is told and is always well."""

    def __init__(self) -> None:
        super().__init__(Random(1), None)  # noqa: S311 - reproducible, not secret
        self.begun: list[tuple[str, str]] = []

    def prefill(self, prompt: Prompt) -> None:
        self.begun.append(("P", prompt.name))

    def decode(self, prompt: Prompt, side: str = "D") -> None:
        self.begun.append((side, prompt.name))

    def compute(self, prompt: Prompt, side: str = "P") -> None:
        """Ignore the prompt: nothing is computed."""

    def ask(self, prompt: Prompt, name: str, side: str = "D", keeps: bool = False) -> None:
        self.begun.append((side, name))

    async def command(self, name: str, verb: Verb, prompt: Prompt) -> None:
        """Ignore the command: there is no store."""

    def evict(self, prompt: Prompt | None, side: str) -> None:
        """Ignore the eviction: nothing was kept."""

    async def connected(self) -> None:
        """Return at once, as if all engines were connected."""

    async def finished(self, within_s: float) -> str:
        return ""


async def test_what_begins_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storm_module, "KEPT_S", 0.2)
    for seed in range(8):
        cluster = Heard()
        async with cluster:
            storm = Storm(cluster, Random(seed), can_cut=False)  # noqa: S311
            await storm.calm(0.3)
            assert not await storm.heal()
            assert set(cluster.begun) == {*storm.begun()}
