"""The model whose state is handed over, and how much of it fits into an engine."""

from __future__ import annotations

from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Layout

PAGE_TOKENS = 16
HELD_TOKENS, HELD_STATES = 384, 6


def page_counts(page_tokens: int) -> dict[str, int]:
    """Return the pages of each group of an engine whose pages hold ``page_tokens`` tokens."""
    return {"attention": HELD_TOKENS // page_tokens, "state": HELD_STATES}


def layout(tp: int, conv: ConvLayout, page_tokens: int) -> Layout:
    """Return a hybrid layout with 4 KiB a token and states of 1 MiB, over all ranks."""
    mamba = Mamba2Spec(
        layer=0,
        heads=32,
        head_dim=64,
        state=64,
        groups=2,
        conv_kernel=4,
        conv_dtype=DType.BFLOAT16,
        ssm_dtype=DType.FLOAT32,
    )
    attention = AttentionSpec(layer=1, kv_heads=8, head_dim=128, dtype=DType.BFLOAT16)
    spec = ModelSpec("chaotic", (mamba, attention), revision="v1")
    return build_layout(spec, EngineSettings(tp=tp, page_tokens=page_tokens, conv_layout=conv))
