"""What a way to travel is asked: its costs, the rows that it takes, its share of a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import numpy as np

from restow.broker.layout import RankLayout
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.costs import CostModel, PricedRows, Seconds
from restow.broker.planner.plan import Move, Plan
from restow.broker.planner.program import Column, GroupPair, Step
from restow.broker.planner.table import Cutter, Table
from restow.broker.strategy import Strategy
from restow.broker.words import Worded


@dataclass(frozen=True, slots=True)
class Sent(Worded):
    """What is sent to one destination rank, and what an operator wants of how it travels.

    ``readers`` says how many destination ranks read from each source rank.
    """

    strategy: Strategy
    moves: tuple[Move, ...]
    table: Table
    priced: PricedRows
    cutter: Cutter
    readers: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Work:
    """What agents do for one share of a program.

    ``gathering`` are the source ranks that are asked to gather, once for all shares: each has a
    launch on both sides, and what it gathers is one read. ``launches`` and ``reads`` are those
    besides, ``seconds`` what is copied and computed.
    """

    bytes: int = 0
    reads: int = 0
    launches: int = 0
    gathering: frozenset[int] = frozenset()
    seconds: float = 0.0


class Share(Protocol):
    """What of one rank's program goes one way."""

    @property
    def strategy(self) -> Strategy:
        """The word for it."""

    def steps(self, first_span: int) -> Sequence[Step]:
        """What it adds to a `Program`; its own spans are numbered from there on.

        Raises `TooManyPiecesError`.
        """

    def work(self, pairs: Sequence[GroupPair], tokens: int, costs: CostModel) -> Work:
        """What it costs for a prompt of ``tokens``. Raises `TooManyPiecesError`."""


class Spared(Share, Protocol):
    """A share that brings what some moves would have brought."""

    @property
    def moves(self) -> tuple[Move, ...]:
        """The moves that need not be made."""


Sparing: TypeAlias = Callable[[RankLayout, Cutter], Spared]
"""Finds what a destination rank need not be sent. Raises `TooManyPiecesError`."""


class Way:
    """One way to travel. Rows are dealt to it if it has a price, or takes over those of others."""

    strategy: ClassVar[Strategy]

    def demanded(self, sent: Sent) -> Int64s | None:
        """For each row the number of the strategy by which it travels if this one is asked for.

        None: the cost model decides. Raises `StrategyRefusedError`.
        """
        return np.full(len(sent.table.rows), self.strategy.number, np.int64)

    def seconds(self, priced: PricedRows) -> Seconds | None:
        """What each row costs, infinite where it can't go this way. None: nothing is compared."""
        return None

    def once_s(self, costs: CostModel) -> float:
        """What the first row costs besides."""
        return 0.0

    def takes_over(self, sent: Sent, ways: Int64s) -> Int64s:
        """Which rows cost less this way than by the ``ways`` that were found row by row."""
        return np.zeros(0, np.int64)

    def share(self, sent: Sent, mine: Bools) -> Share | None:
        """The share of the rows under a mask. None: no row ever comes here."""
        return None

    def sparing(self, plan: Plan, strategy: Strategy) -> Sparing | None:
        """What finds moves of a plan that need not be made, if there are any.

        Raises `StrategyRefusedError` where this way is asked for in vain, `TooManyPiecesError`.
        """
        return None


def src_ranks(rows: Int64s) -> frozenset[int]:
    """The source ranks of rows."""
    return frozenset(np.unique(rows[:, Column.SRC_RANK]).tolist())
