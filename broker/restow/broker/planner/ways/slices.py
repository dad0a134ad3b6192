"""Slices: one READ for each contiguous piece, straight into place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from restow.broker.errors import StrategyRefusedError
from restow.broker.layout import DType
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.cost_model import CostModel
from restow.broker.planner.costs import PricedRows, Seconds, descriptors, row_costs
from restow.broker.planner.program import READ_PAGES, Column, GroupPair, Step
from restow.broker.planner.program.rows import split_rows
from restow.broker.planner.ways.way import Sent, Way, Work
from restow.broker.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Sliced:
    """Rows that are read into place."""

    rows: Int64s

    strategy: ClassVar[Strategy] = Strategy.SLICES

    def steps(self, first_span: int) -> Sequence[Step]:
        """A read for each run of bytes."""
        return (Step(READ_PAGES, split_rows(self.rows)),)

    def work(self, pairs: Sequence[GroupPair], tokens: int, costs: CostModel) -> Work:
        """A descriptor a piece."""
        rows = split_rows(self.rows)
        _, sizes = row_costs(rows, pairs, tokens)
        pieces = descriptors(rows, pairs, tokens).sum()
        return Work(bytes=int(sizes.sum()), reads=math.ceil(pieces.round(6)))


class Slices(Way):
    """Reads rows into place; casts none."""

    strategy = Strategy.SLICES

    def demanded(self, sent: Sent) -> Int64s | None:
        """All rows. Raises `StrategyRefusedError` where a type would have to change."""
        casts = sent.priced.casts
        if casts.any():
            row = sent.table.rows[int(np.argmax(casts))]
            raise StrategyRefusedError(
                f"slices can't turn {DType(row[Column.SRC_DTYPE]).label} into "
                f"{DType(row[Column.DST_DTYPE]).label}: use whole, pack or auto",
                strategy=self.strategy,
            )
        return super().demanded(sent)

    def seconds(self, priced: PricedRows) -> Seconds:
        """Descriptors and bytes."""
        return np.where(priced.casts, np.inf, priced.into_place_s)

    def share(self, sent: Sent, mine: Bools) -> Sliced:
        """The rows as they are."""
        return Sliced(sent.table.rows[mine])
