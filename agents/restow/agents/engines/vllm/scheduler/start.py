"""Start the connector in vLLM's scheduler: its session, its requests, and its prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from restow.agents.engines.common.adapter_errors import EngineUnsupportedError
from restow.agents.engines.common.blocks import Group
from restow.agents.engines.common.chains import RequestChains
from restow.agents.engines.common.holdings import StatesToKeep
from restow.agents.engines.common.prefix_sharing import PrefixOffers, PrefixSharing
from restow.agents.engines.common.registration import ConnectorSettings, register_engine
from restow.agents.engines.vllm.private import (
    CoreLoop,
    core_of_caller,
    keep_at_marks,
    token_ids,
)
from restow.agents.engines.vllm.scheduler.engine_core import SampledTokens
from restow.agents.engines.vllm.scheduler.moves import MoveOrders
from restow.agents.engines.vllm.scheduler.prefix_cache import CachedPrefixes
from restow.agents.engines.vllm.scheduler.requests import Request
from restow.agents.engines.vllm.scheduler.scheduler_side import SchedulerSide
from restow.agents.engines.vllm.scheduler.weights import Weights, reloaded_revision
from restow.broker.client import BlockingSession, Prefix
from restow.broker.layout import Layout
from restow.broker.logs import get_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

PINNED_SHARE = 4
"""A quarter of an engine's blocks may be pinned for others."""


def start_scheduler_side(
    config: VllmConfig,
    settings: ConnectorSettings,
    layout: Layout,
    caches: KVCacheConfig,
    groups: Sequence[Group],
    manager: KVCacheManager | None,
) -> SchedulerSide:
    """Register an engine with its broker, and return the side that follows its requests.

    ``groups`` are those of ``caches`` that are handed over. Raises `EngineUnsupportedError`,
    `BrokerUnreachableError`, and `BrokerCallError` with the broker's reason.
    """
    if settings.finds and manager is None:
        raise EngineUnsupportedError(
            f"prefix is {settings.prefix}, and this version of vLLM shows connectors no cache "
            "manager (bind_kv_cache_manager)"
        )
    transfer = config.kv_transfer_config
    engine_id, incarnation = transfer.engine_id, config.instance_id
    core = core_of_caller()
    loop, pool = CoreLoop.of(core), None if manager is None else manager.block_pool
    weights = Weights(
        *(layout.model.revision, incarnation, partial(reloaded_revision, config)),
        cache_is_empty=partial(_is_empty, config, pool),
    )
    weights.watch(core)
    if settings.tells and loop is None:
        raise EngineUnsupportedError(
            "prefix: find+tell needs vLLM's engine core in a process of its own "
            "(VLLM_ENABLE_V1_MULTIPROCESSING), where it can be woken for other engines"
        )
    offers = PrefixOffers(loop.wake) if settings.tells and loop is not None else None
    to_keep = StatesToKeep()
    parses = bool(config.structured_outputs_config.reasoning_parser)
    parses |= config.model_config.hf_config.model_type == "gpt_oss"
    moves = MoveOrders((lambda: None) if loop is None else loop.wake, parses)

    def leave() -> list[Prefix]:
        moves.leave()
        return to_keep.newest()

    session = register_engine(
        engine_id,
        incarnation,
        layout,
        settings,
        get_logger("restow.vllm").bind(engine=engine_id),
        publishes=settings.tells or transfer.kv_role in ("kv_producer", "kv_both"),
        asks=settings.finds or transfer.kv_role in ("kv_consumer", "kv_both"),
        on_offer=None if offers is None else offers.hear,
        on_drain=leave,
        on_command=moves.hear,
    )
    prefixes = None
    if settings.finds and manager is not None:
        numbered = dict(zip(caches.transfer_group_ids, groups, strict=True))
        prefixes = _prefixes(engine_id, session, settings, manager, numbered, offers, to_keep)
        if offers is not None and any(group.is_state for group in groups):
            keep_at_marks(core, prefixes.marks)
    return SchedulerSide(
        engine_id,
        incarnation,
        transfer.kv_role,
        groups,
        config.num_prefill_lookahead_tokens,
        session,
        settings,
        prefixes,
        None if manager is None else cached_tokens_of(manager),
        None if loop is None else SampledTokens(loop, config.model_config.get_vocab_size()),
        weights,
        moves,
    )


def _is_empty(config: VllmConfig, pool: BlockPool | None) -> bool:
    """Return whether vLLM keeps nothing that was computed, so that no request begins with it."""
    if not config.cache_config.enable_prefix_caching:
        return True
    if pool is None or len(pool.cached_block_hash_to_block):
        return False
    return bool(pool.get_num_free_blocks() == pool.num_gpu_blocks - 1)  # all but the null block


def cached_tokens_of(manager: KVCacheManager) -> Callable[[Request], int]:
    """Return a function that counts the tokens of a request that all groups have cached."""

    def cached_tokens(request: Request) -> int:
        # vLLM itself looks in this way: at least one token is computed.
        hashes, last = request.block_hashes, len(token_ids(request)) - 1
        _, tokens, _ = manager.coordinator.find_longest_cache_hit(hashes, last)
        return int(tokens)

    return cached_tokens


def _prefixes(
    engine_id: str,
    session: BlockingSession,
    settings: ConnectorSettings,
    manager: KVCacheManager,
    groups: dict[int, Group],
    offers: PrefixOffers | None,
    to_keep: StatesToKeep,
) -> PrefixSharing:
    if offers is None:
        chains = RequestChains(manager.block_pool.hash_block_size)
        return PrefixSharing(engine_id, session, settings, chains, tuple(groups.values()))
    limit_blocks = manager.block_pool.num_gpu_blocks // PINNED_SHARE
    cached = CachedPrefixes(manager, groups, limit_blocks)
    of_cache = cached.chains, tuple(groups.values()), cached
    return PrefixSharing(engine_id, session, settings, *of_cache, offers, to_keep)
