"""Context parallelism: which tokens of keys and values a rank keeps, as vLLM cuts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from restow.broker.errors import LayoutFormError, TpSizeError
from restow.broker.families.recurrent import RecurrentSpec
from restow.broker.families.settings import EngineSettings
from restow.broker.families.specs import AttentionSpec, LayerSpec
from restow.broker.layout import Region


def check_context(layer: LayerSpec, settings: EngineSettings) -> None:
    """Refuse layers that vLLM refuses to share out (`KVCacheCoordinator`, `ModelConfig`).

    Raises `LayoutFormError` and `TpSizeError`.
    """
    window = isinstance(layer, AttentionSpec) and layer.window_tokens
    if settings.pcp > 1 and (window or isinstance(layer, RecurrentSpec)):
        raise LayoutFormError(
            f"pcp is {settings.pcp}: prefill context parallelism is for attention to all tokens, "
            f"and layer {layer.layer} has a {'window' if window else 'recurrent state'}"
        )
    if settings.dcp == 1 or isinstance(layer, RecurrentSpec):
        return
    if window:
        raise LayoutFormError(
            f"dcp is {settings.dcp}: layer {layer.layer} has a window, whose tokens no engine "
            f"shares out"
        )
    if isinstance(layer, AttentionSpec) and settings.dcp > settings.tp // layer.kv_heads:
        raise TpSizeError(
            f"dcp is {settings.dcp}: ranks share out the tokens of a head that they would all "
            f"hold, and of {layer.kv_heads} heads over TP {settings.tp} each is on "
            f"{settings.tp // layer.kv_heads or 1}",
            axis="token",
            ranks=settings.tp,
        )


def with_tokens(
    regions: Sequence[Region], settings: EngineSettings, stage_rank: int
) -> tuple[Region, ...]:
    """The regions of keys and values on a rank of a stage, with the tokens that it keeps."""
    return tuple(
        replace(
            region,
            context_parts=settings.dcp,
            context_part=settings.context_part(stage_rank),
            interleave_tokens=settings.interleave_tokens,
        )
        for region in regions
    )
