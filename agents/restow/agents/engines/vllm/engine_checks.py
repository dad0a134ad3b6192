"""What the connector refuses at start: engines whose caches hold more than a layout says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    iter_layer_specs,
)

from restow.agents.engines.vllm.errors import EngineUnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_engine(config: VllmConfig) -> None:
    """Refuse tokens that are cut over ranks. Raises `EngineUnsupportedError`."""
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise EngineUnsupportedError(
                f"{name} is {getattr(parallel, name)}: context parallelism is not handed over yet"
            )


def check_groups(config: KVCacheConfig) -> None:
    """Refuse caches in host memory, and of other than a prompt's tokens and states.

    Raises `EngineUnsupportedError`.
    """
    for group in config.kv_cache_groups:
        if group.host_resident:
            raise EngineUnsupportedError(f"caches in host memory ({group.layer_names[0]}, ...)")
        for spec in iter_layer_specs(group.kv_cache_spec):
            encoder = isinstance(spec, CrossAttentionSpec | EncoderOnlyAttentionSpec)
            if encoder or not isinstance(spec, AttentionSpec | MambaSpec):
                raise EngineUnsupportedError(f"caches of kind {type(spec).__name__}")


def check_windows(config: VllmConfig, caches: KVCacheConfig) -> None:
    """Refuse a D that would take a block for a prefix of which a handoff fills the end alone.

    A window begins in the middle of its first block, and vLLM caches every block that is full.
    Raises `EngineUnsupportedError`.
    """
    asks = config.kv_transfer_config.is_kv_consumer and config.cache_config.enable_prefix_caching
    has_windows = any(
        getattr(spec, "sliding_window", None)
        for group in caches.kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
    )
    if asks and has_windows:
        raise EngineUnsupportedError(
            "a model with sliding windows and prefix caching: the first block of a window is "
            "handed over in part, and would be found as a whole: start D with "
            "--no-enable-prefix-caching"
        )
