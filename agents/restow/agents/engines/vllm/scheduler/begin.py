"""An engine's part of the scheduler begins here: its session, its requests, and its prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from restow.agents.engines.common.groups import Group
from restow.agents.engines.vllm.errors import EngineUnsupportedError
from restow.agents.engines.vllm.model_revision import reloaded_revision
from restow.agents.engines.vllm.prefix.answering import Offers
from restow.agents.engines.vllm.prefix.cached_prefixes import CachedPrefixes
from restow.agents.engines.vllm.prefix.prefix_side import PrefixSide
from restow.agents.engines.vllm.prefix.request_chains import RequestChains
from restow.agents.engines.vllm.prefix.worth_keeping import WorthKeeping
from restow.agents.engines.vllm.scheduler.broker_session import registered
from restow.agents.engines.vllm.scheduler.core_loop import CoreLoop
from restow.agents.engines.vllm.scheduler.prompt import Request
from restow.agents.engines.vllm.scheduler.sampled_tokens import SampledTokens
from restow.agents.engines.vllm.scheduler.scheduler_side import SchedulerSide
from restow.agents.engines.vllm.scheduler.weights import Weights, core_of_caller
from restow.agents.engines.vllm.settings import ConnectorSettings
from restow.broker.client import BlockingSession
from restow.broker.layout import Layout
from restow.broker.logs import get_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

PINNED_SHARE = 4
"""One of so many of an engine's blocks may be pinned for others."""


def begun(
    config: VllmConfig,
    settings: ConnectorSettings,
    layout: Layout,
    caches: KVCacheConfig,
    groups: Sequence[Group],
    manager: KVCacheManager | None,
) -> SchedulerSide:
    """Register an engine with its broker, and return who follows its requests.

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
    core, pool = CoreLoop.of_caller(), None if manager is None else manager.block_pool
    weights = Weights(
        *(layout.model.revision, incarnation, partial(reloaded_revision, config)),
        cache_is_empty=partial(_is_empty, config, pool),
    )
    weights.watch(core_of_caller())
    if settings.tells and core is None:
        raise EngineUnsupportedError(
            "prefix: find+tell needs vLLM's engine core in a process of its own "
            "(VLLM_ENABLE_V1_MULTIPROCESSING), where it can be woken for others"
        )
    offers = Offers(core.wake) if settings.tells and core is not None else None
    worth = WorthKeeping()
    session = registered(
        engine_id,
        incarnation,
        layout,
        transfer.kv_role,
        settings,
        get_logger("restow.vllm").bind(engine=engine_id),
        None if offers is None else offers.hear,
        worth.newest,
    )
    prefix = None
    if settings.finds and manager is not None:
        numbered = dict(zip(caches.transfer_group_ids, groups, strict=True))
        prefix = _prefix_side(engine_id, session, settings, manager, numbered, offers, worth)
    return SchedulerSide(
        engine_id,
        incarnation,
        transfer.kv_role,
        groups,
        config.num_prefill_lookahead_tokens,
        session,
        settings,
        prefix,
        None if manager is None else cached_tokens_of(manager),
        None if core is None else SampledTokens(core, config.model_config.get_vocab_size()),
        weights,
    )


def _is_empty(config: VllmConfig, pool: BlockPool | None) -> bool:
    """Return whether nothing is left of what was computed: no request could begin with it."""
    if not config.cache_config.enable_prefix_caching:
        return True
    if pool is None or len(pool.cached_block_hash_to_block):
        return False
    return bool(pool.get_num_free_blocks() == pool.num_gpu_blocks - 1)  # but the null block


def cached_tokens_of(manager: KVCacheManager) -> Callable[[Request], int]:
    """Return what tells how much of a request is cached, of all groups of layers alike."""

    def cached_tokens(request: Request) -> int:
        # As vLLM looks itself: one token at least is computed.
        hashes, last = request.block_hashes, len(request._all_token_ids) - 1
        _, tokens, _ = manager.coordinator.find_longest_cache_hit(hashes, last)
        return int(tokens)

    return cached_tokens


def _prefix_side(
    engine_id: str,
    session: BlockingSession,
    settings: ConnectorSettings,
    manager: KVCacheManager,
    groups: dict[int, Group],
    offers: Offers | None,
    worth: WorthKeeping,
) -> PrefixSide:
    if offers is None:
        chains = RequestChains(manager.block_pool.hash_block_size)
        return PrefixSide(engine_id, session, settings, chains, tuple(groups.values()))
    limit_blocks = manager.block_pool.num_gpu_blocks // PINNED_SHARE
    cached = CachedPrefixes(manager, groups, limit_blocks)
    of_cache = cached.chains, tuple(groups.values()), cached
    return PrefixSide(engine_id, session, settings, *of_cache, offers, worth)
