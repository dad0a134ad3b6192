"""What a rank's program costs: bytes, descriptors, launches, and the time that a model expects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from restow.broker.planner.cost_model import CostModel
from restow.broker.planner.program import GroupPair
from restow.broker.planner.ways.way import Share


@dataclass(frozen=True, slots=True)
class Cost:
    """What one rank's program costs for a number of tokens.

    ``reads`` are descriptors: pieces read into place and staged runs. ``launches`` are GATHERs,
    SCATTERs and PROJECTs on both sides; a GATHER that serves several readers counts for each.
    ``seconds`` are what the cost model expects where nothing else is going on.
    """

    bytes: int
    reads: int
    launches: int
    seconds: float


def estimate(
    shares: Sequence[Share], pairs: Sequence[GroupPair], tokens: int, costs: CostModel
) -> Cost:
    """The cost of all shares of one rank's program. Raises `TooManyPiecesError`."""
    work = [share.work(pairs, tokens, costs) for share in shares]
    stages = len(frozenset[int]().union(*(one.gathering for one in work)))
    read_bytes = sum(one.bytes for one in work)
    reads = stages + sum(one.reads for one in work)
    launches = 2 * stages + sum(one.launches for one in work)
    seconds = (
        reads * costs.seconds_per_descriptor
        + read_bytes / costs.read_bytes_per_second
        + launches * costs.seconds_per_launch
        + bool(stages) * costs.seconds_per_stage
        + sum(one.seconds for one in work)
    )
    return Cost(read_bytes, reads, launches, seconds)
