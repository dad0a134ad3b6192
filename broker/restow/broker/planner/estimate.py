"""What a rank's program costs: bytes, descriptors, launches, and the time that a model expects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from restow.broker.planner.cost_model import CostModel
from restow.broker.planner.costs import (
    copy_seconds,
    descriptors,
    packing_seconds,
    page_counts,
    row_costs,
    wire_bytes,
)
from restow.broker.planner.draft import Draft
from restow.broker.planner.program import Column, GroupPair, SpanColumn
from restow.broker.planner.strategy import Strategy
from restow.broker.planner.table import split_rows


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


def estimate(draft: Draft, pairs: Sequence[GroupPair], tokens: int, costs: CostModel) -> Cost:
    """The cost of one rank's program. Raises `TooManyPiecesError`."""
    packed, spans = draft.rows(Strategy.PACK), draft.all_spans
    gathered = np.concatenate([packed, draft.chunks.interleaved])
    direct = split_rows(draft.rows(Strategy.SLICES))
    _, sizes = row_costs(direct, pairs, tokens)
    pieces = math.ceil(descriptors(direct, pairs, tokens).sum().round(6))
    pages = page_counts(pairs, tokens)[spans[:, SpanColumn.GROUP_PAIR]]
    stages = len(np.unique(gathered[:, Column.SRC_RANK]))
    read_bytes = int(sizes.sum()) + int(wire_bytes(gathered, pairs, tokens).sum())
    read_bytes += int((pages * spans[:, SpanColumn.LENGTH_BYTES]).sum())
    reads = pieces + stages + int(pages.sum())
    launches = 2 * stages + bool(len(draft.spans.table)) + bool(len(draft.rebuilt.projected))

    staged = (packed, packed, draft.chunks.interleaved, draft.chunks.restored)
    copied_s = sum(float(packing_seconds(rows, pairs, tokens, costs).sum()) for rows in staged)
    copied_s += float(copy_seconds(draft.rows(Strategy.WHOLE), pairs, tokens, costs).sum())
    seconds = (
        reads * costs.seconds_per_descriptor
        + read_bytes / costs.read_bytes_per_second
        + launches * costs.seconds_per_launch
        + bool(stages) * costs.seconds_per_stage
        + draft.rebuilt.weight_bytes * costs.seconds_per_weight_byte
        + copied_s
    )
    return Cost(read_bytes, reads, launches, seconds)
