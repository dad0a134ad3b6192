"""The holders of one tenant: its engines that tell what they hold, and the index of that."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from restow.broker.core.actions import EngineKey
from restow.broker.core.prefix.index import Index
from restow.broker.core.prefix.keys import Keys
from restow.broker.core.prefix.rules import GroupRule, longest, reached, step_of
from restow.broker.core.prefix.teller import Teller, Tellers
from restow.broker.core.prefix.words import HashForm, Held
from restow.broker.layout.values import ModelIdentity


@dataclass(slots=True, eq=False)
class Holders:
    """What one tenant's engines hold; nothing in here is of another tenant."""

    index: Index = field(default_factory=Index)
    tellers: dict[EngineKey, Teller] = field(default_factory=dict)
    alike: dict[tuple[ModelIdentity, HashForm], Tellers] = field(default_factory=dict)
    gone: deque[int] = field(default_factory=deque)
    """Slots of engines that hold nothing any more: they are found no more, and cleared in turns."""
    forgotten: int = 0
    """Holdings that were forgotten, because there were too many."""
    _slots: int = 0

    @property
    def empty(self) -> bool:
        """Whether nothing of the tenant is left."""
        return not self.tellers and self.index.empty

    def begin(
        self, engine: EngineKey, model: ModelIdentity, form: HashForm, rules: tuple[GroupRule, ...]
    ) -> Teller:
        """An engine begins to tell, and has not before."""
        slots = {}
        for rule in rules:
            self._slots += 1
            slots[rule.name] = self._slots
        teller = Teller(engine, model, form, rules, slots)
        self.tellers[engine] = teller
        alike = self.alike.setdefault((model, form), Tellers())
        alike.by_engine[engine] = teller
        alike.of_slot.update(dict.fromkeys(slots.values(), teller))
        alike.step = step_of(one.rules for one in alike.by_engine.values())
        return teller

    def end(self, engine: EngineKey) -> None:
        """An engine's word counts no more."""
        teller = self.tellers.pop(engine, None)
        if teller is None:
            return
        alike = self.alike[teller.model, teller.form]
        del alike.by_engine[engine]
        for slot in teller.slots.values():
            del alike.of_slot[slot]
        self.gone.extend(teller.slots.values())
        alike.step = step_of(one.rules for one in alike.by_engine.values())
        if not alike.by_engine:
            del self.alike[teller.model, teller.form]

    def find(self, alike: Tellers, keys: Keys, ends: Keys, positions: Sequence[int]) -> list[Held]:
        """Who holds how much of a chain; those that hold no state of it are left out.

        A state may stand at one of ``positions`` too, in tokens, whose keys are ``ends``.
        """
        held = _by_engine(alike, self.index.look(keys, alike.step))
        tails = _by_engine(alike, self.index.look(ends, 0)) if positions else {}
        found = []
        for engine in held.keys() | tails.keys():
            teller, groups = alike.by_engine[engine], held.get(engine, {})
            quantum_tokens = teller.form.quantum_tokens
            tokens = longest(teller.rules, groups, len(keys)) * quantum_tokens
            there = (1 << len(positions)) - 1
            for rule in teller.rules:
                there &= tails.get(engine, {}).get(rule.name, 0)
            while there and (last := positions[there.bit_length() - 1]) > tokens:
                if reached(teller.rules, groups, last // quantum_tokens):
                    tokens = last
                there ^= 1 << there.bit_length() - 1
            if tokens:
                found.append(Held(engine, tokens))
        return found

    def count(self, teller: Teller) -> dict[str, int]:
        """How many holdings an engine has of each group."""
        return {group: self.index.counts.get(slot, 0) for group, slot in teller.slots.items()}

    def keep_within(self, limit_bytes: int) -> None:
        """Forget the oldest until the rest has room; of engines that are gone, first."""
        while self.index.size_bytes > limit_bytes and self.gone:
            if not self.index.forget(self.gone[0], 16):
                self.gone.popleft()
        while self.index.size_bytes > limit_bytes and not self.index.empty:
            self.forgotten += self.index.drop_oldest()

    def clear(self, segments: int) -> int:
        """Forget in so many segments at most what engines held that are gone; how many were not."""
        while self.gone and segments > 0:
            before = self.index.segments_of(self.gone[0])
            left = self.index.forget(self.gone[0], segments)
            segments -= before - left
            if not left:
                self.gone.popleft()
        return segments


def _by_engine(alike: Tellers, found: Mapping[int, int]) -> dict[EngineKey, dict[str, int]]:
    """What slots hold, by engine and group; of those that count no more, nothing."""
    held: dict[EngineKey, dict[str, int]] = {}
    for slot, bits in found.items():
        teller = alike.of_slot.get(slot)
        if teller is not None:
            held.setdefault(teller.engine, {})[teller.groups[slot]] = bits
    return held
