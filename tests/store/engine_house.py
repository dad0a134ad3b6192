"""Engines of the recall model around a broker, for stores between them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from transformers import NemotronHForCausalLM

from restow.agents.store.store import Store, StoreOptions
from restow.broker.families import ConvLayout, EngineSettings
from restow.demo.recall.task import make_prompts
from restow.demo.transformers.engine import EngineOptions
from restow.demo.transformers.rank_processes import ForkServer
from store.holding_engine import HoldingEngine, state, until

PROMPTS = [one.token_ids for one in make_prompts(6, seed=5)]
MANY = [one.token_ids for one in make_prompts(24, seed=9)]
MIB = 1 << 20
SD, DS = ConvLayout.SD, ConvLayout.DS
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class House:
    """A broker with engines of one model, started when first asked for."""

    model: NemotronHForCausalLM
    broker: str
    forks: ForkServer
    stack: ExitStack
    engines: dict[str, HoldingEngine]

    def engine(self, tp: int, conv: ConvLayout, page_tokens: int = 16) -> HoldingEngine:
        name = f"engine {tp}{conv}{page_tokens}"
        if name not in self.engines:
            settings = EngineSettings(tp=tp, conv_layout=conv, page_tokens=page_tokens)
            options = EngineOptions(name, self.broker, settings, (self.forks,) * tp)
            self.engines[name] = self.stack.enter_context(HoldingEngine(self.model, options))
        return self.engines[name]

    def store(self, name: str, memory_bytes: int = 16 * MIB, disk: Path | None = None) -> Store:
        options = StoreOptions(name, self.broker, memory_bytes, 16, disk, 1 << 30)
        return Store(self.engine(2, SD).layout, options)

    @property
    def p(self) -> HoldingEngine:
        return self.engine(2, SD)

    @property
    def d(self) -> HoldingEngine:
        return self.engine(1, DS)


def found(engine: HoldingEngine, tokens: Tokens, by: str) -> None:
    """Wait until the engine ``by`` has told that it holds the state."""
    until(lambda: engine.is_held(state(tokens), by))


def kept(house: House, name: str, prompts: list[Tokens]) -> None:
    """Have P hold states worth keeping, and evict them when the store has them."""
    for tokens in prompts:
        house.p.hold(tokens, state(tokens))
        found(house.p, tokens, name)
    house.p.evict_all()
