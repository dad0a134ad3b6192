"""Costs of the ways in seconds: defaults, measurements, or an operator's settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from restow.broker.errors import CostsInvalidError
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.layout.values import ITEM_BYTES
from restow.broker.planner.program import Column, GroupPair, cut_shared, moved_tokens, strided


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """The cost of GATHER or SCATTER on a host.

    A launch costs ``seconds_per_launch``, a piece ``seconds_per_copy``, and an element that is not
    adjacent to the next element ``seconds_per_element``. Bytes are copied at
    ``copy_bytes_per_second``.
    """

    seconds_per_launch: float
    seconds_per_copy: float
    seconds_per_element: float
    copy_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class ReadCosts:
    """The cost of READ between two hosts.

    Each descriptor costs ``seconds_per_descriptor`` beside its bytes, which travel at
    ``read_bytes_per_second``.
    """

    seconds_per_descriptor: float
    read_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost of the ways between two hosts.

    It consists of `CopyCosts`, `ReadCosts` and two further costs. A request to a source to gather
    costs ``seconds_per_stage``. Recomputing conv windows costs a launch, and
    ``seconds_per_weight_byte`` for reading the weights, which is not measured. Costs are compared
    for prompts of ``nominal_tokens``. The defaults were fitted on CMA between two processes of a
    host (docs/benchmarks.md), and the copy costs are as measured by probes.
    """

    seconds_per_descriptor: float = 3.3e-6
    read_bytes_per_second: float = 6.0e9
    copy_bytes_per_second: float = 5.4e9
    seconds_per_launch: float = 0.5e-3
    seconds_per_copy: float = 0.28e-6
    seconds_per_element: float = 2.8e-9
    seconds_per_stage: float = 0.5e-3
    seconds_per_weight_byte: float = 2e-10
    nominal_tokens: int = 4096

    @property
    def gap_bytes(self) -> int:
        """Return how many unneeded bytes cost as much to read as another descriptor."""
        return int(self.seconds_per_descriptor * self.read_bytes_per_second)

    @classmethod
    def of_devices(cls) -> CostModel:
        """Return the defaults between devices, as measured on one H200 (docs/benchmarks.md).

        They hold until costs are measured. With a host's costs many pieces would be read one by
        one, which takes a second where packing takes 14 ms.
        """
        return cls(
            seconds_per_descriptor=9e-6,
            read_bytes_per_second=1.6e11,
            copy_bytes_per_second=5e10,
            seconds_per_launch=1e-4,
            seconds_per_copy=0.3e-6,
            seconds_per_element=1e-10,
        )

    @classmethod
    def measured(
        cls, source: CopyCosts, destination: CopyCosts, reading: ReadCosts, stage_s: float
    ) -> CostModel:
        """Return the model between two hosts; copies have the cost of the slower host."""
        return replace(
            cls(),
            seconds_per_stage=stage_s,
            copy_bytes_per_second=min(
                source.copy_bytes_per_second, destination.copy_bytes_per_second
            ),
            **asdict(reading),
            **{
                name: max(getattr(source, name), getattr(destination, name))
                for name in ("seconds_per_launch", "seconds_per_copy", "seconds_per_element")
            },
        ).checked()

    @classmethod
    def of(cls, values: Mapping[str, object]) -> CostModel:
        """Return the defaults with some values replaced. Raises `CostsInvalidError`."""
        known = {field.name for field in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise CostsInvalidError(
                    f"{name!r} is no cost; known are {', '.join(sorted(known))}", cost=name
                )
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise CostsInvalidError(f"{name} is {value!r}, not a number", cost=name)
        made = replace(cls(), **values).checked()  # type: ignore[arg-type]
        return replace(made, nominal_tokens=int(made.nominal_tokens))

    def checked(self) -> CostModel:
        """Return the model itself. Raises `CostsInvalidError` for an impossible value."""
        for name, value in asdict(self).items():
            least, most = _BOUNDS[name.partition("_per_")[0]]
            if not (math.isfinite(value) and least <= value <= most):
                raise CostsInvalidError(
                    f"{name} is {value}; it must be {least:g} to {most:g}", cost=name
                )
        return self


_BOUNDS = {
    "seconds": (0.0, 10.0),
    "read_bytes": (1.0, 1e15),
    "copy_bytes": (1.0, 1e15),
    "nominal_tokens": (1, 1 << 24),
}


Seconds: TypeAlias = npt.NDArray[np.float64]

UNCACHED = 1.8
"""Factor by which packing bytes takes longer than the measurement of a copy says.

A source that is asked to gather finds neither its pages nor its staging in a cache, and the
reader's staging is not cached either. The cost of a piece beside its bytes grows little. The factor
was fitted on pieces of 256 bytes to 4 KiB (docs/benchmarks.md).
"""


def token_counts(pairs: Sequence[GroupPair], tokens: int) -> Int64s:
    """Return how often the rows of each pair repeat for a prompt of ``tokens``."""
    counts = [moved_tokens(pair, 0, tokens) if pair.per_token else 1 for pair in pairs]
    return np.array(counts, np.int64)


def row_costs(rows: Int64s, pairs: Sequence[GroupPair], tokens: int) -> tuple[Int64s, Int64s]:
    """Return pieces and bytes of each row for a prompt of ``tokens``, without joining rows."""
    page_tokens, joined, length = _joined(rows, pairs)
    repeats = token_counts(pairs, tokens)[rows[:, Column.GROUP_PAIR]]
    row_bytes = rows[:, Column.COUNT] * ITEM_BYTES[rows[:, Column.SRC_DTYPE]]
    sizes = np.maximum(page_tokens, 1)
    stretches = _stretches(sizes, pairs, tokens, rows[:, Column.GROUP_PAIR])
    for number, pair in enumerate(pairs):
        if not pair.alike and len(mine := np.flatnonzero(rows[:, Column.GROUP_PAIR] == number)):
            stretches[mine] = len(cut_shared(pair, 0, tokens, (pair.src, pair.dst))[0])
    pieces = np.where(length == row_bytes, 1, rows[:, Column.COUNT])
    return pieces * np.where(joined, stretches, repeats), row_bytes * repeats


def _stretches(sizes: Int64s, pairs: Sequence[GroupPair], tokens: int, pair: Int64s) -> Int64s:
    """Return into how many pieces the pages of both sides (``sizes``) cut the tokens."""
    ends = [(p.first_token(0, tokens), tokens) if p.per_token else (0, 1) for p in pairs]
    first, stop = np.array(ends, np.int64).reshape(-1, 2)[pair].T
    steps = np.column_stack([sizes, np.lcm(sizes[:, 0], sizes[:, 1])])
    cuts = (stop - 1)[:, None] // steps - first[:, None] // steps
    stretches: Int64s = np.where(first < stop, 1 + cuts[:, 0] + cuts[:, 1] - cuts[:, 2], 0)
    return stretches


def descriptors(rows: Int64s, pairs: Sequence[GroupPair], tokens: int) -> Seconds:
    """Return the descriptors of each row if it is read into place.

    A run of rows (`page_runs`) is a single descriptor in every whole page, of which each row counts
    its share. Consecutive whole pages count separately.
    """
    counts = row_costs(rows, pairs, tokens)[0].astype(np.float64)
    run = page_runs(rows, pairs)
    members = np.bincount(run, minlength=len(rows))[run]
    pair = rows[:, Column.GROUP_PAIR]
    cut = np.array(
        [lists.window_tokens > 0 and not lists.dst.whole_blocks for lists in pairs], bool
    )
    size = np.array([max(lists.src.page_tokens, 1) for lists in pairs], np.int64)
    # A window may begin anywhere in its first page.
    before = np.where(cut, size - 1, 0)
    full = (np.maximum(token_counts(pairs, tokens) - before, 0) // size)[pair]
    return counts - np.where(members > 1, full * (1 - 1 / members), 0.0)


def page_runs(rows: Int64s, pairs: Sequence[GroupPair]) -> Int64s:
    """Return a number per row, equal for rows that form a piece in whole pages of both sides.

    The heads of a page are an example, if both sides have the same tokens in each page.
    """
    run = np.arange(len(rows))
    page_tokens, joined, length = _joined(rows, pairs)
    alike = np.array([pair.alike for pair in pairs], np.bool_)[rows[:, Column.GROUP_PAIR]]
    index = np.flatnonzero(joined & alike & (page_tokens[:, 0] == page_tokens[:, 1]))
    if len(index) < 2:
        return run
    order = index[np.lexsort((rows[index, Column.SRC_OFFSET_BYTES], *rows[index][:, _SAME].T))]
    mine = rows[order]
    reach = length[order] * page_tokens[order, 0]
    follows = (mine[1:, _SAME] == mine[:-1, _SAME]).all(axis=1)
    follows &= reach[1:] == reach[:-1]  # agents join rows by the same rule
    for offset in (Column.SRC_OFFSET_BYTES, Column.DST_OFFSET_BYTES):
        follows &= mine[1:, offset] == mine[:-1, offset] + reach[:-1]
    begins = np.concatenate([[True], ~follows])
    run[order] = order[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    return run


_SAME = [Column.SRC_RANK, Column.GROUP_PAIR, Column.SRC_REGION, Column.DST_REGION]


def _joined(rows: Int64s, pairs: Sequence[GroupPair]) -> tuple[Int64s, Bools, Int64s]:
    """Return both sides' page tokens, a mask of rows that continue across tokens, and piece sizes.

    A run of bytes continues if tokens are adjacent. The single elements of a strided row may
    continue too.
    """
    page_tokens = np.array([[p.src.page_tokens, p.dst.page_tokens] for p in pairs], np.int64)
    page_tokens = page_tokens.reshape(-1, 2)[rows[:, Column.GROUP_PAIR]]
    item = ITEM_BYTES[rows[:, Column.SRC_DTYPE]]
    contiguous = rows[:, Column.SRC_STEP_BYTES] == item
    contiguous &= rows[:, Column.DST_STEP_BYTES] == item
    length = np.where(contiguous, rows[:, Column.COUNT] * item, item)
    joined = page_tokens[:, 0] > 0
    joined &= rows[:, Column.SRC_TOKEN_STRIDE_BYTES] == length
    joined &= rows[:, Column.DST_TOKEN_STRIDE_BYTES] == length
    return page_tokens, joined, length


@dataclass(frozen=True)
class PricedRows:
    """Rows and their costs for a prompt of ``tokens``, computed once for all ways."""

    rows: Int64s
    pairs: Sequence[GroupPair]
    tokens: int
    costs: CostModel

    @property
    def casts(self) -> Bools:
        """Return a mask of the rows that change the element type."""
        mask: Bools = self.rows[:, Column.SRC_DTYPE] != self.rows[:, Column.DST_DTYPE]
        return mask

    @cached_property
    def wire_bytes(self) -> Int64s:
        """Return the bytes that packed rows send: the narrower of two types travels."""
        counts = token_counts(self.pairs, self.tokens)[self.rows[:, Column.GROUP_PAIR]]
        items = ITEM_BYTES[self.rows[:, [Column.SRC_DTYPE, Column.DST_DTYPE]]].min(axis=1)
        sizes: Int64s = self.rows[:, Column.COUNT] * items * counts
        return sizes

    @cached_property
    def read_s(self) -> Seconds:
        """Return the cost of reading each row's bytes, without descriptors."""
        _, sizes = self._alone
        seconds: Seconds = sizes / self.costs.read_bytes_per_second
        return seconds

    @cached_property
    def into_place_s(self) -> Seconds:
        """Return the cost of reading each row into place."""
        counts = descriptors(self.rows, self.pairs, self.tokens)
        return counts * self.costs.seconds_per_descriptor + self.read_s

    @cached_property
    def copy_s(self) -> Seconds:
        """Return the cost of copying each row once, on a single side of staging."""
        pieces, sizes = self._alone
        spread = strided(self.rows)
        # A strided row is a single piece to copy, whatever its number of elements.
        pieces = np.where(spread, pieces // self.rows[:, Column.COUNT], pieces)
        elements = np.where(spread, sizes // ITEM_BYTES[self.rows[:, Column.SRC_DTYPE]], 0)
        seconds: Seconds = sizes / self.costs.copy_bytes_per_second
        seconds += pieces * self.costs.seconds_per_copy
        return seconds + elements * self.costs.seconds_per_element

    @cached_property
    def packing_s(self) -> Seconds:
        """Return the cost of copying each row once while packing, at the source or reader."""
        _, sizes = self._alone
        return self.copy_s + (UNCACHED - 1) * sizes / self.costs.copy_bytes_per_second

    @cached_property
    def _alone(self) -> tuple[Int64s, Int64s]:
        return row_costs(self.rows, self.pairs, self.tokens)
