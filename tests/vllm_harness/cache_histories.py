"""Random histories of vLLM's own scheduler: what is told of its cache is there, and pins stay.

``cache_histories.py GROUPS,... SEED HISTORIES FAULT``, run by vLLM's Python, says as JSON how much
it saw.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter, deque

from restow.agents.engines.common.blocks import NULL_BLOCK, Group
from restow.agents.engines.common.chains import PromptChain
from restow.agents.engines.vllm.scheduler.prefix_cache import (
    CachedPrefixes,
    CacheWatch,
    Pin,
    Pins,
    WatchedMap,
)
from restow.agents.engines.vllm.scheduler.requests import followed_prompt
from restow.broker.client import ContentChain
from vllm_harness.cached_scheduler import WINDOW_TOKENS, CachedScheduler, Step
from vllm_harness.cached_truth import CachedTruth

GROUPS: dict[str, tuple[list[tuple[str, int]], int | None]] = {
    "attention": ([("full", 16)], None),
    "windows": ([("full", 16), ("window", 16)], None),
    "small windows": ([("full", 32), ("window", 16)], None),
    "states": ([("full", 32), ("states", 32)], None),
    "states inside of blocks": ([("full", 32), ("states", 32)], 8),
    "large states": ([("full", 16), ("states", 48)], None),
    "all": ([("full", 16), ("window", 16), ("states", 16)], None),
}
"""Kinds and block sizes, and after how many tokens vLLM hashes, if it is told."""
BLOCKS, PINNED_BLOCKS, STEPS, REQUESTS = 64, 24, 120, 5


def main(names: str, seed: int, histories: int, fault: str) -> None:
    """Play histories; fail at the first step after which what is told or pinned is not true."""
    _break(fault)
    seen: Counter[str] = Counter()
    for name in names.split(","):
        for one in range(histories):
            seen += History(name, seed + one).run()
    print(json.dumps(seen))


def _break(fault: str) -> None:
    """Remove a part of Restow that must be there, for the fault of that name."""
    if fault == "removals":
        del WatchedMap.pop
    elif fault == "resets":
        CacheWatch.look = _look_without_resets  # type: ignore[method-assign]
    elif fault == "running states":
        Pins._runs_on = lambda self, group, block: False  # type: ignore[method-assign]
    elif fault == "references":
        CachedPrefixes.pin = _pin_without_references  # type: ignore[method-assign]


def _look_without_resets(self: CacheWatch) -> None:
    touched, self._map.touched = self._map.touched, {}
    self._holdings.changed(touched, self._is_cached)


def _pin_without_references(
    self: CachedPrefixes, chain: PromptChain, below_tokens: int, least_tokens: int = 1
) -> Pin | None:
    pool = self._watch.pool
    touch, pool.touch = pool.touch, lambda blocks: None
    found = self._pins.pin(chain, below_tokens)
    pool.touch = touch
    return found


class History:
    """One scheduler, requests that come and go, and what is known of it."""

    def __init__(self, name: str, seed: int) -> None:
        self.label = f"{name}, seed {seed}"
        self.draw = random.Random(seed)  # noqa: S311
        kinds, unit = GROUPS[name]
        self.engine = CachedScheduler(kinds, BLOCKS, unit, bool(seed % 2), seed)
        self.groups = {
            index: Group(
                f"group{index}",
                size,
                0 if kind == "states" else None,
                WINDOW_TOKENS - 1 if kind == "window" else 0,
                whole_blocks=True,
            )
            for index, (kind, size) in enumerate(kinds)
        }
        self.prefixes = CachedPrefixes(self.engine.manager, self.groups, PINNED_BLOCKS)
        self.told: dict[str, set[bytes]] = {group.name: set() for group in self.groups.values()}
        self.truth = CachedTruth(self.engine, self.groups, self.prefixes.chains.quantum_tokens)
        self.open: set[str] = set()
        self.ahead = seed % 2
        """How many steps vLLM schedules before one was computed."""
        self.steps: deque[Step] = deque()
        self.pins: list[tuple[list[bytes], Pin, Step]] = []
        """With the step at the end of which it is complete."""
        self.seen: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        for _ in range(STEPS):
            self._something_happens()
            self._step()
            if self.draw.random() < 0.5:
                self._check_told()
        self._end()
        return self.seen

    def _step(self) -> None:
        self.steps.append(self.engine.schedule())
        self.truth.note()
        if self.draw.random() < 0.5:
            self._hear()
        if self.draw.random() < 0.5:
            self._pin()
        while len(self.steps) > self.ahead:
            self.engine.run(self.steps.popleft())
            self.truth.note()
        for ended in self.open - set(self.engine.under_way()):
            self.prefixes.finished(ended)
            self.open.discard(ended)
        self._check_pins()

    def _something_happens(self) -> None:
        dice = self.draw.random()
        if dice < 0.35 and len(self.open) < REQUESTS:
            request = self.engine.add(self._prompt(), self.draw.randrange(1, 60))
            prompt = followed_prompt(request, "")
            assert prompt is not None
            self.prefixes.chains.begin(request.request_id, prompt)
            self.open.add(request.request_id)
        elif dice < 0.40 and self.open:
            self.engine.abort(self.draw.choice(sorted(self.open)))
        elif dice < 0.45:
            self.engine.manager.evict_blocks({self.draw.randrange(1, BLOCKS) for _ in range(5)})
        elif dice < 0.50:
            self._clear()
        elif dice < 0.60 and self.pins:
            self.prefixes.let_go(self.pins.pop(self.draw.randrange(len(self.pins)))[1])

    def _clear(self) -> None:
        for request_id in self.engine.under_way():
            self.engine.abort(request_id)
        for _, pin, _ in self.pins:
            self.prefixes.let_go(pin)
        self.pins.clear()
        if self.engine.manager.reset_prefix_cache():
            self.seen["resets"] += 1

    def _prompt(self) -> list[int]:
        """Draw a new prompt, or a prompt that continues an earlier request."""
        count = self.draw.randrange(2, 150)
        old = list(self.engine.requests.values())
        said: list[int] = []
        if old and self.draw.random() < 0.7:
            said = list(self.draw.choice(old)._all_token_ids)
            if self.draw.random() < 0.7:
                said = said[: self.draw.randrange(len(said) + 1)]
        return (said + [self.draw.randrange(4) for _ in range(count)])[: max(count, len(said) + 1)]

    def _hear(self) -> None:
        changes = self.prefixes.changes()
        for gone in changes.evicted:
            assert self.told[gone.group].issuperset(gone.hashes), self.label
            self.told[gone.group].difference_update(gone.hashes)
        for one in changes.held:
            size = next(g.block_tokens for g in self.groups.values() if g.name == one.group)
            ends = [self.truth.places[name] for name in one.hashes]
            if len(ends) > 1:
                assert bool(one.parent) == (ends[0] > size), self.label
            if one.parent:
                ends.insert(0, self.truth.places[one.parent])
            assert ends == [ends[0] + size * at for at in range(len(ends))], self.label
            self.seen["blocks in runs" if len(ends) > 1 else "others"] += len(one.hashes)
            assert self.told[one.group].isdisjoint(one.hashes), self.label
            self.told[one.group].update(one.hashes)

    def _check_told(self) -> None:
        self._hear()
        truth = {group: set(names) for group, names in self.truth.blocks().items()}
        assert self.told == truth, self.label
        assert self.prefixes.count() == {group: len(names) for group, names in truth.items()}
        self.seen["comparisons"] += 1
        self.seen["hashes"] += sum(map(len, truth.values()))

    def _pin(self) -> None:
        tokens = self._prompt()
        names = ContentChain().extend(tokens, 1)
        quantum = self.prefixes.chains.quantum_tokens
        chain = PromptChain(quantum, tuple(names[quantum - 1 :: quantum]))
        mine = Counter(block.block_id for _, pin, _ in self.pins for block in pin.kept)
        expected = self.truth.largest(names, mine)
        pin = self.prefixes.pin(chain, len(tokens))
        if pin is None:
            self.seen["declined"] += bool(expected)
            return
        # Whether it is not too much either, the memory says.
        assert pin.tokens >= expected, (self.label, pin.tokens, expected)
        self.seen["pins"] += 1
        self.seen["pinned tokens"] += pin.tokens
        self.pins.append((names, pin, self.steps[-1]))

    def _check_pins(self) -> None:
        """Check that each pinned block still holds the same tokens."""
        for names, pin, step in self.pins:
            if step in self.steps:
                continue
            for index, group in self.groups.items():
                cells, size, ids = self.engine.cells[index], group.block_tokens, pin.blocks
                if group.is_state:
                    (block,) = ids[group.name]
                    assert cells[block][0] == names[pin.tokens - 1], (self.label, pin.tokens)
                    continue
                first = group.first_token(pin.tokens)
                for place, block in enumerate(ids[group.name]):
                    assert (block == NULL_BLOCK) == (place < first // size), self.label
                    for token in range(place * size, min(place * size + size, pin.tokens)):
                        right = block == NULL_BLOCK or cells[block][token % size] == names[token]
                        assert right, (self.label, pin.tokens, token)

    def _end(self) -> None:
        """End all requests, and check that nothing stays behind."""
        for request_id in self.engine.under_way():
            self.engine.abort(request_id)
        while self.steps:
            self.engine.run(self.steps.popleft())
        self.engine.run(self.engine.schedule())
        for ended in self.open:
            self.prefixes.finished(ended)
        self._check_told()
        for _, pin, _ in self.pins:
            self.prefixes.let_go(pin)
        pool = self.engine.manager.block_pool
        assert pool.get_num_free_blocks() == BLOCKS - 1, self.label
        assert self.engine.manager.reset_prefix_cache()
        self._check_told()
        assert not any(self.told.values())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
