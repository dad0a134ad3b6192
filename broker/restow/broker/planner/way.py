"""The interface of a way: its costs, the rows that it takes, and its share of a program."""

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
    """What is sent to a destination rank, and the strategy that the operator requested.

    ``readers`` has the number of destination ranks that read from each source rank.
    """

    strategy: Strategy
    moves: tuple[Move, ...]
    table: Table
    priced: PricedRows
    cutter: Cutter
    readers: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Work:
    """The work of agents for a share of a program.

    ``gathering`` has the source ranks that must gather; a rank gathers once for all shares, with a
    launch on both sides and a single read. ``launches`` and ``reads`` count the others, ``seconds``
    is the time of copying and computing.
    """

    bytes: int = 0
    reads: int = 0
    launches: int = 0
    gathering: frozenset[int] = frozenset()
    seconds: float = 0.0


class Share(Protocol):
    """The part of a rank's program that travels in one way."""

    @property
    def strategy(self) -> Strategy:
        """Return the strategy's word."""

    def steps(self, first_span: int) -> Sequence[Step]:
        """Return the share's steps of a `Program`; its spans are numbered from ``first_span`` on.

        Raises `TooManyPiecesError`.
        """

    def work(self, pairs: Sequence[GroupPair], tokens: int, costs: CostModel) -> Work:
        """Return the work for a prompt of ``tokens``. Raises `TooManyPiecesError`."""


class Spared(Share, Protocol):
    """A share that replaces moves."""

    @property
    def moves(self) -> tuple[Move, ...]:
        """Return the replaced moves."""


Sparing: TypeAlias = Callable[[RankLayout, Cutter], Spared]
"""Finds the moves to a destination rank that can be replaced. Raises `TooManyPiecesError`."""


class Way:
    """A way for rows to travel; it gets rows by price, or takes them over from other ways."""

    strategy: ClassVar[Strategy]

    def demanded(self, sent: Sent) -> Int64s | None:
        """Return a strategy number per row for a requested way; None: the cost model decides.

        Raises `StrategyRefusedError`.
        """
        return np.full(len(sent.table.rows), self.strategy.number, np.int64)

    def seconds(self, priced: PricedRows) -> Seconds | None:
        """Return each row's cost, infinite if it cannot go this way; None without a price."""
        return None

    def once_s(self, costs: CostModel) -> float:
        """Return the fixed cost of the first row."""
        return 0.0

    def takes_over(self, sent: Sent, ways: Int64s) -> Int64s:
        """Return the rows that together cost less this way than by the ``ways`` chosen singly."""
        return np.zeros(0, np.int64)

    def share(self, sent: Sent, mine: Bools) -> Share | None:
        """Return the share of the rows under a mask; None if the way never gets rows."""
        return None

    def sparing(self, plan: Plan, strategy: Strategy) -> Sparing | None:
        """Return what finds moves that this way can replace; None if there are none.

        Raises `StrategyRefusedError` if this way is requested but cannot serve, and
        `TooManyPiecesError`.
        """
        return None


def src_ranks(rows: Int64s) -> frozenset[int]:
    """Return the source ranks of rows."""
    return frozenset(np.unique(rows[:, Column.SRC_RANK]).tolist())
