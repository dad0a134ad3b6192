"""`CachedPrefixes` is what a scheduler's prefix cache is to others: told by content, and pinned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from restow.agents.engines.common.groups import BlockLists, Group
from restow.agents.engines.vllm.prefix.cache_watch import CacheWatch
from restow.agents.engines.vllm.prefix.chain import Chain
from restow.agents.engines.vllm.prefix.holdings import Changes, Evicted, Held, Holdings
from restow.agents.engines.vllm.prefix.pins import Pin, Pins
from restow.agents.engines.vllm.prefix.reply_ends import ReplyEnds
from restow.agents.engines.vllm.prefix.request_chains import RequestChains
from restow.agents.engines.vllm.scheduler.prompt import Request
from restow.broker.client import Prefix

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
        self._groups = tuple(groups.values())
        self._pins = Pins(self._watch, self._holdings, self._groups, limit_blocks)
        self._ends = ReplyEnds(manager.block_pool, self._groups)

    def new_request(self, request: Request, adapter: str) -> None:
        """Follow a request that came in, its prompt cut already where P's is."""
        self.chains.begin(request, adapter)

    def forget(self) -> None:
        """Hold nothing of all that is cached now: what comes from now on is told again."""
        self._watch.look()
        self._holdings.cleared()
        self._ends.forget()

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended. What was cached of it stays known."""
        self._watch.look()
        self.chains.end(request_id)

    def chain(self, request_id: str) -> Chain | None:
        """What a request's prompt is asked for by; None: it has no chain."""
        return self.chains.chain(request_id)

    def replied(self, name: bytes, tokens: int, blocks: BlockLists) -> bool:
        """Keep where a reply ended, before vLLM frees its blocks (`ReplyEnds.note`)."""
        return self._ends.note(name, tokens, blocks)

    @property
    def pending(self) -> bool:
        """Whether a step has something to do here."""
        return self._ends.pending

    def changes(self) -> Changes:
        """Return what is to be told after a step was scheduled."""
        self._watch.look()
        self._ends.settle()
        changes, ends = self._holdings.changes(), self._ends
        gone, ends.gone, come, ends.come = ends.gone, {}, ends.come, {}
        evicted = [
            Evicted(one.group, tuple(name for name in one.hashes if ends.get(name) is None))
            for one in changes.evicted
        ] + [
            Evicted(group.name, (name,))
            for group in self._groups
            for name in gone
            if name not in self._holdings.keys(group.name)
        ]
        held = [Held(group.name, (name,)) for group in self._groups for name in come]
        return Changes(tuple(evicted), (*changes.held, *held))

    def forget_ends(self) -> None:
        """Forget the ends of replies, which vLLM does not know when it resets its cache."""
        self._ends.forget()

    def holds(self, prefix: Prefix) -> bool:
        """Whether all of a state is held, as of the last `changes`."""
        chain = Chain(prefix.form.quantum_tokens, prefix.hashes)
        end = self._ends.get(prefix.end_hash or prefix.hashes[-1])
        return end is not None or self._pins.holds(chain, prefix.position_tokens)

    def count(self) -> dict[str, int]:
        """By group, how many hashes something is held of."""
        self._watch.look()
        return self._holdings.count()

    def pin(self, chain: Chain, below_tokens: int) -> Pin | None:
        """Pin the largest prefix of a chain that is held and ends below a token (`Pins.pin`)."""
        return self._pins.pin(chain, below_tokens)

    def pin_state(self, chain: Chain, tokens: int, name: bytes) -> Pin | None:
        """Pin the state after just so many ``tokens``, of that name. None: as `Pins.pin`."""
        found = self._pins.pin(chain, tokens + 1, tokens)
        end = None if found else self._ends.get(name)
        if end is not None and end.tokens == tokens:
            found = self._pins.pin_end(name, end, self._ends.give_back)
        return found

    @property
    def pinned_blocks(self) -> int:
        """How many blocks are pinned now."""
        return self._pins.blocks

    def let_go(self, pin: Pin) -> None:
        """Give a pin's blocks back, once."""
        self._pins.let_go(pin)
