"""Random histories of vLLM's own scheduler: what is told of its cache is there, and pins stay.

Run by vLLM's Python (`play`).
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from restow.agents.engines.common.blocks import NULL_BLOCK
from restow.agents.engines.vllm.private import watch_keys
from restow.agents.engines.vllm.scheduler import prefix_cache
from restow.agents.engines.vllm.scheduler.prefix_cache import CachedPrefixes, CacheWatch, Pin
from restow.agents.engines.vllm.scheduler.requests import followed_prompt
from restow.broker.client import ContentChain, HashForm, Prefix
from restow.broker.client.engine.chains import CONTENT_FORM
from vllm_harness.cached_scheduler import SchedulerHistory, Step, play
from vllm_harness.cached_truth import CachedTruth

BLOCKS, PINNED_BLOCKS, STEPS, REQUESTS = 64, 24, 120, 5


def _look_without_resets(self: CacheWatch) -> None:
    self._holdings.changed(self._touched, self._is_cached)
    self._touched.clear()


def _watch_no_removals(cached: Any) -> dict[bytes, None]:
    touched = watch_keys(cached)
    del cached.pop  # that of its class stays
    return touched


def kept_without_references(self: CachedPrefixes, pin: Pin) -> Pin | None:
    """Keep a pin as `CachedPrefixes._kept` does, but blocks of the cache without a reference."""
    if pin.give_back == self._ends.give_back:
        return _kept(self, pin)
    pool = self._watch.pool
    touch, pool.touch = pool.touch, lambda blocks: None
    try:
        return _kept(self, pin)
    finally:
        pool.touch = touch


_kept = CachedPrefixes._kept


class History(SchedulerHistory):
    """One scheduler, requests that come and go, and what is known of it."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name, seed, BLOCKS)
        groups = dict(enumerate(self.groups))
        self.prefixes = CachedPrefixes(self.engine.manager, groups, PINNED_BLOCKS)
        self.told: dict[str, set[bytes]] = {group.name: set() for group in self.groups}
        self.truth = CachedTruth(self.engine, groups, self.prefixes.chains.quantum_tokens)
        self.open: set[str] = set()
        self.pins: list[tuple[list[bytes], Pin, Step]] = []
        """With the step at the end of which it is complete."""

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
            request = self.engine.add(self.prompt(), self.draw.randrange(1, 60))
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

    def _hear(self) -> None:
        changes = self.prefixes.changes()
        for gone in changes.evicted:
            assert self.told[gone.group].issuperset(gone.hashes), self.label
            self.told[gone.group].difference_update(gone.hashes)
        for one in changes.held:
            size = next(g.block_tokens for g in self.groups if g.name == one.group)
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
        self.seen["comparisons"] += 1
        self.seen["hashes"] += sum(map(len, truth.values()))

    def _pin(self) -> None:
        tokens = self.prompt()
        names = ContentChain().extend(tokens, 1)
        mine = Counter(block.block_id for _, pin, _ in self.pins for block in pin.kept)
        quantum = self.prefixes.chains.quantum_tokens
        held, there = self.truth.held(names, mine), self.truth.held(names, None)
        if there and self.draw.random() < 0.9:
            # The largest may be a state that its request still writes to.
            names = names[: there[-1] if self.draw.random() < 0.7 else self.draw.choice(there)]
        else:
            names = names[: quantum * self.draw.randrange(len(names) // quantum + 1)]
        hashes = tuple(names[quantum - 1 :: quantum])
        form = HashForm(CONTENT_FORM, quantum)
        pin = hashes and self.prefixes.pin_state(Prefix(form, len(names), hashes))
        if not pin:
            self.seen["declined"] += len(names) in held
            return
        # Whether it is not too much either, the memory says.
        assert len(names) in held, (self.label, len(names), held)
        self.seen["pins"] += 1
        self.seen["pinned tokens"] += len(names)
        self.pins.append((names, pin, self.steps[-1]))

    def _check_pins(self) -> None:
        """Check that each pinned block still holds the same tokens."""
        for names, pin, step in self.pins:
            if step in self.steps:
                continue
            for index, group in enumerate(self.groups):
                cells, size, ids = self.engine.cells[index], group.block_tokens, pin.blocks
                if group.is_state:
                    (block,) = ids[group.name]
                    assert cells[block][0] == names[-1], (self.label, len(names))
                    continue
                first = group.first_token(len(names))
                for place, block in enumerate(ids[group.name]):
                    assert (block == NULL_BLOCK) == (place < first // size), self.label
                    for token in range(place * size, min(place * size + size, len(names))):
                        right = block == NULL_BLOCK or cells[block][token % size] == names[token]
                        assert right, (self.label, len(names), token)

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
    play(
        History,
        {
            "removals": partial(setattr, prefix_cache, "watch_keys", _watch_no_removals),
            "resets": partial(setattr, CacheWatch, "look", _look_without_resets),
            "running states": partial(setattr, CachedPrefixes, "_runs_on", lambda *_: False),
            "references": partial(setattr, CachedPrefixes, "_kept", kept_without_references),
        },
    )
