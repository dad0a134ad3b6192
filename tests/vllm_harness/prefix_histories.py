"""Random histories of vLLM's own scheduler with the connector, between others' states and offers.

Run by vLLM's Python (`play`). What requests are computed from is looked at, to the token, at every
step. Engines of all roles, half of which schedule a step before the one before it was computed.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, cast

from restow.agents.engines.common.blocks import NULL_BLOCK
from restow.agents.engines.common.holdings import StatesToKeep
from restow.agents.engines.common.prefix_sharing import PrefixOffers, PrefixSharing
from restow.agents.engines.common.registration import ConnectorSettings
from restow.agents.engines.vllm.scheduler.prefix_cache import CachedPrefixes, Pin, ReplyEnds
from restow.agents.engines.vllm.scheduler.scheduler_side import SchedulerSide
from restow.agents.engines.vllm.scheduler.start import cached_tokens_of
from restow.agents.engines.vllm.worker.worker_side import WorkerStep
from restow.broker.client import ContentChain, HashForm, Offer, Prefix
from restow.broker.client.engine.chains import CONTENT_FORM
from vllm_harness.cache_histories import kept_without_references
from vllm_harness.cached_scheduler import SchedulerHistory, Step, play
from vllm_harness.said_session import Load, SaidSession

BLOCKS, PINNED_BLOCKS, STEPS, REQUESTS = 96, 32, 200, 5
NEVER_MS = 3_600_000
"""So that no history depends on how fast it is played."""
ROLES = ("kv_both", "kv_producer", "kv_consumer")
TRANSFER: dict[str, Any] = {
    "kv_connector": "RestowConnector",
    "kv_connector_module_path": "restow.agents.engines.vllm",
    "engine_id": "e0",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"prefix": "find+tell", "find_ms": 2},
}


_pin, _side_step, _due = CachedPrefixes.pin_state, SchedulerSide.step, SaidSession.due


def _due_at_once(self: SaidSession, reached: int) -> list[Load]:
    return _due(self, sys.maxsize)


def _step_without_failures(self: SchedulerSide, *said: Any) -> WorkerStep:
    step = _side_step(self, *said)
    step.received = dict.fromkeys(step.received, True)
    return step


def _pin_before(self: CachedPrefixes, prefix: Prefix) -> Pin | None:
    tokens = prefix.position_tokens - prefix.form.quantum_tokens
    shorter = replace(prefix, position_tokens=tokens, hashes=prefix.hashes[:-1])
    return _pin(self, prefix) or _pin(self, shorter)


class History(SchedulerHistory):
    """One scheduler with the connector; its session says what the history draws."""

    continued, cut = 0.6, 1

    def __init__(self, name: str, seed: int) -> None:
        role = ROLES[seed // 2 % 3]
        super().__init__(name, seed, BLOCKS, {**TRANSFER, "kv_role": role})
        self.session = SaidSession(self.draw)
        session = cast("Any", self.session)
        settings = ConnectorSettings.of(TRANSFER["kv_connector_extra_config"])
        self.cached = CachedPrefixes(
            self.engine.manager, dict(enumerate(self.groups)), PINNED_BLOCKS
        )
        self.offers = PrefixOffers(lambda: None)
        chains = self.cached.chains
        self.worth = StatesToKeep()
        of_cache = chains, self.groups, self.cached
        self.prefix = PrefixSharing("e0", session, settings, *of_cache, self.offers, self.worth)
        sides = self.prefix, cached_tokens_of(self.engine.manager)
        self.side = SchedulerSide("e0", "life", role, self.groups, 0, session, settings, *sides)
        self.engine.scheduler.connector._scheduler = self.side
        self.form = HashForm(CONTENT_FORM, chains.quantum_tokens)
        self.reached = 0
        """The write mark up to which states are loaded."""
        self.texts: dict[bytes, list[bytes]] = {}
        """By name of tokens, the names of all beginnings of them."""
        self.fenced: set[str] = set()
        """Handoffs that may be read."""

    def run(self) -> Counter[str]:
        try:
            for _ in range(STEPS):
                self._something_happens()
                self._step()
            self._end()
        except AssertionError as error:
            error.add_note(self.label)
            raise
        return self.seen + self.session.seen

    def _step(self) -> None:
        before = self.engine.under_way()
        step = self.engine.schedule()
        self.steps.append(step)
        while len(self.steps) > self.ahead:
            self._compute(self.steps.popleft())
        for ended in set(before) - set(self.engine.under_way()):
            self._know(self.engine.names(self.engine.requests[ended]))
        self.seen["ends"] += len(self.cached._ends._come)
        self.seen["among keys"] += self.side.wants_whole_hits
        self._check_worth()
        self._check_published()

    def _compute(self, step: Step) -> None:
        self.engine.run(step, self._begun)
        self.fenced.update(step.output.kv_connector_metadata.step.fences)

    def _begun(self, mark: int) -> None:
        self.reached = max(self.reached, mark)
        self._load_some()

    def _load_some(self) -> None:
        for load in self.session.due(self.reached):
            self._load(load)

    def _something_happens(self) -> None:
        dice = self.draw.random()
        under_way = self.engine.under_way()
        if dice < 0.35 and len(under_way) < REQUESTS:
            stops = self.draw.choice(([], [3]))
            request = self.engine.add(self.prompt(), self.draw.randrange(1, 40), stops)
            self._know(self.engine.names(request))
        elif dice < 0.40 and under_way:
            self.engine.abort(self.draw.choice(sorted(under_way)))
        elif dice < 0.60:
            self._offer()
        elif dice < 0.75 and self.session.published:
            self.session.end_publication(self.draw.choice(sorted(self.session.published)))
        self.session.answer_some()
        self._load_some()

    def _know(self, names: list[bytes]) -> None:
        for end in range(1, len(names) + 1):
            self.texts[names[end - 1]] = names[:end]

    def _offer(self) -> None:
        """Ask for a beginning of an earlier text, or of a text that was never said."""
        if not self.engine.requests or self.draw.random() < 0.1:
            names = ContentChain().extend([9] * 64, 1)
        else:
            names = self.engine.names(self.draw.choice(list(self.engine.requests.values())))
        self._know(names)
        tokens = self.draw.randrange(1, len(names) + 1)
        ends = list(self.cached._ends._ends)
        if ends and self.draw.random() < 0.5:
            names = self.texts.get(self.draw.choice(ends), names)
            tokens = len(names)
        elif self.draw.random() < 0.8:
            tokens -= tokens % self.form.quantum_tokens
        if tokens:
            content = names[tokens - 1]
            whole, rest = divmod(tokens, self.form.quantum_tokens)
            quantum = self.form.quantum_tokens
            hashes = tuple(names[quantum - 1 : whole * quantum : quantum])
            prefix = Prefix(self.form, tokens, hashes, content if rest else b"")
            self.offers.hear(Offer(self.session.next_offer(), prefix, content, NEVER_MS))

    def _load(self, load: Load) -> None:
        """Have a state arrive, or a part of it, and then have its end told."""
        names = self.texts[load.prefix.end_hash or load.prefix.hashes[-1]]
        position = load.prefix.position_tokens
        for group, cells in zip(self.groups, self.engine.cells, strict=True):
            blocks, size = load.blocks[group.name], group.block_tokens
            if group.is_state:
                cells[blocks[0]] = {0: b"half" if load.failed else names[position - 1]}
                continue
            for token in range(max(load.held_tokens, group.first_token(position)), position):
                assert blocks[token // size] != NULL_BLOCK
                name = b"half" if load.failed else names[token]
                cells.setdefault(blocks[token // size], {})[token % size] = name
        self.session.end_load(load)

    def _check_worth(self) -> None:
        """Check that each state worth keeping is held, and that the newest comes first."""
        told = self.session.told
        states = [group.name for group in self.groups if group.is_state]
        somewhere = {name for _, name in told}
        for one in self.worth.newest():
            self.seen["worth keeping"] += 1
            self.seen["begun with"] += self.prefix._recurrent and not self._ended_at(one)
            name = one.end_hash or one.hashes[-1]
            held = name in somewhere and all((group, name) in told for group in states)
            assert held, "worth keeping, and not held"

    def _ended_at(self, prefix: Prefix) -> bool:
        """Return whether a reply ended at the prefix, or is said to have ended there."""
        return (prefix.end_hash or prefix.hashes[-1]) in self.cached._ends._ends

    def _check_published(self) -> None:
        """Check that every published state that may be read is the state that was asked for."""
        for handoff_id, said in self.session.published.items():
            names, position = self.texts[said.content], said.position_tokens
            self.seen["ends checked"] += position % self.form.quantum_tokens != 0
            assert len(names) == position
            if handoff_id not in self.fenced:
                continue
            for group, cells in zip(self.groups, self.engine.cells, strict=True):
                ids, size = said.blocks[group.name], group.block_tokens
                if group.is_state:
                    assert cells[ids[0]][0] == names[-1]
                    continue
                for token in range(group.first_token(position), position):
                    assert cells[ids[token // size]][token % size] == names[token]

    def _end(self) -> None:
        """End all requests, loads and publications, and check that nothing stays behind."""
        for request_id in self.engine.under_way():
            self.engine.abort(request_id)
        while self.steps:
            self._compute(self.steps.popleft())
        while self.session.loads:
            for load in list(self.session.loads):
                self._load(load)
        giver = self.prefix._giver
        assert giver is not None
        while self.session.published or giver._waiting or self.engine.scheduler.has_requests():
            for handoff_id in list(self.session.published):
                self.session.end_publication(handoff_id)
            self._compute(self.engine.schedule())  # publishes what has waited for room
        self._compute(self.engine.schedule())
        ends = self.cached._ends._ends
        assert self.session.told == {
            (group, name)
            for group, keys in self.cached._holdings._keys.items()
            for name in (*keys, *ends)
        }
        pool = self.engine.manager.block_pool
        assert pool.get_num_free_blocks() == BLOCKS - 1, "blocks are left behind"
        left = [
            self.prefix._finder._new,
            self.prefix._finder._open,
            self.prefix._finder._loads,
            self.prefix._finder._loaders,
            giver._waiting,
            self.prefix._begun,
            self.cached.chains._followed,
            self.cached.chains._named,
            self.side._decode._waits,
            self.side._decode._loading,
            self.side._behind,
            self.cached._ends._new,
        ]
        assert not any(left), left
        assert not self.side.pending
        assert self.engine.manager.reset_prefix_cache()
        self._compute(self.engine.schedule())
        assert not self.session.told
        assert not self.worth.newest()
        assert not self.cached._ends._by_block


if __name__ == "__main__":
    play(
        History,
        {
            "failures": partial(setattr, SchedulerSide, "step", _step_without_failures),
            "letting go": partial(setattr, CachedPrefixes, "let_go", lambda *_: None),
            "positions": partial(setattr, CachedPrefixes, "pin_state", _pin_before),
            "reuse": partial(setattr, ReplyEnds, "_reused", lambda *_: None),
            "forgetting": partial(setattr, StatesToKeep, "forget", lambda *_: None),
            "marks": partial(setattr, SaidSession, "due", _due_at_once),
            "references": partial(setattr, CachedPrefixes, "_kept", kept_without_references),
        },
    )
