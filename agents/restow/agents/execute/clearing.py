"""CLEAR: zero the rows that a program clears, or all snapshots that a failed order would fill."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from restow.agents.binding.copies import bind_copies
from restow.agents.binding.operands import DST, in_order, paged
from restow.agents.binding.pages import RegionTable
from restow.agents.copying.piece_copies import zero_destinations
from restow.agents.copying.projecting import window_rows
from restow.agents.link.orders import ExecuteOrder
from restow.agents.memory.regions import MemoryPlace, are_at
from restow.broker.errors import PagesError
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import (
    CLEAR_PAGES,
    PROJECT_SPANS,
    Column,
    Operand,
    Program,
    no_rows,
)


class Clearing:
    """Zeroes rows of one rank's pages."""

    def __init__(self, memory: RegionTable, places: Sequence[MemoryPlace]) -> None:
        """Of ``memory``, whose regions are at ``places``."""
        self._memory, self._places = memory, tuple(places)

    def clear(self, program: Program, order: ExecuteOrder) -> None:
        """What the program clears."""
        self._zero(program.rows(CLEAR_PAGES), program, order)

    def clear_failed(self, program: Program, order: ExecuteOrder) -> None:
        """A failed handoff leaves no snapshot behind, neither half of one nor an older one.

        Per-token pages are never read beyond the tokens that their request has computed.
        """
        per_token = np.array([pair.per_token for pair in program.group_pairs], bool)
        tables = [
            window_rows(step.rows) if step.form == PROJECT_SPANS else step.rows
            for step in program.steps
            if step.form.dst is Operand.PAGES
        ]
        rows = np.concatenate([no_rows(), *tables])
        # Page ids that were refused name nothing that could be cleared.
        with contextlib.suppress(PagesError):
            self._zero(rows[~per_token[rows[:, Column.GROUP_PAIR]]], program, order)

    def _zero(self, rows: Int64s, program: Program, order: ExecuteOrder) -> None:
        pairs, tokens = program.group_pairs, order.tokens
        pages = paged(self._memory, DST, order.dst_blocks)
        for place in set(self._places) if len(rows) else ():
            part = rows[are_at(self._places, place)[rows[:, Column.DST_REGION]]]
            copies = bind_copies(part, pairs, in_order(part, pairs, tokens, 0), pages, tokens)
            zero_destinations(copies, place.device)
