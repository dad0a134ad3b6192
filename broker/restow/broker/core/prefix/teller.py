"""A teller: an engine that says what it holds, and how much of that was heard."""

from __future__ import annotations

from dataclasses import dataclass, field

from restow.broker.core.actions import EngineKey
from restow.broker.core.prefix.rules import GroupRule
from restow.broker.core.prefix.words import HashForm
from restow.broker.layout.values import ModelIdentity


@dataclass(slots=True, eq=False)
class Teller:
    """One engine, from its first batch on a stream to the end of that."""

    engine: EngineKey
    model: ModelIdentity
    """Of any revision: a key tells which revision it is of."""
    form: HashForm
    rules: tuple[GroupRule, ...]
    slots: dict[str, int]
    """The slot of each group that counts."""
    heard: int = 0
    """The number of the last batch."""
    groups: dict[int, str] = field(init=False)
    """The group of each slot."""

    def __post_init__(self) -> None:
        """Turn the slots round."""
        self.groups = {slot: group for group, slot in self.slots.items()}


@dataclass(slots=True, eq=False)
class Tellers:
    """Those of one tenant, one model and one form: what one holds others may use."""

    by_engine: dict[EngineKey, Teller] = field(default_factory=dict)
    of_slot: dict[int, Teller] = field(default_factory=dict)
    step: int = 0
    """As `rules.step_of` of its engines has it."""
