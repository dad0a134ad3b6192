"""A router that counts only what it was told, and the engines of which it is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

from laws.test_prefixes import (
    CHAINS,
    ENGINES,
    FORM,
    LAYOUTS,
    LENGTH,
    chain_hashes,
)
from restow.broker.core.common.actions import TellHoldings
from restow.broker.core.common.events import Batch, Chain, HashRun
from restow.broker.core.common.limits import Limits
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.prefix.changes import Change, Kind, Part
from restow.broker.core.prefix.prefixes import Prefixes

TENANT = "a"
SIZE = FORM.hash_bytes


def split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + SIZE] for at in range(0, len(hashes), SIZE)]


@dataclass(frozen=True)
class Group:
    """What a router knows of a group: tokens of a block (0: a snapshot) and of its window."""

    block_tokens: int
    window_tokens: int


def matched(
    groups: Mapping[str, Group], held: Mapping[str, set[bytes]], hashes: list[bytes]
) -> int:
    """Return the tokens that are held, as docs/concepts defines a match: by every group."""
    quantum = FORM.quantum_tokens

    def holds(name: str, group: Group, tokens: int) -> bool:
        ours = held.get(name, set())
        if not group.block_tokens:
            return hashes[tokens // quantum - 1] in ours
        first = max(tokens - group.window_tokens, 0) if group.window_tokens else 0
        for begin in range(0, tokens, group.block_tokens):
            end = min(begin + group.block_tokens, tokens)
            if end > first and hashes[end // quantum - 1] not in ours:
                return False
        return True

    for tokens in range(len(hashes) * quantum, 0, -quantum):
        if groups and all(holds(name, group, tokens) for name, group in groups.items()):
            return tokens
    return 0


@dataclass
class View:
    """What a router knows of an engine."""

    groups: dict[str, Group]
    held: dict[tuple[str, str], set[bytes]] = field(default_factory=dict)
    """By salt and group."""

    def tokens(self, salt: str, hashes: list[bytes]) -> int:
        of_salt = {group: ours for (said, group), ours in self.held.items() if said == salt}
        return matched(self.groups, of_salt, hashes)


class Router:
    """Counts only what it was told."""

    def __init__(self) -> None:
        self.views: dict[str, View] = {}
        self.current = False

    def hear(self, part: Part) -> None:
        if part.begins:
            self.views, self.current = {}, False
        for change in part.changes:
            self._hear(change)
        self.current = self.current or part.current

    def _hear(self, change: Change) -> None:
        name, quantum = change.teller.engine.engine_id, change.teller.form.quantum_tokens
        if change.kind is Kind.BEGAN:
            self.views[name] = View(
                {
                    rule.name: Group(rule.block_quanta * quantum, rule.window_quanta * quantum)
                    for rule in change.teller.rules
                }
            )
        elif change.kind is Kind.ENDED:
            self.views.pop(name, None)
        elif name in self.views:
            ours = self.views[name].held.setdefault((change.salt, change.group), set())
            if change.kind is Kind.HELD:
                ours.update(split(change.hashes))
            else:
                ours.difference_update(split(change.hashes))

    def believed(self, salt: str, hashes: list[bytes]) -> dict[str, int]:
        found = {name: view.tokens(salt, hashes) for name, view in self.views.items()}
        return {name: tokens for name, tokens in found.items() if tokens}


@dataclass
class Engine:
    """An engine: what it really holds, and what it has told."""

    record: EngineRecord
    number: int = 0
    held: dict[tuple[str, str], set[bytes]] = field(default_factory=dict)


class Fleet:
    """Engines of two tenants that hold, evict, lose messages, die and come again, by chance."""

    def __init__(self, random: Random, limits: Limits | None = None) -> None:
        self.random = random
        self.prefixes = Prefixes(limits or Limits(), b"secret")
        self.engines = [Engine(record) for record in ENGINES]
        self.mine = [one for one in self.engines if one.record.key.tenant == TENANT]

    def _say(
        self, engine: Engine, salt: str, held: Iterable[HashRun], evicted: Iterable[HashRun] = ()
    ) -> None:
        engine.number += 1
        batch = Batch(engine.number, FORM, salt, tuple(held), tuple(evicted))
        self.answer(self.prefixes.hear(engine.record, batch))

    def answer(self, actions: Iterable[object]) -> None:
        """Let engines report again that the broker asks."""
        for action in actions:
            assert isinstance(action, TellHoldings)
            (engine,) = [one for one in self.engines if one.record.key == action.engine]
            self.tell_all(engine)

    def tell_all(self, engine: Engine) -> None:
        engine.number = 0
        self._say(engine, "", ())
        for (salt, group), hashes in engine.held.items():
            self._say(engine, salt, [HashRun(group, b"".join(sorted(hashes)))])

    def step(self) -> None:
        random = self.random
        engine = random.choice(self.engines)
        hashes, salt = chain_hashes(random.randrange(CHAINS)), random.choice(["", "s"])
        groups = sorted(engine.record.block_tokens)
        match random.choices(
            ["hold", "hold one", "evict", "lose", "die", "again", "tick"], [9, 6, 8, 1, 1, 1, 2]
        ):
            case ["hold"]:
                first = random.choice([0, 0, random.randrange(LENGTH)])
                self._hold(engine, salt, groups, hashes[first : first + random.randint(1, LENGTH)])
            case ["hold one"]:
                count = random.randint(1, 4)
                self._hold(engine, salt, [random.choice(groups)], random.sample(hashes, count))
            case ["evict"]:
                group, gone = random.choice(groups), random.sample(hashes, random.randint(1, 8))
                engine.held.get((salt, group), set()).difference_update(gone)
                self._say(engine, salt, (), [HashRun(group, b"".join(gone))])
            case ["lose"]:  # the engine's next message tells the broker that one was lost
                group = random.choice(groups)
                engine.held.get((salt, group), set()).difference_update(hashes)
                engine.number += 1
            case ["die"]:
                engine.number, engine.held = 0, {}
                self.prefixes.forget(engine.record.key)
            case ["again"]:
                self.prefixes.forget(engine.record.key)
                self.tell_all(engine)
            case _:
                self.prefixes.tick()

    def _hold(self, engine: Engine, salt: str, groups: list[str], hashes: list[bytes]) -> None:
        for group in groups:
            engine.held.setdefault((salt, group), set()).update(hashes)
        run, twice = b"".join(hashes), self.random.choice([1, 1, 2])
        self._say(engine, salt, [HashRun(group, run * twice) for group in groups])

    def settle(self) -> None:
        """Let the broker hear of every message that was lost."""
        for engine in self.engines:
            if engine.number:
                self._say(engine, "", ())

    def prompts(self) -> Iterator[tuple[str, list[bytes]]]:
        for chain in range(CHAINS):
            for salt in ("", "s"):
                yield salt, chain_hashes(chain)

    def found(self, salt: str, hashes: list[bytes]) -> dict[str, int]:
        """Return what the broker's directory answers, for all models."""
        found: dict[str, int] = {}
        for model in {layout.model.identity for layout in LAYOUTS}:
            asked = Chain(model, FORM, salt, b"".join(hashes))
            found |= {one.engine.engine_id: one.tokens for one in self.prefixes.find(TENANT, asked)}
        return found

    def check_held(self, name: str, salt: str, hashes: list[bytes], tokens: int) -> None:
        """Check that an engine really holds a state of this many tokens, in all of its groups."""
        (engine,) = [one for one in self.mine if one.record.key.engine_id == name]
        teller = self.prefixes.teller(engine.record.key)
        assert teller is not None, f"{name} is gone, and has no state of {tokens} tokens"
        quantum = FORM.quantum_tokens
        groups = {
            rule.name: Group(rule.block_quanta * quantum, rule.window_quanta * quantum)
            for rule in teller.rules
        }
        held = {group: ours for (said, group), ours in engine.held.items() if said == salt}
        assert matched(groups, held, hashes[: tokens // quantum]) == tokens
