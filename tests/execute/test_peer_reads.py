"""What is read from peers is laid out once, until peer or program may be another."""

from __future__ import annotations

import numpy as np
import pytest

from restow.agents.binding.pages import Blocks, RegionTable, TokenRange, staged_spans
from restow.agents.execute.order_reads import KeptReads
from restow.agents.execute.orders import ExecuteOrder, Peer
from restow.agents.memory.regions import HOST
from restow.broker.errors import PageRangeError
from restow.broker.families import ConvLayout, EngineSettings, Mamba2Spec, ModelSpec, build_layout
from restow.broker.layout import DType, Layout
from restow.broker.planner import Program, Strategy, compile_programs, make_plan
from restow.broker.planner.program import READ_SPANS

BF16, F32 = DType.BFLOAT16, DType.FLOAT32
MODEL = ModelSpec("m", (Mamba2Spec(0, 8, 4, 16, 2, 4, BF16, F32),))
SOURCE, DESTINATION = (
    build_layout(MODEL, EngineSettings(tp=tp, conv_layout=conv))
    for tp, conv in ((1, ConvLayout.SD), (2, ConvLayout.DS))
)
PAGES, TOKENS = 6, TokenRange(0, 8)


def memory(layout: Layout, base: int) -> RegionTable:
    strides = np.array([region.page_stride_bytes for region in layout.ranks[0].regions], np.int64)
    return RegionTable(
        base + (np.arange(len(strides)) << 20), strides, np.full(len(strides), PAGES)
    )


def peer(base: int) -> Peer:
    regions = memory(SOURCE, base)
    return Peer("P", 0, b"", regions, HOST)


def blocks(page: int) -> Blocks:
    return Blocks({region.group: np.array([page]) for region in SOURCE.ranks[0].regions})


def program() -> Program:
    return compile_programs(make_plan(SOURCE, DESTINATION), Strategy.WHOLE)[0]


def kept_reads() -> KeptReads:
    here = memory(DESTINATION, 1 << 30)
    return KeptReads(here, HOST)


def addresses(kept: KeptReads, made: Program, there: Peer, page: int = 0) -> list[int]:
    """Return the addresses from which everything is read, in order."""
    staged, _ = staged_spans(made.rows(READ_SPANS), made.group_pairs, TOKENS, 1 << 40)
    order = ExecuteOrder(1, made.program_id, blocks(page), blocks(0), TOKENS, (), 1.0)
    reads = kept.of(made, 0, there).bind(order, staged)
    return [address for read in reads for address in read.descriptors.src_address.tolist()]


def test_rows_are_laid_once_and_bound_to_any_page() -> None:
    kept, made, there = kept_reads(), program(), peer(1 << 21)
    first = addresses(kept, made, there)
    assert kept.of(made, 0, there) is kept.of(made, 0, there)
    (stride,) = {region.page_stride_bytes for region in SOURCE.ranks[0].regions}
    assert addresses(kept, made, there, page=3) == [address + 3 * stride for address in first]
    with pytest.raises(PageRangeError):
        addresses(kept, made, there, page=PAGES)


def test_a_peer_that_comes_back_may_lie_elsewhere() -> None:
    kept, made = kept_reads(), program()
    first = addresses(kept, made, peer(1 << 21))
    kept.forget_peer("P")
    assert addresses(kept, made, peer(1 << 22)) == [a + (1 << 21) for a in first]
