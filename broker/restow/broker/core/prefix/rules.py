"""The match rule: the longest prefix of a chain that all groups of an engine hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, lcm

from restow.broker.layout import Layout
from restow.broker.layout.values import Field

SNAPSHOT = 0
"""The block size of groups of snapshots, as in `Region.block_tokens`."""


@dataclass(frozen=True, slots=True)
class GroupRule:
    """What a group must hold, in quanta of a chain. Place 0 is the end of the first quantum.

    A full block of ``block_quanta`` is announced by the hash at its end, a partly filled block by
    the hash where it is filled to. With ``window_quanta``, only that many quanta before the
    position are needed; 0 means all from the beginning. A group with `SNAPSHOT` needs a snapshot at
    the position.
    """

    name: str
    block_quanta: int
    window_quanta: int = 0

    @property
    def whole(self) -> bool:
        """Return whether every block from the beginning is needed."""
        return bool(self.block_quanta) and not self.window_quanta

    def positions(self, held: int, count: int) -> int:
        """Return the places where a state may stand; ``held`` are held of ``count``, as bits."""
        if self.block_quanta == SNAPSHOT:
            return held
        ends = _multiples(self.block_quanta, count)
        filled = (held | ~ends) & ((1 << count) - 1)
        if not self.window_quanta:
            missing = ~filled & (filled + 1)
            return (missing - 1) & (ends | held)
        return _runs(filled, min(self.window_quanta, count)) & (ends | held)

    def reaches(self, held: int, count: int) -> bool:
        """Return whether the group holds all blocks that a state just behind place ``count`` needs.

        The part at the state's own token is announced by a hash of its own and not checked here.
        """
        if self.block_quanta == SNAPSHOT:
            return True
        first = max(count - self.window_quanta, 0) if self.window_quanta else 0
        needed = _multiples(self.block_quanta, count) >> first << first
        return not needed & ~held


def _multiples(step: int, count: int) -> int:
    """Return the bits of the places that end a group of ``step`` places.

    >>> bin(_multiples(3, 7))
    '0b100100'
    """
    return ((1 << count // step * step) - 1) // ((1 << step) - 1) << step - 1


def _runs(bits: int, length: int) -> int:
    """Return the bits of the places that end ``length`` set bits; bits before place 0 count as set.

    >>> bin(_runs(0b1101011, 2))
    '0b1000011'
    """
    ends, reached = bits << length | (1 << length) - 1, 1
    while reached < length:
        step = min(reached, length - reached)
        ends &= ends << step
        reached += step
    return ends >> length


def longest(rules: Iterable[GroupRule], held: Mapping[str, int], count: int) -> int:
    """Return how many of ``count`` leading quanta have a state that all groups hold completely.

    ``held`` has the held places of each group as bits.
    """
    places = (1 << count) - 1
    for rule in rules:
        places &= rule.positions(held.get(rule.name, 0), count)
        if not places:
            return 0
    return places.bit_length()


def step_of(engines: Iterable[tuple[GroupRule, ...]]) -> int:
    """Return the step at whose multiples a search may end; 0 if it must never end early.

    At each multiple a block ends in every engine that has a group without a window. If nobody holds
    the key there, no engine holds a state beyond it.
    """
    steps = [[rule.block_quanta for rule in rules if rule.whole] for rules in engines]
    return lcm(*(min(sizes) for sizes in steps)) if all(steps) else 0


def rules_of(layout: Layout, quantum_tokens: int) -> tuple[GroupRule, ...] | None:
    """Return what an engine's groups must hold; None if the quantum does not divide their blocks.

    Where blocks are smaller, a hash stands for all blocks of a quantum. Groups of draft models only
    are not needed, because D's draft state may begin cold.
    """
    fields = {field.name: field for field in layout.model.fields}
    blocks: dict[str, int] = {}
    kept: dict[str, list[Field]] = {}
    for rank in layout.ranks:
        for region, shard in rank.held():
            field = fields[shard.field]
            blocks[region.group] = region.block_tokens
            if not field.draft:
                kept.setdefault(region.group, []).append(field)
    rules = []
    for group in sorted(kept):
        block_tokens = blocks[group]
        if block_tokens and quantum_tokens % block_tokens == 0:
            block_tokens = quantum_tokens
        block_quanta, rest = divmod(block_tokens, quantum_tokens)
        if rest:
            return None
        windows = [field.window_tokens for field in kept[group]]
        window_quanta = 0 if 0 in windows else ceil(max(windows) / quantum_tokens)
        rules.append(GroupRule(group, block_quanta, window_quanta))
    return tuple(rules)
