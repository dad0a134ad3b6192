"""vLLM's prefix cache as other engines see it: named by content, and pinned while they read it.

`CacheWatch` sees which keys come and go. `ReplyEnds` remembers the states after replies, which vLLM
itself never finds again. `CachedPrefixes` joins them, and keeps blocks in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from restow.agents.engines.common.adapter_errors import EngineUnsupportedError
from restow.agents.engines.common.blocks import NULL_BLOCK, BlockLists, Group
from restow.agents.engines.common.chains import PromptChain, RequestChains, state_blocks
from restow.agents.engines.common.holdings import (
    CacheChanges,
    CacheHoldings,
    EvictedBlocks,
    HeldBlocks,
)
from restow.agents.engines.vllm.private import watch_keys
from restow.broker.client import Prefix

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class CacheWatch:
    """Keeps `CacheHoldings` true to the cache of one scheduler, in the scheduler's thread.

    It watches vLLM's map from keys to blocks (`watch_keys` says why).
    """

    def __init__(self, manager: KVCacheManager, holdings: CacheHoldings) -> None:
        """Begin to watch. Raises `EngineUnsupportedError` for groups that share no block pool."""
        pools = {
            id(group_manager.block_pool)
            for group_manager in manager.coordinator.single_type_managers
        }
        if pools != {id(manager.block_pool)}:
            raise EngineUnsupportedError(
                "groups of layers with block pools of their own are not supported"
            )
        self.pool = manager.block_pool
        self._holdings = holdings
        self._map = self.pool.cached_block_hash_to_block
        self._touched = watch_keys(self._map)

    def look(self) -> None:
        """Update the holdings: once in a step, and before they are asked."""
        if self.pool.cached_block_hash_to_block is not self._map:
            # vLLM has reset its cache, and begun with a new map.
            self._holdings.cleared()
            self._map = self.pool.cached_block_hash_to_block
            self._touched = watch_keys(self._map)
        if self._touched:
            self._holdings.changed(self._touched, self._is_cached)
            self._touched.clear()

    def _is_cached(self, key: bytes) -> bool:
        return self._map.get_one_block(key) is not None


@dataclass(frozen=True, slots=True, eq=False)
class ReplyEnd:
    """A state after ``tokens``, in ``blocks`` as a handoff names them."""

    tokens: int
    blocks: dict[str, list[int]]
    kept: tuple[KVCacheBlock, ...]
    """The blocks that hold the state, in the order of their tokens; states are the last."""


class ReplyEnds:
    """The states after the replies of a recurrent model. Belongs to the scheduler's thread.

    A request that has ended leaves its running states in a block that vLLM never finds again. The
    next turn of a conversation begins with the same tokens, so these states are worth keeping while
    nobody needs the room.

    ::

        the request has ended     its blocks are referenced here, until vLLM has let go of them
        then                      they are free blocks, the last to be given to another request
        a block is given          vLLM reports it (`unpin_blocks`), and the end is forgotten
    """

    def __init__(self, pool: BlockPool, groups: Sequence[Group]) -> None:
        """Begin with no ends."""
        self._pool = pool
        self._groups = tuple(groups)
        self._ends: dict[bytes, ReplyEnd] = {}
        self._by_block: dict[int, set[bytes]] = {}
        self._new: list[ReplyEnd] = []
        """Ends whose blocks vLLM has not let go yet."""
        self._come: dict[bytes, None] = {}
        self._gone: dict[bytes, None] = {}

    @property
    def pending(self) -> bool:
        """Whether a step has something to do here."""
        return bool(self._new)

    def get(self, name: bytes) -> ReplyEnd | None:
        """Return the state after exactly the tokens of a name; None: it is not known, or gone."""
        return self._ends.get(name)

    def take_changes(self) -> tuple[Iterable[bytes], Iterable[bytes]]:
        """Return the names that are gone and those that have come since the last call."""
        gone, self._gone = self._gone, {}
        come, self._come = self._come, {}
        return gone, come

    def note(self, name: bytes, tokens: int, blocks: BlockLists) -> bool:
        """Note a request that ends with its state after ``tokens``; return whether it is kept.

        vLLM has not freed its blocks yet. The state is not kept if a state of these tokens is known
        already, or a block is missing. With drafts it is unknown where the states stand.
        """
        if name in self._ends or any(group.scratch_blocks for group in self._groups):
            return False
        named: dict[str, list[int]] = {}
        kept: list[int] = []
        for group in sorted(self._groups, key=lambda group: group.is_state):
            ids, size = blocks[group.name], group.block_tokens
            if not group.is_state:
                first, stop = group.first_token(tokens) // size, (tokens - 1) // size + 1
                needed = list(ids[first:stop])
                if len(needed) < stop - first or NULL_BLOCK in needed:
                    return False
                ids = [NULL_BLOCK] * first + needed
            named[group.name] = list(ids)
            kept += [block_id for block_id in ids if block_id != NULL_BLOCK]
        end = ReplyEnd(tokens, named, tuple(self._pool.blocks[block_id] for block_id in kept))
        self._pool.touch(end.kept)
        self._ends[name] = end
        for block_id in kept:
            self._by_block.setdefault(block_id, set()).add(name)
        self._new.append(end)
        self._turn(name, self._gone, self._come)
        return True

    def forget(self) -> None:
        """Forget all ends, whose names no longer say what they were computed from.

        Their blocks are given back as ever.
        """
        for name in self._ends:
            self._turn(name, self._come, self._gone)
        self._ends.clear()
        self._by_block.clear()

    def settle(self) -> None:
        """Let go of ends whose blocks vLLM has let go: no request uses their states."""
        left = []
        for end in self._new:
            if end.kept[-1].ref_cnt > 1:
                left.append(end)
            else:
                self.give_back(reversed(end.kept))
        self._new = left

    def give_back(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Give references back, in the order of reuse. The ends in the blocks stay known."""
        self._pool.unpin_blocks(blocks, self._reused)

    def _reused(self, block: KVCacheBlock) -> None:
        for name in self._by_block.get(block.block_id, set()).copy():
            for kept in self._ends.pop(name).kept:
                names = self._by_block[kept.block_id]
                names.discard(name)
                if not names:
                    del self._by_block[kept.block_id]
            self._turn(name, self._come, self._gone)

    @staticmethod
    def _turn(name: bytes, was: dict[bytes, None], now: dict[bytes, None]) -> None:
        if name in was:
            del was[name]
        else:
            now[name] = None


Names = dict[str, list[bytes | None]]
"""The hashes of a state's blocks by group (`state_blocks`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """Blocks that hold a state.

    ``blocks`` are ids by group, as a handoff names them: `NULL_BLOCK` before a window, and one
    block of states. Blocks that vLLM caches in the step of the pin are complete when it is over.
    """

    blocks: dict[str, list[int]]
    kept: tuple[KVCacheBlock, ...]
    """The blocks that are kept, in the order of their tokens."""
    give_back: Callable[[Iterable[KVCacheBlock]], None]
    """Takes the references to the blocks."""


class CachedPrefixes:
    """The prefix cache of one scheduler, as `PrefixCache` wants it. Belongs to its thread.

    ::

        block of a pin         vLLM's references      may be given to another request
        used by a request      its own, and the pin's no
        cached, not used       the pin's              no: taken out of the queue of free blocks
        let go                 its own                after all blocks that are free now
    """

    def __init__(
        self, manager: KVCacheManager, groups: Mapping[int, Group], limit_blocks: int
    ) -> None:
        """Follow the cache of ``groups``, by vLLM's numbers; pin at most ``limit_blocks``.

        So requests find room beside the pins; one state alone may have more. Raises
        `EngineUnsupportedError`.
        """
        self.chains = RequestChains(manager.block_pool.hash_block_size)
        self._holdings = CacheHoldings(groups, self.chains.named, self.chains.before)
        self._watch = CacheWatch(manager, self._holdings)
        self._groups = tuple(groups.values())
        self._limit_blocks = limit_blocks
        self._pinned: Counter[int] = Counter()
        """By block id: the number of pins."""
        self._ends = ReplyEnds(manager.block_pool, self._groups)

    def forget(self) -> None:
        """Forget everything that is cached now; blocks that come later are reported again."""
        self._watch.look()
        self._holdings.cleared()
        self._ends.forget()

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended. What was cached of it stays known."""
        self._watch.look()
        self.chains.end(request_id)

    def replied(self, name: bytes, tokens: int, blocks: BlockLists) -> bool:
        """Keep the state after a reply, before vLLM frees its blocks (`ReplyEnds.note`)."""
        return self._ends.note(name, tokens, blocks)

    @property
    def pending(self) -> bool:
        """Whether a step has something to do here."""
        return self._ends.pending

    def changes(self) -> CacheChanges:
        """Return what came and went, after a step was scheduled."""
        self._watch.look()
        self._ends.settle()
        changes = self._holdings.changes()
        gone, come = self._ends.take_changes()
        evicted = [
            EvictedBlocks(
                blocks.group, tuple(name for name in blocks.hashes if self._ends.get(name) is None)
            )
            for blocks in changes.evicted
        ] + [
            EvictedBlocks(group.name, (name,))
            for group in self._groups
            for name in gone
            if name not in self._holdings.keys(group.name)
        ]
        held = [HeldBlocks(group.name, (name,)) for group in self._groups for name in come]
        return CacheChanges(tuple(evicted), (*changes.held, *held))

    def forget_ends(self) -> None:
        """Forget the ends of replies, which vLLM does not know when it resets its cache."""
        self._ends.forget()

    def holds(self, prefix: Prefix) -> bool:
        """Return whether all of a state is held, as of the last `changes`."""
        return self._names(prefix) is not None or self._end(prefix) is not None

    def pin_state(self, prefix: Prefix) -> Pin | None:
        """Pin a state; None: it is not held, or it would pin too many blocks."""
        self._watch.look()
        names, end = self._names(prefix), self._end(prefix)
        pin = None if names is None else self._kept(self._pin(names))
        if pin is None and end is not None:
            pin = self._kept(Pin(end.blocks, end.kept, self._ends.give_back))
        return pin

    @property
    def pinned_blocks(self) -> int:
        """The number of blocks that are pinned now."""
        return len(self._pinned)

    def let_go(self, pin: Pin) -> None:
        """Give a pin's blocks back, once. The end of a prefix goes before its beginning."""
        for block in pin.kept:
            self._pinned[block.block_id] -= 1
            if not self._pinned[block.block_id]:
                del self._pinned[block.block_id]
        pin.give_back(reversed(pin.kept))

    def _names(self, prefix: Prefix) -> Names | None:
        """Return the hashes of a prefix's blocks in vLLM's cache; None: some are not held."""
        chain = PromptChain(prefix.form.quantum_tokens, prefix.hashes)
        if chain.tokens != prefix.position_tokens:
            return None
        holds = {group.name: partial(self._has, group) for group in self._groups}
        return state_blocks(chain, self._groups, holds)

    def _end(self, prefix: Prefix) -> ReplyEnd | None:
        """Return the end of a reply that is the state of a prefix; None: none is known."""
        end = self._ends.get(prefix.end_hash or b"".join(prefix.hashes[-1:]))
        return end if end is not None and end.tokens == prefix.position_tokens else None

    def _pin(self, names: Names) -> Pin:
        kept, ids = [], {}
        for group in self._groups:
            blocks = [
                None if name is None else self._block(group, name) for name in names[group.name]
            ]
            ids[group.name] = [NULL_BLOCK if block is None else block.block_id for block in blocks]
            kept += [block for block in blocks if block is not None]
        return Pin(ids, tuple(kept), self._watch.pool.free_blocks)

    def _kept(self, pin: Pin) -> Pin | None:
        """Keep a pin's blocks; None: too many would be pinned. A long state is pinned alone."""
        more = {block.block_id for block in pin.kept} - self._pinned.keys()
        if self._pinned and len(self._pinned) + len(more) > self._limit_blocks:
            return None
        self._watch.pool.touch(pin.kept)
        self._pinned.update(block.block_id for block in pin.kept)
        return pin

    def _has(self, group: Group, name: bytes) -> bool:
        if not group.is_state:
            return name in self._holdings.keys(group.name)
        return self._block(group, name) is not None

    def _block(self, group: Group, name: bytes) -> KVCacheBlock | None:
        for key in self._holdings.keys(group.name).get(name, ()):
            block: KVCacheBlock | None = self._watch.pool.cached_block_hash_to_block.get_one_block(
                key
            )
            if block is not None and not (group.is_state and self._runs_on(group, block)):
                return block
        return None

    def _runs_on(self, group: Group, block: KVCacheBlock) -> bool:
        """Return whether a request may go on computing in a block that holds a snapshot.

        vLLM names the states at a prompt's end while they stand inside of a block. As soon as the
        request has more to compute, vLLM moves that name to a copy and goes on writing to the
        block. States at the end of a block are never written again.
        """
        inside = (block.block_hash_num_tokens or 0) % group.block_tokens != 0
        return inside and block.ref_cnt > self._pinned[block.block_id]
