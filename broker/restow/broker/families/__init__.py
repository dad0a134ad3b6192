"""Families: from a model's numbers and an engine's settings to a layout."""

from restow.broker.families.build import build_layout
from restow.broker.families.hf.config import model_from_hf_config
from restow.broker.families.hf.readings import Reading, Readings
from restow.broker.families.recurrent import (
    GdnSpec,
    KdaSpec,
    LinearAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    Mixer,
    RecurrentSpec,
    ShortConvSpec,
)
from restow.broker.families.settings import ConvLayout, EngineSettings, KvOrder, MatrixOrder
from restow.broker.families.specs import (
    NO_SCALES,
    AttentionSpec,
    BlockScaledMlaSpec,
    IndexerSpec,
    LayerSpec,
    MlaSpec,
    ModelSpec,
    ScaleKind,
    Scales,
)

__all__ = [
    "NO_SCALES",
    "AttentionSpec",
    "BlockScaledMlaSpec",
    "ConvLayout",
    "EngineSettings",
    "GdnSpec",
    "IndexerSpec",
    "KdaSpec",
    "KvOrder",
    "LayerSpec",
    "LinearAttentionSpec",
    "Mamba1Spec",
    "Mamba2Spec",
    "MatrixOrder",
    "Mixer",
    "MlaSpec",
    "ModelSpec",
    "Reading",
    "Readings",
    "RecurrentSpec",
    "ScaleKind",
    "Scales",
    "ShortConvSpec",
    "build_layout",
    "model_from_hf_config",
]
