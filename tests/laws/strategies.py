"""Random models, engines and prompts: what the laws are tried on. Small sizes, all the features."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from laws.outright import outright_layouts
from laws.values import FLOATS, GlobalState
from restow.agents.binding import Tokens
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    KvOrder,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Layout
from restow.broker.planner import Strategy

STRATEGIES = st.sampled_from(Strategy)
DTYPES = (DType.UINT8, DType.FLOAT8_E4M3FN, DType.BFLOAT16, DType.FLOAT32)

# Strategies are made once: making them again for every draw costs more than drawing.
_SMALL = st.integers(1, 3)
_EVEN = st.sampled_from([2, 4])
_UP_TO_12 = st.integers(1, 12)
_GROUPS = st.sampled_from([1, 1, 2, 3, 4, 6])
_KV_HEADS = st.sampled_from([1, 2, 3, 4, 6, 8])
_KERNELS = st.integers(2, 4)
_LAYERS = st.sampled_from(["m", "a", "ma", "am", "mm", "mam", "amm", "aam"])
_PICKS = st.integers(0, 7)
_SEEDS = st.integers(0, 2**16)
_GUARDS = st.sampled_from([64, 0])
_DTYPES = {False: st.sampled_from(DTYPES), True: st.sampled_from(FLOATS)}
_SETTINGS = {
    even: st.builds(
        EngineSettings,
        page_tokens=st.integers(1, 5),
        pages_per_block=st.integers(1, 3),
        conv_layout=st.sampled_from(ConvLayout),
        kv_order=st.sampled_from(KvOrder),
        conv_rows_extra=st.integers(0, 2),
        page_align_bytes=st.sampled_from([4, 64] if even else [1, 4, 64, 100]),
    )
    for even in (False, True)
}
_STOPS = st.integers(1, 13)
_STARTS = st.sampled_from(["none", "none", "one", "half", "last", "all"])


@dataclass(frozen=True, slots=True)
class Case:
    """Layouts of one model on several engines, and a prompt of which a prefix is held."""

    layouts: tuple[Layout, ...]
    tokens: Tokens
    numbers: bool
    guard_bytes: int
    seed: int

    @property
    def state(self) -> GlobalState:
        return GlobalState(self.layouts[0].model, self.tokens.stop, self.numbers)

    @property
    def rng(self) -> random.Random:
        return random.Random(self.seed)  # noqa: S311


@st.composite
def model_specs(draw: st.DrawFn, casts: bool = False) -> ModelSpec:
    """One to three layers: attention, Mamba2, in any order.

    Sizes are even where casts are to come: so every element lies at a multiple of its size.
    """
    groups = draw(_GROUPS)
    sizes, dtypes = (_EVEN if casts else _SMALL), _DTYPES[casts]
    mamba = Mamba2Spec(
        layer=0,
        heads=groups * max(draw(_UP_TO_12) // groups, 1),
        head_dim=draw(sizes),
        state=draw(sizes),
        groups=groups,
        conv_kernel=draw(_KERNELS),
        conv_dtype=draw(dtypes),
        ssm_dtype=draw(dtypes),
    )
    attention = AttentionSpec(0, draw(_KV_HEADS), draw(sizes), draw(dtypes))
    layers = (
        replace(mamba if kind == "m" else attention, layer=i)
        for i, kind in enumerate(draw(_LAYERS))
    )
    return ModelSpec("random", tuple(layers))


def allowed_tp(model: ModelSpec) -> list[int]:
    """TP sizes that neither heads nor groups forbid."""
    return [tp for tp in range(1, 9) if all(_allows(layer, tp) for layer in model.layers)]


def _allows(layer: AttentionSpec | Mamba2Spec, tp: int) -> bool:
    if isinstance(layer, AttentionSpec):
        return layer.kv_heads % tp == 0 or tp % layer.kv_heads == 0
    return layer.heads % tp == 0 and (layer.groups % tp == 0 or tp % layer.groups == 0)


@st.composite
def prompts(draw: st.DrawFn) -> Tokens:
    """Prompts of up to 13 tokens, with a held prefix of any length, all of it included."""
    stop, start = draw(_STOPS), draw(_STARTS)
    held = {"none": 0, "one": 1, "half": stop // 2, "last": stop - 1, "all": stop}
    return Tokens(held[start], stop)


@st.composite
def family_cases(draw: st.DrawFn, engines: int = 2, casts: bool = False) -> Case:
    """One model on ``engines`` engines; with ``casts`` each engine has float types of its own."""
    model = draw(model_specs(casts))
    tps = allowed_tp(model)
    layouts = []
    for _ in range(engines):
        own = (
            ModelSpec(model.name, tuple(map(draw, map(_recast, model.layers)))) if casts else model
        )
        tp = tps[draw(_PICKS) % len(tps)]
        layouts.append(build_layout(own, replace(draw(_SETTINGS[casts]), tp=tp)))
    return Case(tuple(layouts), draw(prompts()), casts, draw(_GUARDS), draw(_SEEDS))


@st.composite
def _recast(draw: st.DrawFn, layer: AttentionSpec | Mamba2Spec) -> AttentionSpec | Mamba2Spec:
    dtypes = _DTYPES[True]
    if isinstance(layer, AttentionSpec):
        return replace(layer, dtype=draw(dtypes))
    return replace(layer, conv_dtype=draw(dtypes), ssm_dtype=draw(dtypes))


@st.composite
def outright_cases(draw: st.DrawFn, engines: int = 2, casts: bool = False) -> Case:
    """Layouts that no family made: any boxes on any ranks at any strides."""
    layouts = draw(outright_layouts(engines, FLOATS if casts else DTYPES, casts))
    return Case(layouts, draw(prompts()), casts, draw(_GUARDS), draw(_SEEDS))


def any_cases(engines: int = 2) -> st.SearchStrategy[Case]:
    """Cases of both kinds without casts."""
    return st.one_of(family_cases(engines), outright_cases(engines))


def cast_cases(engines: int = 2) -> st.SearchStrategy[Case]:
    """Cases of both kinds whose engines may differ in dtype."""
    return st.one_of(family_cases(engines, casts=True), outright_cases(engines, casts=True))
