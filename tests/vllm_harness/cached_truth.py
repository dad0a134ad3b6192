"""What vLLM's prefix cache really has, from its blocks and from what requests were computed of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from restow.agents.engines.common.blocks import Group
from vllm_harness.cached_scheduler import WINDOW_TOKENS, CachedScheduler


class CachedTruth:
    """Follows one scheduler."""

    def __init__(
        self, engine: CachedScheduler, groups: Mapping[int, Group], quantum_tokens: int
    ) -> None:
        self.engine, self.groups, self.quantum_tokens = engine, groups, quantum_tokens
        self.names: dict[bytes, bytes] = {}
        """Of vLLM's block hashes: what it was computed from."""
        self.places: dict[bytes, int] = {}
        """Of names: how many tokens those are."""

    def note(self) -> None:
        """Note the names that the hashes of requests under way stand for."""
        for request_id in self.engine.under_way():
            request = self.engine.requests[request_id]
            names = self.engine.names(request)
            size = self.engine.hash_block_tokens
            for index, own in enumerate(request.block_hashes):
                end = (index + 1) * size
                self.names[own], self.places[names[end - 1]] = names[end - 1], end

    def blocks(self) -> dict[str, dict[bytes, list[Any]]]:
        """Return by group and name the blocks that vLLM would find."""
        pool = self.engine.manager.block_pool
        found: dict[str, dict[bytes, list[Any]]] = {one.name: {} for one in self.groups.values()}
        for block in pool.blocks:
            keys = [block.block_hash, *pool.cached_block_hashes_by_block.get(block.block_id, ())]
            for key in filter(None, keys):
                group = self.groups[int.from_bytes(key[-4:], "big")].name
                found[group].setdefault(self.names[key[:-4]], []).append(block)
        return found

    def held(self, names: list[bytes], mine: Counter[int] | None) -> list[int]:
        """Return after how many tokens a state is held, found in the plainest way.

        ``mine`` are blocks that are pinned, and how often. None: states that a request may still
        write to count as well.
        """
        truth, quantum = self.blocks(), self.quantum_tokens
        return [
            tokens
            for tokens in range(quantum, len(names) + 1, quantum)
            if all(self._has(group, names, tokens, truth, mine) for group in self.groups.values())
        ]

    def _has(
        self,
        group: Group,
        names: list[bytes],
        tokens: int,
        truth: dict[str, dict[bytes, list[Any]]],
        mine: Counter[int] | None,
    ) -> bool:
        held, size = truth[group.name], group.block_tokens
        if group.is_state:
            blocks = held.get(names[tokens - 1], [])
            if mine is None or tokens % size == 0:
                return bool(blocks)
            return any(block.ref_cnt == mine[block.block_id] for block in blocks)
        first = max(tokens - WINDOW_TOKENS + 1, 0) // size if group.window_tokens else 0
        ends = (min(start + size, tokens) for start in range(first * size, tokens, size))
        return all(names[end - 1] in held for end in ends)
