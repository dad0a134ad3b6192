"""What a kept state is worth: the one that is worth least is evicted first.

`recomputing_cost` is measured beside `least_recently_used` by ``./run bench --suite store``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


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
class Candidate:
    """A state that may be evicted.

    ``cost`` is what computing it takes from the nearest state that is kept before it,
    ``freed_bytes`` what its eviction frees: what other states have too stays. It was used ``uses``
    times, and last, or made, ``age_s`` ago.
    """

    cost: float
    freed_bytes: int
    uses: int
    age_s: float


Worth = Callable[[Candidate], float]


def least_recently_used(one: Candidate) -> float:
    """What was used longest ago is worth least."""
    return -one.age_s


def recomputing_cost(one: Candidate) -> float:
    """What costs little to compute again for the bytes that it takes is worth least.

    That it will be wanted is less likely the longer ago it was, and likelier the more often. Costs
    per byte and uses differ by thousands between states, and say less of the next use than the age
    does: so they count by their roots.
    """
    density = one.cost / max(one.freed_bytes, 1)
    return math.sqrt(density * (1 + one.uses)) / (one.age_s + 1)
