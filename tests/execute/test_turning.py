"""Windows turned as they were prepared for another handoff: the same bytes as if made anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from restow.agents.binding.copies import Extraction
from restow.agents.binding.pages import Blocks, RegionTable, Tokens
from restow.agents.binding.pieces import Copies
from restow.agents.binding.staging import StagedSpans
from restow.agents.copying.prepared_copies import PreparedCopies, run_copies
from restow.agents.execute.turning import Turning
from restow.broker.errors import PageRangeError
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    ModelSpec,
    ShortConvSpec,
    build_layout,
)
from restow.broker.layout import DType, Layout
from restow.broker.planner import Program, Strategy, compile_programs, make_plan
from restow.broker.planner.program import READ_SPANS, SCATTER_SPANS

CPU = torch.device("cpu")
PAGES, TOKENS = 5, Tokens(0, 64)
POISON = 0xA5
BF16 = DType.BFLOAT16
CONV = [ShortConvSpec(layer, 512, 4, BF16) for layer in (0, 1)]
ATTENTION = AttentionSpec(2, 4, 32, BF16)


def layouts(attention: bool) -> tuple[Layout, Layout]:
    model = ModelSpec("m", (*CONV, ATTENTION) if attention else tuple(CONV))
    settings = (EngineSettings(tp=1), EngineSettings(tp=2, conv_layout=ConvLayout.DS))
    source, destination = (build_layout(model, one) for one in settings)
    return source, destination


class World:
    """D's memory, poisoned, and staging full of bytes that differ."""

    def __init__(self, attention: bool) -> None:
        source, destination = layouts(attention)
        self.program: Program = compile_programs(make_plan(source, destination), Strategy.WHOLE)[0]
        regions = destination.ranks[0].regions
        strides = np.array([region.page_stride_bytes for region in regions], np.int64)
        ends = np.cumsum(strides * PAGES + 256)
        self.data = np.full(int(ends[-1]), POISON, np.uint8)
        begins = self.data.ctypes.data + ends - strides * PAGES - 256
        self.memory = RegionTable(begins, strides, np.full(len(strides), PAGES))
        self.groups = {region.group for region in regions}
        pairs = self.program.group_pairs
        self.spans = StagedSpans.of(self.program.rows(READ_SPANS), pairs)
        self.extraction = Extraction(self.program.rows(SCATTER_SPANS), pairs, self.memory)
        length = self.spans.at(TOKENS, 0)[1]
        self.staging = np.random.default_rng(1).integers(0, 256, 2 * length + 4096).astype(np.uint8)

    def blocks(self, page: int) -> Blocks:
        """The page of snapshots; attention's tokens fill several."""
        counts = {group: 1 if group == "state" else PAGES - 1 for group in self.groups}
        return Blocks({group: (page + np.arange(n)) % PAGES for group, n in counts.items()})

    def staged(self, begin: int) -> RegionTable:
        return self.spans.at(TOKENS, self.staging.ctypes.data + begin)[0]

    def result(self, copies: Copies | PreparedCopies) -> np.ndarray:
        self.data[:] = POISON
        if isinstance(copies, PreparedCopies):
            copies()
        else:
            run_copies(copies, CPU)
        return self.data.copy()


def test_what_was_prepared_once_is_right_wherever_the_next_handoff_lies() -> None:
    world = World(attention=False)
    turning = Turning(world.extraction, world.spans)
    rng = np.random.default_rng(2)
    found = []
    for _ in range(40):
        begin, page = 64 * int(rng.integers(0, 60)), int(rng.integers(0, PAGES))
        staged, blocks = world.staged(begin), world.blocks(page)
        made = turning.bind(staged, blocks, TOKENS, CPU)
        assert isinstance(made, PreparedCopies)
        found.append(made.pieces)
        anew = world.extraction.bind(staged, blocks, TOKENS)
        assert len(made) == len(anew) > 0
        got, want = world.result(made), world.result(anew)
        assert (got == want).all()
        assert (got != POISON).any()
    assert len({id(one.reads) for one in found}) == 1, "prepared once"  # type: ignore[union-attr]


def test_a_run_that_lies_crooked_is_not_taken_for_a_straight_one() -> None:
    world = World(attention=False)
    turning = Turning(world.extraction, world.spans)
    turning.bind(world.staged(64), world.blocks(0), TOKENS, CPU)
    crooked = world.staged(65), world.blocks(0), TOKENS
    with pytest.raises(Exception, match="no kernel"):
        run_copies(world.extraction.bind(*crooked), CPU)
    with pytest.raises(Exception, match="no kernel"):
        turning.bind(*crooked, CPU)


@pytest.mark.parametrize("before", [0, 1], ids=["the first", "one that follows"])
@pytest.mark.parametrize("page", [-1, PAGES, 1 << 40])
def test_a_page_that_is_not_there_is_refused(before: int, page: int) -> None:
    world = World(attention=False)
    turning = Turning(world.extraction, world.spans)
    for _ in range(before):
        turning.bind(world.staged(0), world.blocks(1), TOKENS, CPU)
    wrong = Blocks({group: np.array([page]) for group in world.groups})
    with pytest.raises(PageRangeError):
        turning.bind(world.staged(0), wrong, TOKENS, CPU)


def test_rows_of_tokens_are_bound_for_every_handoff() -> None:
    world = World(attention=True)
    turning = Turning(world.extraction, world.spans)
    for begin, page in ((0, 0), (128, 3)):
        staged, blocks = world.staged(begin), world.blocks(page)
        made = turning.bind(staged, blocks, TOKENS, CPU)
        assert isinstance(made, Copies)
        anew = world.result(world.extraction.bind(staged, blocks, TOKENS))
        assert (world.result(made) == anew).all()


def test_regions_of_several_strides_do_not_move_together() -> None:
    world = World(attention=False)
    assert world.extraction.distance(world.blocks(2), TOKENS) is not None
    strides = world.memory.page_stride_bytes.copy()
    strides[-1] += 64
    memory = RegionTable(world.memory.base_address, strides, world.memory.page_count)
    uneven = Extraction(world.program.rows(SCATTER_SPANS), world.program.group_pairs, memory)
    assert uneven.distance(world.blocks(2), TOKENS) is None


def test_rows_of_tokens_do_not_move_together() -> None:
    source, destination = (
        build_layout(ModelSpec("m", (replace(ATTENTION, layer=0),)), EngineSettings(page_tokens=n))
        for n in (16, 32)
    )
    program = compile_programs(make_plan(source, destination), Strategy.WHOLE)[0]
    memory = RegionTable(*np.array([[1 << 30], [1 << 20], [PAGES]], np.int64))
    extraction = Extraction(program.rows(SCATTER_SPANS), program.group_pairs, memory)
    assert len(program.rows(SCATTER_SPANS))
    (group,) = {region.group for region in destination.ranks[0].regions}
    assert extraction.distance(Blocks({group: np.arange(4)}), TOKENS) is None


def test_snapshots_beside_spans_of_tokens_are_bound_for_every_handoff() -> None:
    """Those push them to and fro in staging."""
    world = World(attention=False)
    turning = Turning(world.extraction, replace(world.spans, fixed=None))
    for _ in range(2):
        made = turning.bind(world.staged(0), world.blocks(0), TOKENS, CPU)
        assert isinstance(made, Copies)
