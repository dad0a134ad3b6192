"""What Restow's agents read for a geometry, by its own layouts, planner, programs and binding."""

from __future__ import annotations

import numpy as np

from restow.agents.binding.pages import Blocks, RegionTable, TokenRange
from restow.agents.binding.reads import Reads
from restow.agents.conform.rules import KINDS, PAGE_TOKENS, Geometry, Kind
from restow.agents.conform.score import Copy, Form
from restow.broker.families import (
    AttentionSpec,
    EngineSettings,
    GdnSpec,
    KdaSpec,
    LayerSpec,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.families.settings import ConvLayout, KvOrder
from restow.broker.layout import DType, RankLayout
from restow.broker.planner import Strategy, compile_programs, make_plan
from restow.broker.planner.program import READ_PAGES

TOKENS = TokenRange(0, PAGE_TOKENS)
BLOCKS = Blocks({"state": np.zeros(1, np.int64), "attention": np.zeros(1, np.int64)})


def copies(geometry: Geometry, p_form: Form, d_form: Form) -> list[Copy]:
    """Return every READ of every rank of D; each engine has a single page, at address 0."""
    kind = KINDS[geometry.kind]
    model = ModelSpec("a layer", (_spec(kind),))
    source, destination = (
        build_layout(model, _settings(kind, form, tp))
        for form, tp in ((p_form, geometry.p_tp), (d_form, geometry.d_tp))
    )
    all_copies = []
    for program in compile_programs(make_plan(source, destination), Strategy.SLICES):
        own_regions = _regions(destination.ranks[program.dst_rank])
        for rank in program.src_ranks:
            rows = program.rows(READ_PAGES, rank)
            reads = Reads.of(rows, program.group_pairs, _regions(source.ranks[rank]), own_regions)
            read = reads.bind(BLOCKS, BLOCKS, TOKENS)
            columns = (read.src_address, read.dst_address, read.length_bytes)
            all_copies += [
                Copy(rank, program.dst_rank, *place)
                for place in zip(*(column.tolist() for column in columns), strict=True)
            ]
    return all_copies


def _settings(kind: Kind, form: Form, tp: int) -> EngineSettings:
    return EngineSettings(
        tp=tp,
        page_tokens=PAGE_TOKENS,
        conv_layout=ConvLayout(form.conv),
        conv_rows_extra=0 if kind.family == "gqa" else form.rows - kind.taps,
        kv_order=KvOrder(form.kv),
        kv_packed=form.kv == "HND",
    )


def _spec(kind: Kind) -> LayerSpec:
    n, conv, state = kind.sizes, DType.BFLOAT16, DType.FLOAT32
    if kind.family == "gqa":
        return AttentionSpec(0, n["kv_heads"], n["head_dim"], DType.BFLOAT16)
    kernel = n["conv_kernel"]
    if kind.family == "gdn":
        heads, dims = (n["key_heads"], n["value_heads"]), (n["key_dim"], n["value_dim"])
        return GdnSpec(0, *heads, *dims, kernel, conv, state)
    if kind.family == "kda":
        return KdaSpec(0, n["heads"], n["head_dim"], kernel, conv, state)
    return Mamba2Spec(0, n["heads"], n["head_dim"], n["state"], n["groups"], kernel, conv, state)


def _regions(rank: RankLayout) -> RegionTable:
    """Return the addresses of one page of each region, laid end to end."""
    strides = np.array([region.page_stride_bytes for region in rank.regions], np.int64)
    return RegionTable(np.cumsum(strides) - strides, strides, np.ones(len(strides), np.int64))
