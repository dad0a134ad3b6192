"""Families: from a model's numbers and an engine's settings to a layout."""

from restow.broker.families.build import build_layout
from restow.broker.families.hf_config import model_from_hf_config
from restow.broker.families.settings import ConvLayout, EngineSettings, KvOrder
from restow.broker.families.specs import AttentionSpec, Mamba2Spec, ModelSpec

__all__ = [
    "AttentionSpec",
    "ConvLayout",
    "EngineSettings",
    "KvOrder",
    "Mamba2Spec",
    "ModelSpec",
    "build_layout",
    "model_from_hf_config",
]
