"""`CachedPrefixes` is what a scheduler's prefix cache is to others: told by content, and pinned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from restow.agents.engines.common.groups import Group
from restow.agents.engines.vllm.prefix.cache_watch import CacheWatch
from restow.agents.engines.vllm.prefix.chain import Chain
from restow.agents.engines.vllm.prefix.holdings import MAX_BATCH_HASHES, Holdings
from restow.agents.engines.vllm.prefix.pins import Pin, Pins
from restow.agents.engines.vllm.prefix.request_chains import HashedRequest, RequestChains
from restow.agents.engines.vllm.prefix.told import HoldingsBatch

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
        self._chains = RequestChains(manager.block_pool.hash_block_size)
        self._holdings = Holdings(groups, self._chains.named, self._chains.before)
        self._watch = CacheWatch(manager, self._holdings)
        self._pins = Pins(self._watch, self._holdings, tuple(groups.values()), limit_blocks)

    @property
    def quantum_tokens(self) -> int:
        """After how many tokens each a chain has a hash."""
        return self._chains.quantum_tokens

    def new_request(self, request: HashedRequest, adapter: str) -> None:
        """Follow a request that came in, its prompt cut already where P's is."""
        self._chains.begin(request, adapter)

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended. What was cached of it stays known."""
        self._watch.look()
        self._chains.end(request_id)

    def chain(self, request_id: str) -> Chain | None:
        """What a request's prompt is asked for by; None: it has no chain."""
        return self._chains.chain(request_id)

    def batch(self, most_hashes: int = MAX_BATCH_HASHES) -> HoldingsBatch | None:
        """Return what is to be told after a step was scheduled; None: nothing."""
        self._watch.look()
        return self._holdings.batch(most_hashes)

    def tell_again(self) -> None:
        """Begin anew with batch 1: a broker has lost what it was told."""
        self._holdings.tell_again()

    def count(self) -> dict[str, int]:
        """By group, how many hashes something is held of."""
        self._watch.look()
        return self._holdings.count()

    def pin(self, chain: Chain, below_tokens: int) -> Pin | None:
        """Pin the largest prefix of a chain that is held and ends below a token (`Pins.pin`)."""
        return self._pins.pin(chain, below_tokens)

    def let_go(self, pin: Pin) -> None:
        """Give a pin's blocks back, once."""
        self._pins.let_go(pin)
