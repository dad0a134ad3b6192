"""Pipeline parallelism: which layers each stage has."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from restow.broker.errors import StageError
from restow.broker.layout import Span


def stage_layers(depth: int, pp: int, layers_per_stage: Sequence[int] = ()) -> list[Span]:
    """The layers of every stage. Raises `StageError`.

    Without ``layers_per_stage`` as vLLM cuts: evenly, and what is left over goes to the stages
    before the last, one each, from the back (`get_pp_indices`).

    >>> [str(span) for span in stage_layers(10, 4)]
    ['[0, 2)', '[2, 5)', '[5, 8)', '[8, 10)']
    """
    counts = list(layers_per_stage)
    if not counts:
        if not 1 <= pp <= max(depth, 1):
            raise StageError(f"{depth} layers can't be cut into {pp} stages", stages=pp)
        counts = [depth // pp] * pp
        for back in range(2, depth % pp + 2):
            counts[-back] += 1
    if len(counts) != pp or sum(counts) != depth or min(counts) < 1:
        raise StageError(
            f"layers per stage are {counts}: {pp} stages need one number each, from 1 on, that "
            f"add up to {depth} layers",
            stages=pp,
        )
    return [
        Span(start, stop) for start, stop in itertools.pairwise([0, *itertools.accumulate(counts)])
    ]
