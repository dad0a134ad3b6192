"""What a packed handoff costs the hosts of two GPUs: binding, and the bytes that are uploaded.

No GPU is needed: rows are kept as they would be on a device, and nothing is launched. The reference
binds every row to addresses, as the agent of a rank in host memory does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from bench.model_sizes import real_models
from bench.report import Put, compared
from restow.agents.binding.copies import RowCopies
from restow.agents.binding.operands import SRC, paged
from restow.agents.binding.pages import Blocks, RegionTable, TokenRange
from restow.agents.copying.copier import piece_table
from restow.agents.copying.device_copies import DeviceTables
from restow.agents.execute.gathering import GatheredRun
from restow.agents.execute.order_reads import StagedReads, cleared
from restow.agents.execute.orders import ExecuteOrder
from restow.broker.families import ConvLayout, EngineSettings, build_layout
from restow.broker.layout import RankLayout
from restow.broker.layout.rows import Int64s
from restow.broker.planner import Strategy, compile_programs, make_plan
from restow.kernels import RowTable
from restow.kernels.copy import DeviceRows

SUITE = "gpu-host-work"
ADDRESSES = "addresses for all pieces"
GATHER_ADDRESS, SCATTER_ADDRESS = 1 << 45, 1 << 46
CPU = torch.device("cpu")
CASES = (
    # model, tokens, TP of P and D, tokens of a page, layout of D's windows
    ("nemotron3-nano-30b", 8192, 1, 1, 16, ConvLayout.SD),
    ("nemotron3-nano-30b", 8192, 2, 4, 64, ConvLayout.DS),
    ("falcon-h1-34b-like", 1024, 1, 1, 16, ConvLayout.SD),
)


@dataclass
class Kept:
    """Rows that would be on a device."""

    table: RowTable


class Handoff:
    """A rank of P, a rank of D, and what they copy in a handoff."""

    def __init__(
        self, model: str, tokens: int, src_tp: int, dst_tp: int, page_tokens: int, conv: ConvLayout
    ) -> None:
        spec = real_models()[model]
        source = build_layout(spec, EngineSettings(tp=src_tp, page_tokens=page_tokens))
        settings = EngineSettings(tp=dst_tp, page_tokens=page_tokens, conv_layout=conv)
        target = build_layout(spec, settings)
        self.program = compile_programs(make_plan(source, target), Strategy.PACK)[0]
        self.src_rank, self.span = self.program.staging_ranks[0], TokenRange(0, tokens)
        self.src, self.src_blocks = _memory(source.ranks[self.src_rank], tokens)
        self.dst, dst_blocks = _memory(target.ranks[self.program.dst_rank], tokens)
        self.order = ExecuteOrder(
            1, self.program.program_id, self.src_blocks, dst_blocks, self.span, (), 1.0
        )

    def gathered(self) -> Sequence[RowCopies]:
        """Return what the rank of P copies."""
        run = GatheredRun.at_source(self.program, self.src_rank, self.span)
        return run.gather(paged(self.src, SRC, self.src_blocks), GATHER_ADDRESS)

    def scattered(self) -> Sequence[RowCopies]:
        """Return what the rank of D copies and zeroes."""
        staged = StagedReads(self.program, self.order)
        staged.put_at(SCATTER_ADDRESS)
        return [*staged.copies(self.dst), *cleared(self.program, self.order, self.dst)]


def run(put: Put, repeats: int) -> None:
    """Measure the CPU time of both sides of a handoff, of one rank of P and one of D."""
    for case in CASES:
        handoff = Handoff(*case)
        tables = DeviceTables(CPU, lambda table, _: cast(DeviceRows, Kept(table)))
        ours: list[float] = []
        theirs: list[float] = []
        for repeat in range(-1, repeats):
            begun_s = time.process_time()
            launches = [tables.bind(handoff.gathered()), tables.bind(handoff.scattered())]
            bound_s = time.process_time()
            _addresses(handoff.gathered())
            _addresses(handoff.scattered())
            if repeat >= 0:
                ours.append(bound_s - begun_s)
                theirs.append(time.process_time() - bound_s)
        uploaded_bytes = sum(launch.call.words.nbytes for launch in launches if launch)
        model, tokens, src_tp, dst_tp, page_tokens, _ = case
        name = f"{model}, {tokens} tokens, TP {src_tp} to {dst_tp}, pages of {page_tokens}"
        note = f"{uploaded_bytes / 1024:.1f} KB uploaded"
        put(compared(SUITE, name, ours, ADDRESSES, theirs, note=note))


def _addresses(parts: Sequence[RowCopies]) -> None:
    for part in parts:
        piece_table(part.bind())


def _memory(layout: RankLayout, tokens: int) -> tuple[RegionTable, Blocks]:
    """Return a rank's regions at made-up addresses, and blocks in random order."""
    rng, at = np.random.default_rng(layout.rank), 1 << 30
    rows: list[tuple[int, int, int]] = []
    ids: dict[str, Int64s] = {}
    for region in layout.regions:
        blocks = -(-tokens // region.page_tokens) if region.page_tokens else 1
        blocks = -(-blocks // region.pages_per_block)
        pages = (2 * blocks + 1) * region.pages_per_block
        rows.append((at, region.page_stride_bytes, pages))
        at += -(-pages * region.page_stride_bytes // 4096) * 4096
        ids.setdefault(region.group, rng.permutation(2 * blocks)[:blocks] + 1)
    return RegionTable(*np.array(rows, np.int64).T), Blocks(ids)
