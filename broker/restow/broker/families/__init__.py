"""Build layouts from a model's numbers and an engine's settings."""

from restow.broker.families.build import build_layout
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
    "RecurrentSpec",
    "ScaleKind",
    "Scales",
    "ShortConvSpec",
    "build_layout",
]
