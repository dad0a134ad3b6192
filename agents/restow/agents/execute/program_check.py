"""Checks that a program passes once, before an agent trusts its addresses.

Law: if binding accepts the page ids, every byte that a checked program's rows touch lies inside a
page of a region that is registered for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from restow.agents.binding.operands import DST, SRC, SideColumns
from restow.agents.binding.pages import TokenRange
from restow.agents.copying.codes import cast_known
from restow.agents.memory.errors import OrderTooLargeError, ProgramInvalidError
from restow.broker.layout import DType
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.layout.values import (
    ITEM_BYTES,
    MAX_PAGE_BYTES,
    MAX_PAGES_PER_BLOCK,
    MAX_RANKS,
    MAX_TAPS,
)
from restow.broker.planner.program import (
    GATHER_PLACED,
    PROJECT_SPANS,
    READ_OR_GATHERED,
    READ_SPANS,
    SCATTER_PLACED,
    SCATTER_SPANS,
    Column,
    Form,
    Operand,
    PageForm,
    Program,
    ProjectColumn,
    Step,
    StepKind,
    columns_of,
    most_pages,
    most_stretches,
    most_tokens,
)

Floats: TypeAlias = npt.NDArray[np.float64]

MAX_DESCRIPTORS = 4_000_000
_NOT_NEGATIVE = (
    Column.SRC_RANK,
    Column.GROUP_PAIR,
    Column.SRC_REGION,
    Column.DST_REGION,
    Column.SRC_OFFSET_BYTES,
    Column.DST_OFFSET_BYTES,
    Column.SRC_TOKEN_STRIDE_BYTES,
    Column.DST_TOKEN_STRIDE_BYTES,
)
_ONCE = {
    GATHER_PLACED: "gathers tokens to a place",
    SCATTER_PLACED: "scatters tokens from a place",
}
"""Forms that only snapshots may have, and what a row of tokens would do."""
_POSITIVE = (Column.COUNT, Column.SRC_STEP_BYTES, Column.DST_STEP_BYTES)


class CheckedProgram:
    """A program whose rows are sensible, with the checks of sides that it has passed."""

    def __init__(self, program: Program) -> None:
        """Make the checks that need no memory. Raises `ProgramInvalidError`."""
        self.program = program
        self._copying = tuple(step for step in program.steps if step.form != PROJECT_SPANS)
        """Steps whose rows have the columns of `Column`."""
        self._small: dict[int | None, int] = {}
        """Token count by source rank (None for all ranks) that passed `check_size`."""
        self._passed: set[tuple[int | None, tuple[int, ...], tuple[bool, ...]]] = set()
        self._check_pairs()
        if len({step.form for step in program.steps}) < len(program.steps):
            raise self._invalid("two steps have the same form")
        self._per_token = np.array([pair.per_token for pair in program.group_pairs], bool)
        for step in self._copying:
            self._check_rows(step)
        self._check_spans()
        check_projected(program, partial(self._refuse, PROJECT_SPANS))
        self.src_ranks = frozenset(program.src_ranks)

    def check_destination(
        self, page_strides_bytes: tuple[int, ...], constant: tuple[bool, ...] = ()
    ) -> None:
        """Check that rows stay inside the destination's pages, and out of ``constant`` regions.

        Raises `ProgramInvalidError`.
        """
        key = (None, page_strides_bytes, constant)
        if key in self._passed:
            return
        strides = np.array(page_strides_bytes, np.int64)
        for step in self._copying:
            if step.form.dst is Operand.PAGES:
                self._check_side(step, DST, strides, constant)
        refuse = partial(self._refuse, PROJECT_SPANS)
        check_projected_memory(self.program, strides, constant, refuse)
        self._passed.add(key)

    def check_source(
        self,
        src_rank: int,
        page_strides_bytes: tuple[int, ...],
        constant: tuple[bool, ...] = (),
    ) -> None:
        """Check that a source rank's rows stay inside its pages, and out of ``constant`` regions.

        A peer's constant regions are not known, and cannot be read. Raises `ProgramInvalidError`.
        """
        key = (src_rank, page_strides_bytes, constant)
        if key in self._passed:
            return
        strides = np.array(page_strides_bytes, np.int64)
        for step in self._copying:
            if step.form.src is Operand.PAGES:
                self._check_side(step.of_source(src_rank), SRC, strides, constant)
        self._passed.add(key)

    def _check_side(
        self, step: Step, side: SideColumns, strides: Int64s, constant: tuple[bool, ...]
    ) -> None:
        form, rows = step.form, step.rows
        touches = "reads" if side is SRC else "writes"
        region = rows[:, side.region]
        self._refuse(form, rows, region >= len(strides), "names a region that does not exist")
        fixed = np.flatnonzero(constant)
        self._refuse(form, rows, np.isin(region, fixed), f"{touches} a constant region")
        outside = self._ends(rows, side) > strides[region]
        self._refuse(form, rows, outside, f"leaves its {side.name} page")

    def _ends(self, rows: Int64s, side: SideColumns) -> Floats:
        """Return one past the last byte that each row touches in a page of the side.

        Floats cannot wrap around, and represent every sum below a page's length exactly.
        """
        lists = [side.form(pair) for pair in self.program.group_pairs]
        page_tokens = np.array([max(form.page_tokens, 1) for form in lists], float)
        ends: Floats = rows[:, side.offset].astype(float)
        ends += (page_tokens[rows[:, Column.GROUP_PAIR]] - 1) * rows[:, side.token_stride]
        ends += (rows[:, Column.COUNT].astype(float) - 1) * rows[:, side.step]
        return ends + ITEM_BYTES[rows[:, side.dtype]]

    def _check_spans(self) -> None:
        """Check that each row has its own span, and that rows taken from a span lie inside it."""
        spans, taken = self.program.rows(READ_SPANS), self.program.rows(SCATTER_SPANS)
        other = spans[:, Column.DST_REGION] != np.arange(len(spans))
        self._refuse(READ_SPANS, spans, other, "fills a span that is not its own")
        refuse = partial(self._refuse, SCATTER_SPANS, taken)
        index = taken[:, Column.SRC_REGION]
        refuse(index >= len(spans), "names a span that does not exist")
        mine = spans[index]
        same = mine[:, Column.SRC_RANK] == taken[:, Column.SRC_RANK]
        same &= mine[:, Column.GROUP_PAIR] == taken[:, Column.GROUP_PAIR]
        refuse(~same, "takes from a span of another rank or pair of lists")
        refuse(self._ends(taken, SRC) > mine[:, Column.COUNT], "leaves its span")

    def check_size(self, tokens: TokenRange, src_rank: int | None = None) -> None:
        """Refuse to make too many descriptors from the rows of one source, or of all sources.

        Raises `OrderTooLargeError`.
        """
        count = tokens.stop - tokens.start
        if count <= self._small.get(src_rank, -1):
            return
        for step in self._copying:
            if src_rank is None:
                self._refuse_more(self._descriptors(step, count), count)
            elif step.form in READ_OR_GATHERED:
                self._refuse_more(self._descriptors(step.of_source(src_rank), count), count)
        self._small[src_rank] = count

    def _descriptors(self, step: Step, count: int) -> int:
        """Return an upper bound of the descriptors that a step's rows need for ``count`` tokens."""
        rows, pair = step.rows, step.rows[:, Column.GROUP_PAIR]
        pairs = self.program.group_pairs
        cuts = most_pages if step.form == READ_SPANS else most_stretches
        stretches = np.array([cuts(pair_of_lists, count) for pair_of_lists in pairs], np.int64)
        moved = np.array([most_tokens(pair_of_lists, count) for pair_of_lists in pairs], np.int64)
        joined = SRC.joined(rows) & DST.joined(rows)
        joined |= ~self._per_token[pair] | (step.form == READ_SPANS)
        return int(np.where(joined, stretches[pair], moved[pair]).sum())

    def _refuse_more(self, descriptors: int, count: int) -> None:
        if descriptors > MAX_DESCRIPTORS:
            raise OrderTooLargeError(
                f"program {self.program.program_id} needs about {descriptors} descriptors for "
                f"{count} tokens, but an agent makes at most {MAX_DESCRIPTORS}: use fewer tokens, "
                f"larger pages, or the same page layout on both sides",
                program=self.program.program_id,
            )

    def _check_rows(self, step: Step) -> None:
        """Check the rules for rows of every form, and those for this step's form."""
        form, rows = step.form, step.rows
        refuse = partial(self._refuse, form, rows)
        for columns, least, words in (
            (_NOT_NEGATIVE, 0, "a negative {}"),
            (_POSITIVE, 1, "a {} below 1"),
        ):
            low = rows[:, columns] < least
            if low.any():
                for bad, column in zip(low.T, columns, strict=True):
                    refuse(bad, f"has {words.format(column.name)}")
        pair = rows[:, Column.GROUP_PAIR]
        refuse(pair >= len(self._per_token), "names a pair of lists that does not exist")
        src, dst = rows[:, Column.SRC_DTYPE], rows[:, Column.DST_DTYPE]
        refuse(~cast_known(src, dst), "needs a cast that no kernel does")
        per_token = self._per_token[pair]
        if form.kind is StepKind.READ:
            raw = (rows[:, [SRC.dtype, DST.dtype]] == DType.UINT8).all(axis=1)
            raw &= (rows[:, [SRC.step, DST.step]] == 1).all(axis=1)
            refuse(~raw, "is read, but is not a run of bytes")
        if form in _ONCE:
            refuse(per_token, _ONCE[form])
        if form != READ_SPANS:
            for column in (Column.SRC_TOKEN_STRIDE_BYTES, Column.DST_TOKEN_STRIDE_BYTES):
                refuse(per_token & (rows[:, column] < 1), f"has a {column.name} below 1")
        for operand, side in ((form.src, SRC), (form.dst, DST)):
            if operand is Operand.RUN:
                long = self._ends(rows, side) > MAX_PAGE_BYTES
                refuse(long, "leaves the longest possible run")

    def _refuse(self, form: Form, rows: Int64s, bad: npt.NDArray[np.bool_], why: str) -> None:
        if bad.any():
            row = rows[int(np.argmax(bad))]
            shown = ", ".join(f"{column.name} {row[column]}" for column in columns_of(form))
            words = f"{form.kind.name} from {form.src.name} to {form.dst.name}"
            raise self._invalid(f"a row of {words} {why}: {shown}")

    def _invalid(self, why: str) -> ProgramInvalidError:
        name = self.program.program_id
        return ProgramInvalidError(f"program {name}: {why}", program=name)

    def _check_pairs(self) -> None:
        for pair in self.program.group_pairs:
            lists: tuple[PageForm, PageForm] = (pair.src, pair.dst)
            if (pair.src.page_tokens > 0) != (pair.dst.page_tokens > 0):
                why = "one list has snapshots, the other has tokens"
            elif any(form.page_tokens < 0 for form in lists):
                why = "page_tokens is negative"
            elif any(not 0 < form.pages_per_block <= MAX_PAGES_PER_BLOCK for form in lists):
                why = f"pages_per_block is not 1 to {MAX_PAGES_PER_BLOCK}"
            elif pair.window_tokens < 0 or (pair.window_tokens and not pair.per_token):
                why = "window_tokens is negative, or given for snapshots"
            elif wrong := next(filter(None, map(_wrong_tokens, lists)), ""):
                why = wrong
            else:
                continue
            raise self._invalid(f"groups {pair.src.group} and {pair.dst.group}: {why}")


def _wrong_tokens(form: PageForm) -> str:
    """Return why the pages cannot hold the tokens that the form claims, or an empty string."""
    held = form.tokens
    if not 0 < held.parts <= MAX_RANKS or not 0 <= held.part < held.parts:
        return f"tokens of part {held.part} of {held.parts}"
    if held.interleave_tokens < 1:
        return f"tokens are interleaved by {held.interleave_tokens}"
    return "snapshots are divided by tokens" if held.parts > 1 and not form.page_tokens else ""


Refuse = Callable[[Int64s, Bools, str], None]
"""Raises for the first bad row of a table, with the reason."""

_MULTIPLIED: Bools = np.array([dtype.castable for dtype in sorted(DType)])
_LEAST_DTYPE = min(DType)


def check_projected(program: Program, refuse: Refuse) -> None:
    """Check what needs no memory: all inputs lie inside their spans, which are one page each."""
    rows, spans, pairs = program.rows(PROJECT_SPANS), program.rows(READ_SPANS), program.group_pairs
    refuse(rows, rows.min(axis=1, initial=0) < 0, "has a negative number")
    for column in (ProjectColumn.TAPS, ProjectColumn.HIDDEN, ProjectColumn.CHANNELS):
        refuse(rows, rows[:, column] < 1, f"has a {column.name} below 1")
    refuse(rows, rows[:, ProjectColumn.TAPS] > MAX_TAPS, f"has more than {MAX_TAPS} TAPS")
    for column in (ProjectColumn.DTYPE, ProjectColumn.DST_DTYPE):
        known = (rows[:, column] >= _LEAST_DTYPE) & (rows[:, column] <= max(DType))
        index = np.where(known, rows[:, column] - _LEAST_DTYPE, 0)
        refuse(rows, ~known | ~_MULTIPLIED[index], f"has a {column.name} that cannot be multiplied")
    refuse(rows, rows[:, ProjectColumn.SPAN] >= len(spans), "names a span that does not exist")
    refuse(
        rows,
        rows[:, ProjectColumn.GROUP_PAIR] >= len(pairs),
        "names a pair of lists that does not exist",
    )
    per_token = np.array([pair.per_token for pair in pairs], bool)
    mine = spans[rows[:, ProjectColumn.SPAN]]
    for number in (rows[:, ProjectColumn.GROUP_PAIR], mine[:, Column.GROUP_PAIR]):
        refuse(rows, per_token[number], "rebuilds windows from or into per-token pages")
    item = ITEM_BYTES[rows[:, ProjectColumn.DTYPE]]
    dst_item = ITEM_BYTES[rows[:, ProjectColumn.DST_DTYPE]]
    uneven = "has numbers that are not aligned to their size"
    for column, unit in (
        (ProjectColumn.SRC_OFFSET_BYTES, item),
        (ProjectColumn.SRC_TAP_STRIDE_BYTES, item),
        (ProjectColumn.WEIGHT_OFFSET_BYTES, item),
        (ProjectColumn.WEIGHT_STRIDE_BYTES, item),
        (ProjectColumn.DST_OFFSET_BYTES, dst_item),
        (ProjectColumn.DST_STRIDE_BYTES, dst_item),
        (ProjectColumn.DST_TAP_STRIDE_BYTES, dst_item),
    ):
        refuse(rows, rows[:, column] % unit != 0, uneven)
    for column, count in (
        (ProjectColumn.SRC_TAP_STRIDE_BYTES, ProjectColumn.TAPS),
        (ProjectColumn.WEIGHT_STRIDE_BYTES, ProjectColumn.CHANNELS),
        (ProjectColumn.DST_STRIDE_BYTES, ProjectColumn.CHANNELS),
        (ProjectColumn.DST_TAP_STRIDE_BYTES, ProjectColumn.TAPS),
    ):
        refuse(rows, (rows[:, count] > 1) & (rows[:, column] < 1), f"has a {column.name} below 1")
    ends = _ends(rows, ProjectColumn.SRC_OFFSET_BYTES, _TAPS, _HIDDEN)
    refuse(rows, ends > mine[:, Column.COUNT], "leaves its span")


def check_projected_memory(
    program: Program, strides: Int64s, constant: Sequence[bool], refuse: Refuse
) -> None:
    """Check that weights lie in constant regions, and windows in pages of other regions.

    Also check that no more weights are multiplied than the regions hold, so that memory limits
    the work.
    """
    rows = program.rows(PROJECT_SPANS)
    if not len(rows):
        return
    fixed = np.zeros(len(strides), bool)
    fixed[: len(constant)] = constant
    weights, dst = rows[:, ProjectColumn.WEIGHT_REGION], rows[:, ProjectColumn.DST_REGION]
    for region in (weights, dst):
        refuse(rows, region >= len(strides), "names a region that does not exist")
    refuse(rows, ~fixed[weights], "takes weights from a region that is not constant")
    refuse(rows, fixed[dst], "writes a constant region")
    ends = _ends(rows, ProjectColumn.WEIGHT_OFFSET_BYTES, _CHANNELS, _HIDDEN)
    refuse(rows, ends > strides[weights], "leaves the region of its weights")
    ends = _ends(rows, ProjectColumn.DST_OFFSET_BYTES, _WINDOW_CHANNELS, _WINDOW_TAPS)
    refuse(rows, ends > strides[dst], "leaves its destination page")
    item = ITEM_BYTES[rows[:, ProjectColumn.DTYPE]].astype(float)
    sizes = item * rows[:, ProjectColumn.CHANNELS] * rows[:, ProjectColumn.HIDDEN]
    much = sizes.sum() > strides[fixed].astype(float).sum()
    refuse(rows, np.full(len(rows), much), "is one of several that multiply the same weights")


_TAPS = (ProjectColumn.TAPS, ProjectColumn.SRC_TAP_STRIDE_BYTES, ProjectColumn.DTYPE)
_HIDDEN = (ProjectColumn.HIDDEN, None, ProjectColumn.DTYPE)
_CHANNELS = (ProjectColumn.CHANNELS, ProjectColumn.WEIGHT_STRIDE_BYTES, ProjectColumn.DTYPE)
_WINDOW_CHANNELS = (ProjectColumn.CHANNELS, ProjectColumn.DST_STRIDE_BYTES, ProjectColumn.DST_DTYPE)
_WINDOW_TAPS = (ProjectColumn.TAPS, ProjectColumn.DST_TAP_STRIDE_BYTES, ProjectColumn.DST_DTYPE)

_Axis = tuple[ProjectColumn, ProjectColumn | None, ProjectColumn]
"""Columns of an axis' size, its stride (None for no gaps), and its type."""


def _ends(rows: Int64s, offset: ProjectColumn, *axes: _Axis) -> Floats:
    """Return one past the last byte that each row touches, as floats, which cannot wrap around."""
    item = ITEM_BYTES[rows[:, axes[0][2]]]
    ends: Floats = rows[:, offset].astype(float)
    for size, stride, _ in axes:
        ends += (rows[:, size].astype(float) - 1) * (item if stride is None else rows[:, stride])
    return ends + item
