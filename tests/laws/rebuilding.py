"""Cases for ``recompute``: P keeps mixer inputs, D offers weights, and windows are their products.

All numbers of inputs and weights are small integers, so that a product is exact in every type and
in any order of additions. P's windows hold these products too: what D must hold is the same
whatever travelled, and what travelled is seen in the bytes that were read.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st

from laws.checks import engines_of, needed_bytes
from laws.executor import Arena
from laws.strategies import (
    _GUARDS,
    _PICKS,
    _SEEDS,
    _SETTINGS,
    Case,
    _recast,
    allowed_tp,
    model_specs,
    prompts,
)
from laws.transfers import transfer
from laws.values import FLOATS
from restow.agents.binding.pages import TokenRange
from restow.broker.errors import LayoutFormError, StrategyRefusedError
from restow.broker.families import Mamba1Spec, Mamba2Spec, Mixer, build_layout
from restow.broker.layout import Layout, RankLayout, Region, check_layout
from restow.broker.layout.values import ITEM_BYTES
from restow.broker.planner import Strategy, compile_programs, make_plan
from restow.broker.planner.program import PROJECT_SPANS, ProjectColumn

_HIDDEN = st.integers(1, 7)
_FLOATS = st.sampled_from(FLOATS)
_RARELY = st.sampled_from([False, False, False, True])


@st.composite
def rebuilding_cases(draw: st.DrawFn) -> Case:
    """Draw a P with inputs and a D with weights, in layouts of families or other ones."""
    casts = draw(st.booleans())
    model = draw(model_specs(casts))
    hidden, dtype = draw(_HIDDEN), draw(_FLOATS)
    layouts = []
    for is_p in (True, False):
        own = draw(_FLOATS) if draw(_RARELY) else dtype
        layers = tuple(map(draw, map(_recast, model.layers))) if casts else model.layers
        mixer = Mixer(hidden, own)
        spec = replace(
            model,
            layers=tuple(
                replace(one, mixer=mixer) if isinstance(one, Mamba1Spec | Mamba2Spec) else one
                for one in layers
            ),
        )
        tps = allowed_tp(model, casts)
        settings = replace(
            draw(_SETTINGS[casts]), mixer_inputs=is_p or draw(_RARELY), projections=not is_p
        )
        pp = 1 + draw(_PICKS) % min(model.depth, 3)
        tp = tps[draw(_PICKS) % len(tps)]
        try:
            layout = build_layout(spec, replace(settings, tp=tp, pp=pp))
        except LayoutFormError:
            assume(False)
        layouts.append(_otherwise(layout, random.Random(draw(_SEEDS))))  # noqa: S311
    assume(layouts[0].model.inputs)
    for layout in layouts:
        check_layout(layout)
    return Case(tuple(layouts), draw(prompts()), casts, draw(_GUARDS), draw(_SEEDS))


def _otherwise(layout: Layout, rng: random.Random) -> Layout:
    """Return a layout with gaps between weights, and with inputs on other pages, half the time."""
    if rng.random() < 0.5:
        return layout
    ranks = (_apart(_spread(rank, rng.choice([0, 0, 1, 4]), rng), rng) for rank in layout.ranks)
    return replace(layout, ranks=tuple(ranks))


def _spread(rank: RankLayout, gap: int, rng: random.Random) -> RankLayout:
    ends: dict[str, int] = defaultdict(int)
    offered = []
    for one in rng.sample(rank.projections, len(rank.projections)):
        item, row = one.strides_bytes[-1], one.strides_bytes[-2]
        wide = row + gap * item
        strides = (*(stride // row * wide for stride in one.strides_bytes[:-1]), item)
        start = ends[one.region]
        ends[one.region] += one.box[0].size * strides[0]
        offered.append(replace(one, offset_bytes=start, strides_bytes=strides))
    regions = tuple(
        replace(region, page_stride_bytes=ends.get(region.name, region.page_stride_bytes))
        for region in rank.regions
    )
    return replace(rank, regions=regions, projections=tuple(offered))


def _apart(rank: RankLayout, rng: random.Random) -> RankLayout:
    regions, inputs = list(rank.regions), []
    for shard in rank.inputs:
        item, gap = shard.dtype.itemsize_bytes, rng.choice([0, 1, 5])
        stride = shard.strides_bytes[0] + gap * item
        name, offset = f"{shard.field}s", gap * item
        regions.append(Region(name, "inputs", offset + shard.box[0].size * stride + gap, None))
        inputs.append(
            replace(shard, region=name, offset_bytes=offset, strides_bytes=(stride, item))
        )
    return replace(rank, regions=tuple(regions), inputs=tuple(inputs))


def check_recompute(case: Case) -> None:
    """Check that D holds all that was sent, and that nothing was read of what is rebuilt."""
    source_layout, destination_layout = case.layouts
    plan = make_plan(source_layout, destination_layout)
    try:
        programs = compile_programs(plan, Strategy.RECOMPUTE)
    except StrategyRefusedError:
        assume(False)
    arena = Arena()
    source, destination = engines_of(case, arena)
    traffic = transfer(source, destination, case.tokens, Strategy.RECOMPUTE, plan)
    destination.check(case.state, case.tokens, written=True)
    source.check(case.state, TokenRange(0, case.tokens.stop), written=False)
    needed = needed_bytes(destination_layout, case.tokens)
    for program in programs:
        rows = program.rows(PROJECT_SPANS)
        dst_rank = program.dst_rank
        made = rows[:, ProjectColumn.CHANNELS] * rows[:, ProjectColumn.TAPS]
        rebuilt = int((made * ITEM_BYTES[rows[:, ProjectColumn.DST_DTYPE]]).sum())
        if case.layouts[0].model == case.layouts[1].model and not case.numbers:
            assert traffic.read_bytes[dst_rank] == needed[dst_rank] - rebuilt, (
                "what is rebuilt was read as well"
            )
