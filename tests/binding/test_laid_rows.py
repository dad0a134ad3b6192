"""Rows that are kept: until their peer or their program may be another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agent_harness.steps import with_rows
from restow.agents.binding.pages import Blocks, RegionTable, Tokens
from restow.agents.execute.laid_rows import LaidRows
from restow.agents.link.orders import Peer
from restow.agents.memory.regions import HOST
from restow.broker.errors import PageRangeError
from restow.broker.families import ConvLayout, EngineSettings, Mamba2Spec, ModelSpec, build_layout
from restow.broker.layout import DType, Layout
from restow.broker.planner import Program, Strategy, compile_programs, make_plan
from restow.broker.planner.program import READ_SPANS, SCATTER_SPANS, Column

BF16, F32 = DType.BFLOAT16, DType.FLOAT32
MODEL = ModelSpec("m", (Mamba2Spec(0, 8, 4, 16, 2, 4, BF16, F32),))
SOURCE, DESTINATION = (
    build_layout(MODEL, EngineSettings(tp=tp, conv_layout=conv))
    for tp, conv in ((1, ConvLayout.SD), (2, ConvLayout.DS))
)
PAGES, TOKENS = 6, Tokens(0, 8)


def memory(layout: Layout, base: int) -> RegionTable:
    strides = np.array([region.page_stride_bytes for region in layout.ranks[0].regions], np.int64)
    return RegionTable(
        base + (np.arange(len(strides)) << 20), strides, np.full(len(strides), PAGES)
    )


def peer(base: int) -> Peer:
    regions = memory(SOURCE, base)
    return Peer("P", 0, b"", regions, (HOST,) * len(regions.base_address))


def blocks(page: int) -> Blocks:
    return Blocks({region.group: np.array([page]) for region in SOURCE.ranks[0].regions})


def program() -> Program:
    return compile_programs(make_plan(SOURCE, DESTINATION), Strategy.WHOLE)[0]


def laid_rows() -> LaidRows:
    here = memory(DESTINATION, 1 << 30)
    return LaidRows(here, (HOST,) * len(here.base_address))


def addresses(laid: LaidRows, made: Program, there: Peer, page: int = 0) -> list[int]:
    """Where everything is read from, in order."""
    rows = laid.from_peer(made, 0, there)
    staged, _ = laid.arriving(made).spans.at(TOKENS, 1 << 40)
    parts = [reads.bind(blocks(page), blocks(0), TOKENS) for _, _, reads in rows.direct]
    parts += [spans.bind(staged, blocks(page), TOKENS) for _, spans in rows.spans]
    return [address for part in parts for address in part.src_address.tolist()]


def test_rows_are_laid_once_and_bound_to_any_page() -> None:
    laid, made, there = laid_rows(), program(), peer(1 << 21)
    first = addresses(laid, made, there)
    rows, arriving = laid.from_peer(made, 0, there), laid.arriving(made)
    assert laid.from_peer(made, 0, there) is rows
    assert laid.arriving(made) is arriving
    (stride,) = {region.page_stride_bytes for region in SOURCE.ranks[0].regions}
    assert addresses(laid, made, there, page=3) == [address + 3 * stride for address in first]
    with pytest.raises(PageRangeError):
        addresses(laid, made, there, page=PAGES)


def test_a_peer_that_comes_back_may_lie_elsewhere() -> None:
    laid, made = laid_rows(), program()
    first = addresses(laid, made, peer(1 << 21))
    laid.forget_peer("P")
    assert addresses(laid, made, peer(1 << 22)) == [a + (1 << 21) for a in first]


def test_another_program_of_the_same_name_has_its_own_rows() -> None:
    laid, made, there = laid_rows(), program(), peer(1 << 21)
    first, copied = addresses(laid, made, there), len(made.rows(SCATTER_SPANS))
    spans = made.rows(READ_SPANS).copy()
    spans[:, Column.SRC_OFFSET_BYTES] += 16
    other = with_rows(
        with_rows(made, READ_SPANS, spans), SCATTER_SPANS, made.rows(SCATTER_SPANS)[:1]
    )
    laid.forget_program(made.program_id)
    assert addresses(laid, other, there) == [address + 16 for address in first]
    turning = laid.arriving(other).turning
    staged, _ = laid.arriving(other).spans.at(TOKENS, 1 << 40)
    assert len(turning.bind(staged, blocks(0), TOKENS, torch.device("cpu"))) == 1 < copied
