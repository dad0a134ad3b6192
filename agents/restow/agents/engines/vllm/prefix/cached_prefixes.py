"""`CachedPrefixes` is what a scheduler's prefix cache is to others: told by content, and pinned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from restow.agents.engines.common.groups import Group
from restow.agents.engines.vllm.prefix.cache_watch import CacheWatch
from restow.agents.engines.vllm.prefix.chain import Chain
from restow.agents.engines.vllm.prefix.holdings import Changes, Holdings
from restow.agents.engines.vllm.prefix.pins import Pin, Pins
from restow.agents.engines.vllm.prefix.request_chains import RequestChains
from restow.agents.engines.vllm.scheduler.prompt import Request

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


class CachedPrefixes:
    """Follows requests and the cache of one scheduler. Belongs to its thread."""

    def __init__(
        self, manager: KVCacheManager, groups: Mapping[int, Group], limit_blocks: int
    ) -> None:
        """Follow the cache of ``groups``, by vLLM's numbers; pin at most ``limit_blocks``.

        Raises `EngineUnsupportedError`.
        """
        self.chains = RequestChains(manager.block_pool.hash_block_size)
        self._holdings = Holdings(groups, self.chains.named, self.chains.before)
        self._watch = CacheWatch(manager, self._holdings)
        self._pins = Pins(self._watch, self._holdings, tuple(groups.values()), limit_blocks)

    def new_request(self, request: Request, adapter: str) -> None:
        """Follow a request that came in, its prompt cut already where P's is."""
        self.chains.begin(request, adapter)

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended. What was cached of it stays known."""
        self._watch.look()
        self.chains.end(request_id)

    def chain(self, request_id: str) -> Chain | None:
        """What a request's prompt is asked for by; None: it has no chain."""
        return self.chains.chain(request_id)

    def changes(self) -> Changes:
        """Return what is to be told after a step was scheduled."""
        self._watch.look()
        return self._holdings.changes()

    def count(self) -> dict[str, int]:
        """By group, how many hashes something is held of."""
        self._watch.look()
        return self._holdings.count()

    def pin(self, chain: Chain, below_tokens: int, least_tokens: int = 1) -> Pin | None:
        """Pin the largest prefix of a chain that is held and ends below a token (`Pins.pin`)."""
        return self._pins.pin(chain, below_tokens, least_tokens)

    @property
    def pinned_blocks(self) -> int:
        """How many blocks are pinned now."""
        return self._pins.blocks

    def let_go(self, pin: Pin) -> None:
        """Give a pin's blocks back, once."""
        self._pins.let_go(pin)
