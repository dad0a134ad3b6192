"""CLEAR: zero the rows that a program clears, or all snapshots that a failed order would fill."""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from restow.agents.binding.copies import bind_copies
from restow.agents.binding.operands import DST, in_order, paged
from restow.agents.binding.pages import RegionTable
from restow.agents.copying.piece_copies import zero_destinations
from restow.agents.copying.projecting import window_rows
from restow.agents.link.orders import ExecuteOrder
from restow.agents.memory.device import finished
from restow.agents.memory.regions import MemoryPlace
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

ZEROES_BYTES = 1 << 20
"""Rows that are longer are zeroed in parts."""


class Clearing:
    """Zeroes rows of one rank's pages."""

    def __init__(self, memory: RegionTable, place: MemoryPlace) -> None:
        """Make the zeroes for ``memory`` at ``place``: within a handoff there may be no room.

        Raises `CopyFailedError`.
        """
        self._memory, self._device = memory, place.device
        with finished(self._device):
            self._zeroes = torch.zeros(ZEROES_BYTES, dtype=torch.uint8, device=self._device)

    def clear(self, program: Program, order: ExecuteOrder) -> None:
        """Zero what the program clears. Raises `CopyFailedError`."""
        self._zero(program.rows(CLEAR_PAGES), program, order)

    def clear_failed(self, program: Program, order: ExecuteOrder) -> None:
        """A failed handoff leaves no snapshot behind, neither half of one nor an older one.

        Per-token pages are never read beyond the tokens that their request has computed. Raises
        `CopyFailedError`.
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
        copies = bind_copies(rows, pairs, in_order(rows, pairs, tokens, 0), pages, tokens)
        zero_destinations(copies, self._zeroes)
