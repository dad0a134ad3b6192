"""Refuse engines at their start whose caches cannot be handed over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from restow.agents.engines.common.adapter_errors import EngineUnsupportedError
from restow.agents.engines.common.registration import ConnectorSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_OTHER = (CrossAttentionSpec, EncoderOnlyAttentionSpec, SlidingWindowMLASpec)


def keeps_blocks(config: VllmConfig) -> bool:
    """Return whether blocks of arriving states may serve other prompts that begin alike."""
    transfer = config.kv_transfer_config
    settings = ConnectorSettings.of(transfer.kv_connector_extra_config)
    takes_states: bool = transfer.is_kv_consumer or settings.finds
    return takes_states and bool(config.cache_config.enable_prefix_caching)


def check_prefix(config: VllmConfig, settings: ConnectorSettings) -> None:
    """Refuse to find prefixes where a miss is an error, and to offer them where none are cached.

    Raises `EngineUnsupportedError`.
    """
    if settings.finds and config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise EngineUnsupportedError(
            f"prefix is {settings.prefix}, and kv_load_failure_policy is not recompute: another "
            "engine's prefix may be gone when it is asked for, and the request would fail"
        )
    if settings.tells and not config.cache_config.enable_prefix_caching:
        raise EngineUnsupportedError(
            f"prefix is {settings.prefix}, and prefix caching is off: start with "
            "--enable-prefix-caching, or with prefix: find"
        )


def check_engine(config: VllmConfig) -> None:
    """Refuse context parallelism, memory that may be given back, and images without features.

    Raises `EngineUnsupportedError`.
    """
    model = config.model_config
    if model.enable_sleep_mode:
        raise EngineUnsupportedError(
            "enable_sleep_mode: an engine that sleeps gives its caches' memory back while other "
            "engines may still read it: start without --enable-sleep-mode"
        )
    if model.enable_cumem_allocator and not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        raise EngineUnsupportedError(
            "enable_cumem_allocator: this version of vLLM may then give its caches' memory back "
            "(release_kv_cache_memory) without telling the connector: start without "
            "--enable-cumem-allocator, or take vLLM 0.33"
        )
    images = model.multimodal_config
    if images is not None and images.mm_processor_cache_type == "shm":
        raise EngineUnsupportedError(
            "mm_processor_cache_type is shm: the engine core then has no features of images, by "
            "which states are compared: start with --mm-processor-cache-type lru"
        )
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise EngineUnsupportedError(
                f"{name} is {getattr(parallel, name)}: context parallelism is not handed over yet"
            )


def check_groups(config: KVCacheConfig) -> None:
    """Refuse caches in host memory, and caches that hold neither tokens nor states of a prompt.

    Raises `EngineUnsupportedError`.
    """
    for group in config.kv_cache_groups:
        if group.host_resident:
            raise EngineUnsupportedError(
                f"caches in host memory are not handed over ({group.layer_names[0]}, ...)"
            )
        for spec in iter_layer_specs(group.kv_cache_spec):
            if isinstance(spec, ChunkedLocalAttentionSpec):
                raise EngineUnsupportedError(
                    "attention in chunks, of which vLLM keeps only the last chunk: start with "
                    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=0 to keep all tokens"
                )
            if isinstance(spec, _OTHER) or not isinstance(spec, AttentionSpec | MambaSpec):
                raise EngineUnsupportedError(
                    f"caches of kind {type(spec).__name__} are not handed over"
                )


def has_windows(caches: KVCacheConfig) -> bool:
    """Return whether any layer keeps only a window."""
    return any(
        isinstance(spec, SlidingWindowSpec)
        for group in caches.kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
    )


def check_windows(config: VllmConfig, caches: KVCacheConfig) -> None:
    """Refuse a D that keeps blocks before its windows as prefixes, since no handoff fills them.

    Raises `EngineUnsupportedError`.
    """
    if not keeps_blocks(config):
        return
    for group in caches.kv_cache_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            window = getattr(spec, "sliding_window", None)
            freed = isinstance(spec, SlidingWindowSpec) and not spec.extra_retained_tokens
            if window and not freed:
                raise EngineUnsupportedError(
                    "prefix caching, and sliding windows whose caches keep tokens before them: a "
                    "handoff leaves these tokens out, and other prompts would find them: start D "
                    "without --disable-hybrid-kv-cache-manager and drafts of several MTP layers, "
                    "or with --no-enable-prefix-caching"
                )
