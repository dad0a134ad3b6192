"""The recall model, and engines of it; brokers and engines start when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import NemotronHForCausalLM

from restow.broker.families import EngineSettings
from restow.broker.layout import Layout
from restow.broker.planner import Strategy
from restow.demo.experiment import running_broker_process
from restow.demo.recall.model import load_model
from restow.demo.transformers.engine import Engine, EngineOptions
from restow.demo.transformers.rank_processes import ForkServer


@dataclass(frozen=True)
class House:
    """A model, where its ranks run, and all that has started."""

    model: NemotronHForCausalLM
    forks: ForkServer
    stack: ExitStack
    _brokers: dict[tuple[Strategy, bool], str] = field(default_factory=dict)
    _engines: dict[str, Engine] = field(default_factory=dict)

    def broker(self, strategy: Strategy = Strategy.AUTO, allow_narrowing: bool = False) -> str:
        key = strategy, allow_narrowing
        if key not in self._brokers:
            self._brokers[key] = self.stack.enter_context(running_broker_process(*key))
        return self._brokers[key]

    def engine(self, name: str, broker: str, settings: EngineSettings, **more: Any) -> Engine:
        """Return the engine of a name, which runs until the house ends."""
        if name not in self._engines:
            unstarted = self.unstarted(name, broker, settings, **more)
            self._engines[name] = self.stack.enter_context(unstarted)
        return self._engines[name]

    def unstarted(
        self,
        name: str,
        broker: str,
        settings: EngineSettings,
        *,
        home: ForkServer | Path | None = None,
        announce: Callable[[Layout], Layout] = lambda layout: layout,
        model: NemotronHForCausalLM | None = None,
        **options: Any,
    ) -> Engine:
        homes = (home or self.forks,) * settings.tp
        told = EngineOptions(name, broker, settings, homes, **options)
        return Engine(model or self.model, told, announce)


@contextmanager
def demo_house() -> Iterator[House]:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        yield House(load_model(), stack.enter_context(ForkServer()), stack)
