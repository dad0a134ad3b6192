"""What a kept state is worth: which is evicted first.

`RecomputingCost` weighs what computing a state again would cost by how soon it may be wanted, per
byte that its eviction frees. How soon is learnt from what was wanted before, by how often a state
was used and how long ago (Beckmann, Chen, Cidon: LHD, NSDI 2018); what was evicted is remembered
for a while, so that it is learnt of too. `LeastRecentlyUsed` is what it is measured beside.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

CLASSES = 4
"""Used never, once, twice, more often: a turn is continued once, a shared prompt many times."""
AGES = 40
AGES_PER_DOUBLING = 2
LEARN_EVERY = 128
FADING = 0.9
"""What was learnt before counts so much whenever it is learnt again."""
REMEMBERED = 16_384


@dataclass(frozen=True, slots=True)
class Recomputing:
    """What prefilling takes: ``token_cost`` a token, and ``pair_cost`` a token and one before it.

    In any unit, for only their ratio counts. Attention alone makes pairs.
    """

    token_cost: float = 1.0
    pair_cost: float = 0.0

    def cost(self, start_tokens: int, stop_tokens: int) -> float:
        """What the tokens from one position to another cost.

        >>> Recomputing(1.0, 0.5).cost(2, 4)
        5.0
        """
        pairs = (stop_tokens**2 - start_tokens**2) / 2
        return self.token_cost * (stop_tokens - start_tokens) + self.pair_cost * pairs


@dataclass(frozen=True, slots=True)
class Use:
    """How often something was used, and when it was last used or made."""

    count: int
    last_s: float


class Worth(Protocol):
    """What is evicted first: that of which `of` is the least."""

    def of(self, use: Use, now_s: float, cost: float, freed_bytes: int) -> float:
        """The worth of a state whose eviction frees so many bytes, and costs that to compute."""

    def used(self, use: Use, now_s: float) -> None:
        """A state was wanted, of which that was known before."""

    def evicted(self, key: Hashable, use: Use) -> None:
        """A state is gone."""

    def wanted(self, key: Hashable, now_s: float) -> None:
        """A state was wanted that is not kept."""


class LeastRecentlyUsed:
    """Evicts what was used longest ago."""

    def of(self, use: Use, now_s: float, cost: float, freed_bytes: int) -> float:
        """When it was used last."""
        return use.last_s

    def used(self, use: Use, now_s: float) -> None:
        """Learn nothing."""

    def evicted(self, key: Hashable, use: Use) -> None:
        """Remember nothing."""

    def wanted(self, key: Hashable, now_s: float) -> None:
        """Learn nothing."""


class RecomputingCost:
    """Evicts what costs least to compute again, per byte and by the odds that it is wanted."""

    def __init__(self) -> None:
        """Nothing is learnt: as if at each age one of two were wanted."""
        self._hits = np.ones((CLASSES, AGES))
        self._ends = 2 * np.ones((CLASSES, AGES))
        self._density = np.zeros((CLASSES, AGES))
        self._gone: OrderedDict[Hashable, Use] = OrderedDict()
        self._events = 0
        self._learn()

    def of(self, use: Use, now_s: float, cost: float, freed_bytes: int) -> float:
        """Cost per byte, times how often a second it will be wanted."""
        density = self._density[_class(use), _age(now_s - use.last_s)]
        return float(density) * cost / max(freed_bytes, 1)

    def used(self, use: Use, now_s: float) -> None:
        """One of its class was wanted at that age."""
        row, age = _class(use), _age(now_s - use.last_s)
        self._hits[row, age] += 1
        self._ends[row, age] += 1
        self._event()

    def evicted(self, key: Hashable, use: Use) -> None:
        """Remember it, to learn whether it was wanted after all."""
        self._gone[key] = use
        if len(self._gone) > REMEMBERED:
            _, forgotten = self._gone.popitem(last=False)
            self._ends[_class(forgotten), AGES - 1] += 1
            self._event()

    def wanted(self, key: Hashable, now_s: float) -> None:
        """If it was evicted, learn from that too."""
        use = self._gone.pop(key, None)
        if use is not None:
            self.used(use, now_s)

    def _event(self) -> None:
        self._events += 1
        if self._events % LEARN_EVERY == 0:
            self._learn()
            self._hits *= FADING
            self._ends *= FADING

    def _learn(self) -> None:
        """For each age: hits to come over the time that passes until then."""
        starts = np.array([_start_s(age) for age in range(AGES + 1)])
        middles = (starts[1:] + starts[:-1]) / 2
        for age in range(AGES):
            hits = self._hits[:, age:].sum(axis=1) + 1e-6
            waits = (self._ends[:, age:] * (middles[age:] - starts[age])).sum(axis=1) + 1e-6
            self._density[:, age] = hits / waits


def _class(use: Use) -> int:
    return min(use.count, CLASSES - 1)


def _age(seconds: float) -> int:
    return min(int(AGES_PER_DOUBLING * math.log2(1 + max(seconds, 0.0))), AGES - 1)


def _start_s(age: int) -> float:
    return float(2 ** (age / AGES_PER_DOUBLING) - 1)
