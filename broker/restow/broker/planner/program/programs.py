"""Programs: the steps of one destination rank, and what both sides read in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from restow.broker.layout.rows import Int64s
from restow.broker.planner.program.columns import Column
from restow.broker.planner.program.forms import (
    FORMS,
    GATHER_PLACED,
    GATHERED,
    READ_OR_GATHERED,
    SCATTER_PLACED,
    Form,
    columns_of,
)
from restow.broker.planner.program.pairs import GroupPair
from restow.broker.planner.program.rows import no_rows
from restow.broker.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of one form: int64 ``[rows, len(columns_of(form))]``.

    Regions are indices into the regions of the rank's layout.
    """

    form: Form
    rows: Int64s

    def of_source(self, src_rank: int) -> Step:
        """The rows of one source rank."""
        return Step(self.form, self.rows[self.rows[:, Column.SRC_RANK] == src_rank])


@dataclass(frozen=True, slots=True)
class Program:
    """What the agent of ``dst_rank`` does: steps, one of each form at most.

    ``strategies`` are the words for it, for people: an agent hears none.
    """

    program_id: str
    dst_rank: int
    group_pairs: tuple[GroupPair, ...]
    steps: tuple[Step, ...]
    strategies: tuple[Strategy, ...] = ()

    def rows(self, form: Form, src_rank: int | None = None) -> Int64s:
        """The rows of a form, or those of one source rank; maybe none."""
        for step in self.steps:
            if step.form == form:
                return step.rows if src_rank is None else step.of_source(src_rank).rows
        return no_rows(columns_of(form))

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(step.rows.nbytes for step in self.steps)

    @property
    def src_ranks(self) -> tuple[int, ...]:
        """All ranks that are read from."""
        return self._ranks((*READ_OR_GATHERED, SCATTER_PLACED))

    @property
    def staging_ranks(self) -> tuple[int, ...]:
        """The ranks that gather for this destination."""
        return self._ranks((*GATHERED, SCATTER_PLACED))

    @property
    def interleaving_ranks(self) -> tuple[int, ...]:
        """Those of them that gather for all their readers in one launch."""
        return self._ranks((GATHER_PLACED, SCATTER_PLACED))

    def _ranks(self, forms: Sequence[Form]) -> tuple[int, ...]:
        # A destination's agent is not told what sources do to fill its run.
        ranks = np.concatenate([self.rows(form)[:, Column.SRC_RANK] for form in forms])
        return tuple(int(rank) for rank in np.unique(ranks))

    def gather_id(self, src_rank: int) -> str:
        """Name of the part of the program that ``src_rank`` gathers."""
        return f"{self.program_id}/{src_rank}"

    def hashed_id(self, src_rank: int) -> str:
        """Name of the part of the program that ``src_rank`` gathers and hashes."""
        return f"{self.program_id}/{src_rank}/hashed"


def joined_steps(steps: Iterable[Step]) -> tuple[Step, ...]:
    """All rows of each form in one step, in the order of `FORMS`; none without rows."""
    rows: dict[Form, list[Int64s]] = {}
    for step in steps:
        if len(step.rows):
            rows.setdefault(step.form, []).append(step.rows)
    return tuple(Step(form, np.concatenate(rows[form])) for form in FORMS if form in rows)
