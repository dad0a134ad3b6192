"""The match rule: up to which token the groups of one engine hold a state, all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, lcm

from restow.broker.layout import Layout
from restow.broker.layout.values import Field, Kind

SNAPSHOT = 0
"""In place of a block's quanta."""


@dataclass(frozen=True, slots=True)
class GroupRule:
    """What one group must hold, counted in quanta of a chain. Place 0 is the end of the first.

    Blocks of ``block_quanta`` are told by the hash at their end; one that is filled in part, by
    the hash where it is filled to. ``window_quanta``: only that far before the position anything
    is needed; 0: from the beginning. `SNAPSHOT` instead of a block: one, at the position.
    """

    name: str
    block_quanta: int
    window_quanta: int = 0

    @property
    def whole(self) -> bool:
        """Whether every block from the beginning is needed."""
        return bool(self.block_quanta) and not self.window_quanta

    def positions(self, held: int, count: int) -> int:
        """The places of ``count`` at which a state may stand, of those ``held``, all as bits."""
        if self.block_quanta == SNAPSHOT:
            return held
        ends = _multiples(self.block_quanta, count)
        filled = (held | ~ends) & ((1 << count) - 1)
        if not self.window_quanta:
            missing = ~filled & (filled + 1)
            return (missing - 1) & (ends | held)
        return _runs(filled, min(self.window_quanta, count)) & (ends | held)

    def reaches(self, held: int, count: int) -> bool:
        """Whether all is held that a state between places ``count`` and the next needs before it.

        Beside what it has at its own token, which is told by a hash of its own.
        """
        if self.block_quanta == SNAPSHOT:
            return True
        first = max(count - self.window_quanta, 0) if self.window_quanta else 0
        needed = _multiples(self.block_quanta, count) >> first << first
        return not needed & ~held


def _multiples(step: int, count: int) -> int:
    """Bits of the places that are the last of ``step`` each.

    >>> bin(_multiples(3, 7))
    '0b100100'
    """
    return ((1 << count // step * step) - 1) // ((1 << step) - 1) << step - 1


def _runs(bits: int, length: int) -> int:
    """Bits of the places at which so many in a row end; before the first place all are set.

    >>> bin(_runs(0b1101011, 2))
    '0b1000011'
    """
    found, reached = bits << length | (1 << length) - 1, 1
    while reached < length:
        step = min(reached, length - reached)
        found &= found << step | (1 << step) - 1
        reached += step
    return found >> length


def longest(rules: Iterable[GroupRule], held: Mapping[str, int], count: int) -> int:
    """How many quanta of ``count`` stand whole: all groups hold what a state there needs of them.

    ``held`` has the places of each group that holds any, as bits.
    """
    found = (1 << count) - 1
    for rule in rules:
        found &= rule.positions(held.get(rule.name, 0), count)
        if not found:
            return 0
    return found.bit_length()


def reached(rules: Iterable[GroupRule], held: Mapping[str, int], count: int) -> bool:
    """Whether all groups hold what a state a little behind place ``count`` needs before that."""
    return all(rule.reaches(held.get(rule.name, 0), count) for rule in rules)


def step_of(engines: Iterable[tuple[GroupRule, ...]]) -> int:
    """A multiple of this that none of ``engines`` holds ends all of their states; 0: none does."""
    steps = [[rule.block_quanta for rule in rules if rule.whole] for rules in engines]
    return lcm(*(min(one) for one in steps)) if all(steps) else 0


def rules_of(layout: Layout, quantum_tokens: int) -> tuple[GroupRule, ...] | None:
    """What an engine's groups must hold; None: the quantum does not divide their blocks.

    A group of draft models alone is not needed: what D has of a draft may begin cold.
    """
    fields = {field.name: field for field in layout.model.fields}
    blocks: dict[str, int] = {}
    kept: dict[str, list[Field]] = {}
    for rank in layout.ranks:
        regions = {region.name: region for region in rank.regions}
        for shard in rank.shards:
            region = regions[shard.region]
            field = fields.get(shard.field)
            if region.constant or field is None:
                continue
            blocks[region.group] = region.block_tokens
            if not field.draft:
                kept.setdefault(region.group, []).append(field)
    rules = []
    for group in sorted(kept):
        if blocks[group] % quantum_tokens:
            return None
        rules.append(_rule(group, blocks[group] // quantum_tokens, kept[group], quantum_tokens))
    return tuple(rules)


def _rule(group: str, block_quanta: int, fields: list[Field], quantum_tokens: int) -> GroupRule:
    if all(field.kind is Kind.SNAPSHOT for field in fields):
        return GroupRule(group, SNAPSHOT)
    windows = [one.window_tokens for one in fields if one.kind is Kind.PER_TOKEN]
    window_quanta = 0 if 0 in windows else ceil(max(windows) / quantum_tokens)
    return GroupRule(group, block_quanta, window_quanta)
