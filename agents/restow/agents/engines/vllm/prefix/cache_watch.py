"""`CacheWatch` sees which keys of vLLM's prefix cache come and go.

vLLM tells that as KV cache events too, where an operator has switched these on: but the scheduler
takes them away, an event stands for one block and not for the last one of its hash, carries all
tokens, and none says that a block has moved. So what is watched is the map itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.block_pool import BlockHashToBlockMap

from restow.agents.engines.vllm.errors import EngineUnsupportedError
from restow.agents.engines.vllm.prefix.holdings import Holdings

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


class WatchedMap(BlockHashToBlockMap):  # type: ignore[misc]
    """vLLM's map from keys to blocks, which notes the keys that were touched."""

    def __init__(self, was: BlockHashToBlockMap) -> None:
        """Take the place of ``was``, all keys of which count as touched."""
        super().__init__()
        self._cache = was._cache
        self.touched: dict[bytes, None] = dict.fromkeys(was._cache)

    def insert(self, key: Any, block: Any) -> None:
        """Insert a block."""
        self.touched[key] = None
        super().insert(key, block)

    def pop(self, key: Any, block_id: int) -> Any:
        """Take a block out."""
        self.touched[key] = None
        return super().pop(key, block_id)


class CacheWatch:
    """Keeps `Holdings` true to the cache of one scheduler. Belongs to the scheduler's thread."""

    def __init__(self, manager: KVCacheManager, holdings: Holdings) -> None:
        """Begin to watch. Raises `EngineUnsupportedError` for groups that share no block pool."""
        pools = {id(one.block_pool) for one in manager.coordinator.single_type_managers}
        if pools != {id(manager.block_pool)}:
            raise EngineUnsupportedError("groups of layers with block pools of their own")
        self.pool = manager.block_pool
        self._holdings = holdings
        self._map = self._replaced()

    def look(self) -> None:
        """Have the holdings say what is cached now: once in a step, and before they are asked."""
        if self.pool.cached_block_hash_to_block is not self._map:
            # vLLM has reset its cache, and begun with a new map.
            self._holdings.cleared()
            self._map = self._replaced()
        if self._map.touched:
            touched, self._map.touched = self._map.touched, {}
            self._holdings.changed(touched, self._is_cached)

    def _replaced(self) -> WatchedMap:
        watched = WatchedMap(self.pool.cached_block_hash_to_block)
        self.pool.cached_block_hash_to_block = watched
        return watched

    def _is_cached(self, key: bytes) -> bool:
        return self._map.get_one_block(key) is not None
