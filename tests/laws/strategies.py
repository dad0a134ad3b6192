"""Random models, engines and prompts: what the laws are tried on. Small sizes, all the features."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from hypothesis import strategies as st

from laws.outright import outright_layouts
from laws.values import FLOATS, GlobalState
from restow.agents.binding.pages import TokenRange
from restow.broker.families import (
    AttentionSpec,
    BlockScaledMlaSpec,
    ConvLayout,
    EngineSettings,
    GdnSpec,
    IndexerSpec,
    KdaSpec,
    KvOrder,
    LayerSpec,
    LinearAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    MatrixOrder,
    MlaSpec,
    ModelSpec,
    ScaleKind,
    Scales,
    ShortConvSpec,
    build_layout,
)
from restow.broker.families.specs import LatentSpec
from restow.broker.layout import DType, Layout
from restow.broker.planner import Strategy

SENDING = tuple(one for one in Strategy if one is not Strategy.RECOMPUTE)
"""What serves any pair of layouts; laws.rebuilding has cases for the other one."""
STRATEGIES = st.sampled_from(SENDING)
CASTING = st.sampled_from([one for one in SENDING if one is not Strategy.SLICES])
DTYPES = (DType.UINT8, DType.FLOAT8_E4M3FN, DType.BFLOAT16, DType.FLOAT32)

# Strategies are made once: making them again for every draw costs more than drawing.
_SMALL = st.integers(1, 3)
_EVEN = st.sampled_from([2, 4])
_UP_TO_12 = st.integers(1, 12)
_GROUPS = st.sampled_from([1, 1, 2, 3, 4, 6])
_KV_HEADS = st.sampled_from([1, 2, 3, 4, 6, 8])
_KERNELS = st.integers(2, 4)
_LAYERS = st.one_of(
    st.sampled_from(
        ["m", "a", "ma", "am", "mm", "mam", "amm", "aam", "q", "mqq", "av", "vma", "li", "4", "m4"]
    ),
    st.text("avldiq41mgkcr", min_size=1, max_size=3),
)
_WINDOWS = st.sampled_from([0, 0, 1, 3, 6, 100])
_GAPS = st.sampled_from([0, 0, 0, 1])
_PICKS = st.integers(0, 7)
_PCPS = st.sampled_from([1, 1, 1, 2])
_SEEDS = st.integers(0, 2**16)
_GUARDS = st.sampled_from([64, 0])
_QUANTISED = st.sampled_from([DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.INT8])
_VALUE_DIMS = st.sampled_from([0, 0, 4])
_SCALES = st.sampled_from([Scales(ScaleKind.PER_TOKEN_HEAD)] * 3 + [Scales(ScaleKind.STATIC, "v1")])
_DTYPES = {False: st.sampled_from(DTYPES), True: st.sampled_from(FLOATS)}
_SETTINGS = {
    even: st.builds(
        EngineSettings,
        page_tokens=st.integers(1, 5),
        pages_per_block=st.integers(1, 3),
        conv_layout=st.sampled_from(ConvLayout),
        kv_order=st.sampled_from(KvOrder),
        kv_packed=st.booleans(),
        conv_rows_extra=st.integers(0, 3),
        page_align_bytes=st.sampled_from([4, 64] if even else [1, 4, 64, 100]),
        null_block=st.sampled_from([None, 0]),
        cross_layer_blocks=st.booleans(),
        matrix_order=st.sampled_from(MatrixOrder),
    )
    for even in (False, True)
}
_FLAGS = st.booleans()
_STOPS = st.integers(1, 13)
_STARTS = st.sampled_from(["none", "none", "one", "half", "last", "all"])


@dataclass(frozen=True, slots=True)
class Case:
    """Layouts of one model on several engines, and a prompt of which a prefix is held."""

    layouts: tuple[Layout, ...]
    tokens: TokenRange
    numbers: bool
    guard_bytes: int
    seed: int

    @property
    def state(self) -> GlobalState:
        return GlobalState(self.layouts[0].model, self.tokens.stop, self.numbers)

    @property
    def arriving(self) -> GlobalState:
        """Return what D has in the end: drafts' fields that P lacks or has otherwise are zero."""
        held, wanted = (layout.model.fields for layout in self.layouts[:2])
        cold = tuple(one for one in wanted if one.draft and one not in held)
        return replace(self.state, cold=cold)

    @property
    def rng(self) -> random.Random:
        return random.Random(self.seed)  # noqa: S311


@st.composite
def model_specs(draw: st.DrawFn, casts: bool = False) -> ModelSpec:
    """Draw one to three layers with state of any families, perhaps among layers without state.

    Sizes are even where casts are to come: so every element lies at a multiple of its size.
    """
    sizes, dtypes = (_EVEN if casts else _SMALL), _DTYPES[casts]
    layers: list[LayerSpec] = []
    index = draw(_GAPS)
    # Layers of one family are alike, so that the planner may know them again.
    known: dict[str, LayerSpec] = {}
    for kind in draw(_LAYERS):
        if kind not in known:
            known[kind] = _FAMILIES[kind](draw, sizes, dtypes)
        if kind == "i" and layers and isinstance(layers[-1], LatentSpec):
            index = layers[-1].layer  # latents and an indexer's keys are of one layer
        layers.append(replace(known[kind], layer=index))
        index += 1 + draw(_GAPS)
    return ModelSpec("random", tuple(layers), layer_count=index + draw(_GAPS))


Ints = st.SearchStrategy[int]
DTypes = st.SearchStrategy[DType]


def _quantised(d: st.DrawFn, sizes: Ints, types: DTypes) -> LayerSpec:
    """Draw KV with scales: a float32 behind the elements of every head, or static ones."""
    form = d(_QUANTISED), d(_WINDOWS), d(_SCALES), d(_VALUE_DIMS)
    return AttentionSpec(0, d(_KV_HEADS), 2 * d(sizes), *form)


def _block_scaled(d: st.DrawFn, sizes: Ints, types: DTypes) -> LayerSpec:
    block = 2 * d(sizes)
    return BlockScaledMlaSpec(0, block * d(_SMALL), 2 * d(sizes), block, d(types))


def _indexer(d: st.DrawFn, sizes: Ints, types: DTypes) -> LayerSpec:
    block = 2 * d(sizes)
    return IndexerSpec(0, block * d(_SMALL), block)


def _mamba2(d: st.DrawFn, sizes: Ints, types: DTypes) -> LayerSpec:
    groups = d(_GROUPS)
    heads = groups * max(d(_UP_TO_12) // groups, 1)
    return Mamba2Spec(0, heads, d(sizes), d(sizes), groups, d(_KERNELS), d(types), d(types))


def _gdn(d: st.DrawFn, sizes: Ints, types: DTypes) -> LayerSpec:
    keys = d(_KV_HEADS)
    form = keys * d(_SMALL), d(sizes), d(sizes), d(_KERNELS)
    return GdnSpec(0, keys, *form, d(types), d(types))


_SIXTEENTHS = Scales(ScaleKind.PER_16, "v1")
_FLOAT4 = partial(AttentionSpec, dtype=DType.FLOAT4_E2M1FN_X2, scales=_SIXTEENTHS)
_FAMILIES: dict[str, Callable[[st.DrawFn, Ints, DTypes], LayerSpec]] = {
    "a": lambda d, n, t: AttentionSpec(0, d(_KV_HEADS), d(n), d(t), d(_WINDOWS)),
    "v": lambda d, n, t: AttentionSpec(0, d(_KV_HEADS), d(n), d(t), d(_WINDOWS), value_dim=d(n)),
    "q": _quantised,
    "4": lambda d, n, t: _FLOAT4(0, d(_KV_HEADS), 16 * d(_SMALL), window_tokens=d(_WINDOWS)),
    "l": lambda d, n, t: MlaSpec(0, 2 * d(n), d(t)),
    "d": _block_scaled,
    "i": _indexer,
    "1": lambda d, n, t: Mamba1Spec(0, 2 * d(_UP_TO_12), d(n), d(_KERNELS), d(t), d(t)),
    "m": _mamba2,
    "g": _gdn,
    "k": lambda d, n, t: KdaSpec(0, d(_KV_HEADS), d(n), d(_KERNELS), d(t), d(t)),
    "c": lambda d, n, t: ShortConvSpec(0, 2 * d(_UP_TO_12), d(_KERNELS), d(t), d(_FLAGS)),
    "r": lambda d, n, t: LinearAttentionSpec(0, d(_KV_HEADS), d(n), d(t)),
}
"""A layer of each kind, by the letters of `_LAYERS`; v: values of another width than keys."""


def allowed_tp(model: ModelSpec, casts: bool = False) -> list[int]:
    """Return the TP sizes that no layer forbids; with ``casts`` those that keep all aligned."""
    return [tp for tp in range(1, 9) if all(_allows(layer, tp, casts) for layer in model.layers)]


def _allows(layer: LayerSpec, tp: int, casts: bool) -> bool:
    match layer:
        case AttentionSpec():
            return layer.kv_heads % tp == 0 or tp % layer.kv_heads == 0
        case MlaSpec() | BlockScaledMlaSpec() | IndexerSpec():
            return True
        case Mamba1Spec():
            # The state follows the window: a rank's share of channels has to be even.
            return layer.channels % (2 * tp if casts else tp) == 0
        case Mamba2Spec():
            return layer.heads % tp == 0 and (layer.groups % tp == 0 or tp % layer.groups == 0)
        case GdnSpec():
            return layer.key_heads % tp == 0
        case ShortConvSpec():
            return layer.replicated or layer.channels % tp == 0
        case KdaSpec() | LinearAttentionSpec():
            return layer.heads % tp == 0
        case _:
            raise NotImplementedError(layer)


@st.composite
def prompts(draw: st.DrawFn) -> TokenRange:
    """Draw a prompt of up to 13 tokens, with a held prefix of any length up to all of it."""
    stop, start = draw(_STOPS), draw(_STARTS)
    held = {"none": 0, "one": 1, "half": stop // 2, "last": stop - 1, "all": stop}
    return TokenRange(held[start], stop)


@st.composite
def family_cases(
    draw: st.DrawFn,
    engines: int = 2,
    casts: bool = False,
    pipelines: bool = True,
    early: bool = False,
) -> Case:
    """Draw one model on ``engines`` engines; with ``casts`` each has float types of its own.

    Perhaps all engines but the first keep whole blocks, whose size divides that of the engine
    before. If ``early``, neither windows nor whole blocks keep tokens from being read early.
    """
    model = draw(model_specs(casts))
    model = replace(model, layers=_without_windows(model.layers)) if early else model
    tps = allowed_tp(model, casts)
    whole, block_tokens = draw(_FLAGS) and not early, 0
    layouts = []
    for _ in range(engines):
        own = (
            replace(model, layers=tuple(map(draw, map(_recast, model.layers)))) if casts else model
        )
        tp = tps[draw(_PICKS) % len(tps)]
        pp = 1 + draw(_PICKS) % min(model.depth, 3) if pipelines else 1
        stages = draw(_stages(model.depth, pp))
        settings = replace(draw(_SETTINGS[casts]), tp=tp, pp=pp, layers_per_stage=stages)
        if whole and block_tokens:
            settings = draw(_keeping_blocks(settings, block_tokens))
        block_tokens = settings.page_tokens * settings.pages_per_block
        settings = draw(_shared_out(model.layers, settings))
        settings = _possible(settings, own.layers)
        layouts.append(build_layout(own, settings))
    return Case(tuple(layouts), draw(prompts()), casts, draw(_GUARDS), draw(_SEEDS))


@st.composite
def draft_cases(draw: st.DrawFn, early: bool = False) -> Case:
    """Draw one model on two engines: either has drafts, both do, or they have different ones.

    If ``early``, no windows keep tokens from being read early.
    """
    model = draw(model_specs())
    tps = allowed_tp(model)
    number = model.depth + max((layer.layer for layer in model.layers), default=0)
    word = st.sampled_from(["", "mtp", "mtp", "other"])
    kinds = st.text(draw(_DRAFTED), min_size=1, max_size=2)
    letters, unlike = draw(kinds), draw(kinds)
    made = {
        kind: _FAMILIES[kind](draw, _SMALL, _DTYPES[False]) for kind in sorted({*letters, *unlike})
    }
    layouts = []
    for _ in range(2):
        name = draw(word)
        some = draw(st.sampled_from([letters, letters, unlike])) if name == "other" else letters
        drafts = tuple(
            replace(made[kind], layer=number + index) for index, kind in enumerate(some) if name
        )
        own = replace(model, draft_layers=drafts, draft=name)
        if early:
            drafts = _without_windows(drafts)
            own = replace(own, layers=_without_windows(model.layers), draft_layers=drafts)
        able = [tp for tp in tps if all(_allows(layer, tp, False) for layer in drafts)]
        settings = replace(draw(_SETTINGS[False]), tp=able[draw(_PICKS) % len(able)])
        settings = draw(_shared_out((*own.layers, *drafts), settings))
        settings = _possible(settings, (*own.layers, *drafts))
        pp = 1 + draw(_PICKS) % min(model.depth, 3)
        settings = replace(settings, pp=pp)
        layouts.append(build_layout(own, settings))
    return Case(tuple(layouts), draw(prompts()), False, draw(_GUARDS), draw(_SEEDS))


def _without_windows(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    return tuple(
        replace(one, window_tokens=0) if isinstance(one, AttentionSpec) else one for one in layers
    )


def _possible(settings: EngineSettings, layers: Sequence[LayerSpec]) -> EngineSettings:
    """Return settings that some engine has, for layers with scales of tokens or with float4."""
    attention = [one for one in layers if isinstance(one, AttentionSpec)]
    packed = any(one.packed for one in attention)
    if packed or any(one.scales.per_token for one in attention):
        order = KvOrder.NHD if settings.kv_order is KvOrder.NHD else KvOrder.HND
        settings = replace(settings, kv_order=order)
    return replace(settings, kv_packed=True) if packed else settings


_DRAFTED = st.sampled_from(["avlq4", "m"])
"""Mostly layers of tokens; no engine has drafts with states, and a layout may say them."""


@st.composite
def _keeping_blocks(draw: st.DrawFn, settings: EngineSettings, block_tokens: int) -> EngineSettings:
    """Draw the same settings with whole blocks whose size divides ``block_tokens``."""
    size = draw(st.sampled_from([n for n in range(1, block_tokens + 1) if block_tokens % n == 0]))
    pages = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    return replace(settings, page_tokens=size // pages, pages_per_block=pages, whole_blocks=True)


@st.composite
def _stages(draw: st.DrawFn, depth: int, pp: int) -> tuple[int, ...]:
    """Draw unequal stages, or give none."""
    if pp == 1 or draw(_FLAGS):
        return ()
    first = draw(st.integers(1, depth - pp + 1))
    rest = depth - first
    return (first, *(1 for _ in range(pp - 2)), rest - (pp - 2))


@st.composite
def _shared_out(
    draw: st.DrawFn, layers: Sequence[LayerSpec], settings: EngineSettings
) -> EngineSettings:
    """Share the tokens of attention out over ranks, perhaps, as far as vLLM does that."""
    tp = settings.tp
    heads = [one.kv_heads for one in layers if isinstance(one, AttentionSpec)]
    if any(isinstance(one, AttentionSpec) and one.window_tokens for one in layers):
        return settings
    latent = all(isinstance(one, AttentionSpec | LatentSpec | IndexerSpec) for one in layers)
    pcp = draw(_PCPS) if latent else 1
    sizes = [dcp for dcp in range(1, tp + 1) if tp % dcp == 0] if pcp == 1 else [1, pcp, tp * pcp]
    sizes = [dcp for dcp in sizes if dcp == 1 or all(dcp <= tp // each for each in heads)]
    block_tokens = settings.page_tokens * settings.pages_per_block
    runs = [run for run in range(1, block_tokens + 1) if block_tokens % run == 0]
    dcp = sizes[-1 - draw(_PICKS) % len(sizes)]
    return replace(settings, pcp=pcp, dcp=dcp, interleave_tokens=draw(st.sampled_from(runs)))


@st.composite
def _recast(draw: st.DrawFn, layer: LayerSpec) -> LayerSpec:
    """Draw types of its own for a layer; a quantised layer keeps its type, for nothing casts it."""
    if isinstance(layer, AttentionSpec) and layer.scales.kind is not ScaleKind.NONE:
        return layer
    types = [field.name for field in fields(layer) if field.name.endswith("dtype")]
    own = {name: draw(_DTYPES[True]) for name in types}
    return replace(layer, **own)  # type: ignore[arg-type]


@st.composite
def outright_cases(draw: st.DrawFn, engines: int = 2, casts: bool = False) -> Case:
    """Draw layouts that no family made: any boxes on any ranks at any strides."""
    layouts = draw(outright_layouts(engines, FLOATS if casts else DTYPES, casts))
    return Case(layouts, draw(prompts()), casts, draw(_GUARDS), draw(_SEEDS))


def any_cases(engines: int = 2) -> st.SearchStrategy[Case]:
    """Return a strategy for cases of both kinds without casts."""
    return st.one_of(family_cases(engines), outright_cases(engines))


def cast_cases(engines: int = 2) -> st.SearchStrategy[Case]:
    """Return a strategy for cases of both kinds whose engines may differ in dtype."""
    return st.one_of(family_cases(engines, casts=True), outright_cases(engines, casts=True))
