"""A program before it is written down."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from restow.broker.layout.rows import Int64s
from restow.broker.planner.interleave import Chunks
from restow.broker.planner.move import Move
from restow.broker.planner.recompute import Rebuilt
from restow.broker.planner.spans import Spans
from restow.broker.planner.strategy import WAYS, Strategy
from restow.broker.planner.table import Table


@dataclass(frozen=True, slots=True)
class Draft:
    """A program before it is written down: its moves, their rows, and how each of these travels.

    ``ways`` are indices into `WAYS`, one a row; ``spans`` cover the rows that go ``whole``, and
    ``chunks`` hold what goes by ``interleave``. ``rebuilt`` is what needs no move.
    """

    dst_rank: int
    moves: tuple[Move, ...]
    table: Table
    ways: Int64s
    spans: Spans
    chunks: Chunks
    cleared: Int64s
    rebuilt: Rebuilt = field(default_factory=Rebuilt)

    @property
    def all_spans(self) -> Int64s:
        """Those of inputs follow the others."""
        return np.concatenate([self.spans.table, self.rebuilt.spans])

    def rows(self, way: Strategy) -> Int64s:
        """The rows that travel in this way."""
        rows: Int64s = self.table.rows[self.ways == WAYS.index(way)]
        return rows
