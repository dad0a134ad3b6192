"""`Pins` keeps blocks of cached prefixes where they are while others read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from restow.agents.engines.common.groups import NULL_BLOCK, Group
from restow.agents.engines.vllm.prefix.cache_watch import CacheWatch
from restow.agents.engines.vllm.prefix.chain import Chain
from restow.agents.engines.vllm.prefix.holdings import Holdings
from restow.agents.engines.vllm.prefix.match import Holds, match
from restow.agents.engines.vllm.prefix.reply_ends import ReplyEnd

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """Blocks that hold the first ``tokens`` of a chain, which ``hash`` names.

    ``blocks`` are ids by group, as a handoff names them: `NULL_BLOCK` before a window, and of
    states the one block. What vLLM has cached in the step of the pin is complete when that step is.
    """

    tokens: int
    hash: bytes
    blocks: dict[str, list[int]]
    kept: tuple[KVCacheBlock, ...]
    """Those that are kept, in the order of their tokens."""
    give_back: Callable[[Iterable[KVCacheBlock]], None]
    """Who takes the references to them."""


class Pins:
    """The pins of one scheduler. Belongs to its thread.

    ::

        block of a pin        vLLM's references      may be given to another request
        in use by a request   its own, and one       no
        cached, in no use     one                    no: taken out of the queue of free blocks
        let go                its own                the last of those that are free now
    """

    def __init__(
        self, watch: CacheWatch, holdings: Holdings, groups: Sequence[Group], limit_blocks: int
    ) -> None:
        """Pin at most ``limit_blocks``, so that requests find room beside them."""
        self._watch = watch
        self._holdings = holdings
        self._groups = tuple(groups)
        self._limit_blocks = limit_blocks
        self._pinned: Counter[int] = Counter()
        """By block id, in how many pins."""

    @property
    def blocks(self) -> int:
        """How many are pinned now."""
        return len(self._pinned)

    def pin(self, chain: Chain, below_tokens: int, least_tokens: int = 1) -> Pin | None:
        """Pin the largest prefix that is held, ends below a token, and has ``least_tokens``.

        None: no such one is held, or there is no room for that many more pinned blocks.
        """
        self._watch.look()
        found = match(chain, self._groups, self._holds(), below_tokens)
        if found is None or found.tokens < least_tokens:
            return None
        kept, ids = [], {}
        for group in self._groups:
            blocks = [
                None if name is None else self._block(group, name)
                for name in found.blocks[group.name]
            ]
            ids[group.name] = [NULL_BLOCK if one is None else one.block_id for one in blocks]
            kept += [one for one in blocks if one is not None]
        name = chain.at(found.tokens) or b""
        give_back = self._watch.pool.free_blocks
        return self._kept(Pin(found.tokens, name, ids, tuple(kept), give_back))

    def holds(self, chain: Chain, tokens: int) -> bool:
        """Whether the state after just so many tokens is held, as of the last `look`."""
        found = match(chain, self._groups, self._holds(), tokens + 1)
        return found is not None and found.tokens == tokens

    def pin_end(
        self, name: bytes, end: ReplyEnd, give_back: Callable[[Iterable[KVCacheBlock]], None]
    ) -> Pin | None:
        """Pin the end of a reply, which ``give_back`` takes again. None: there is no room."""
        return self._kept(Pin(end.tokens, name, end.blocks, end.kept, give_back))

    def _kept(self, pin: Pin) -> Pin | None:
        more = {one.block_id for one in pin.kept} - self._pinned.keys()
        if len(self._pinned) + len(more) > self._limit_blocks:
            return None
        self._watch.pool.touch(pin.kept)
        self._pinned.update(one.block_id for one in pin.kept)
        return pin

    def let_go(self, pin: Pin) -> None:
        """Give the blocks back, once. The end of a prefix goes before its beginning."""
        for one in pin.kept:
            self._pinned[one.block_id] -= 1
            if not self._pinned[one.block_id]:
                del self._pinned[one.block_id]
        pin.give_back(reversed(pin.kept))

    def _holds(self) -> dict[str, Holds]:
        return {
            group.name: partial(self._has_states, group)
            if group.is_state
            else self._holdings.keys(group.name).__contains__
            for group in self._groups
        }

    def _has_states(self, group: Group, name: bytes) -> bool:
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
        """Whether a request may go on computing in a block that holds a snapshot.

        vLLM names the states of a prompt's end while they stand inside of a block: it moves that
        name to a copy, and writes on where they were, as soon as the request has more to compute.
        States at the end of a block are never written again.
        """
        inside = (block.block_hash_num_tokens or 0) % group.block_tokens != 0
        return inside and block.ref_cnt > self._pinned[block.block_id]
