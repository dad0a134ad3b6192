"""A program before it is written down."""

from __future__ import annotations

from dataclasses import dataclass

from restow.broker.layout.rows import Int64s
from restow.broker.planner.move import Move
from restow.broker.planner.table import Table
from restow.broker.planner.ways.way import Share


@dataclass(frozen=True, slots=True)
class Draft:
    """A program before it is written down: its moves, their rows, and how each of these travels.

    ``ways`` are the numbers of strategies, one a row; ``shares`` are what goes each way, and what
    needs no move. ``cleared`` rows are zeroed.
    """

    dst_rank: int
    moves: tuple[Move, ...]
    table: Table
    ways: Int64s
    shares: tuple[Share, ...]
    cleared: Int64s
