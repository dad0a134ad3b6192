"""An engine of the recall model that holds states, says so, and asks for others' by content."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import NemotronHForCausalLM

from agent_harness.waiting import WAIT_S
from restow.broker.client import BlockingSession, Offer, Prefix, PrefixChain, chain_of
from restow.demo.transformers.engine import Asked, Engine, EngineOptions
from restow.demo.transformers.ranks import take_from_each
from restow.demo.transformers.state_io import collect, lay_out

STEPS = 6
QUANTUM_TOKENS = 16


def chain(tokens: Sequence[int], quantum_tokens: int = QUANTUM_TOKENS) -> PrefixChain:
    """Return the chain of a prompt, with the token before its last one as an end."""
    stop = len(tokens) - 1
    ends = [stop] if stop % quantum_tokens else []
    return chain_of(tokens, quantum_tokens, ends_tokens=ends)


def state(
    tokens: Sequence[int], quantum_tokens: int = QUANTUM_TOKENS, algorithm: str = "", salt: str = ""
) -> Prefix:
    """Return the state that a prompt is decoded from."""
    named = chain(tokens, quantum_tokens).prefix(len(tokens) - 1)
    form = replace(named.form, algorithm=algorithm or named.form.algorithm)
    return replace(named, form=form, salt=salt)


def until(condition: Callable[[], bool], within_s: float = 2 * WAIT_S) -> None:
    """Return when the condition holds; fail after a while."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it never came to be"
        time.sleep(0.005)


class HoldingEngine(Engine):
    """Its states stay until it evicts them."""

    def __init__(self, model: NemotronHForCausalLM, options: EngineOptions) -> None:
        super().__init__(model, options)
        given = options.engine_id, self._incarnation, self.layout, options.broker
        self._session = BlockingSession(*given, on_offer=self._offered)
        self.held: dict[Prefix, dict[str, list[int]]] = {}
        self.offers: list[Offer] = []
        self.silent = False

    def hold(self, tokens: Sequence[int], prefix: Prefix, keep: bool = True) -> None:
        """Compute the state, say that the engine holds it, and that it is worth keeping."""
        stop = prefix.position_tokens
        blocks = take_from_each(self._pools, stop)
        lay_out(self.state_at(tokens, stop), self.pages, blocks)
        self.held[prefix] = blocks
        for group, hashes in self._hashes(prefix):
            self._session.hold(prefix.form, group, hashes, salt=prefix.salt)
        if keep:
            self.keep(prefix)

    def set_revision(self, revision: str) -> None:
        """Say that the weights were replaced; in fact they stay the same."""
        self._session.set_revision(revision)
        for blocks in self.held.values():
            self._give_back(blocks)
        self.held.clear()

    def forget_states(self) -> None:
        self._session.forget_states()

    def keep(self, prefix: Prefix) -> None:
        self._session.keep(prefix)

    def evict(self, prefix: Prefix) -> None:
        """Hold the state no longer, and report all its hashes evicted, even shared ones."""
        self._give_back(self.held.pop(prefix))
        for group, hashes in self._hashes(prefix):
            self._session.evict(prefix.form, group, hashes, salt=prefix.salt)

    def evict_all(self) -> None:
        for prefix in list(self.held):
            self.evict(prefix)

    def holders(self, prefix: Prefix) -> dict[str, int]:
        """Return the engines that hold the prefix, and how many of its tokens."""
        end = ((prefix.position_tokens, prefix.end_hash),) if prefix.end_hash else ()
        asked = PrefixChain(prefix.form, prefix.hashes, salt=prefix.salt, ends=end)
        (found,) = self._session.find([asked], timeout_s=WAIT_S).result(WAIT_S)
        return {one.engine_id: one.tokens for one in found}

    def is_held(self, prefix: Prefix, by: str) -> bool:
        return self.holders(prefix).get(by) == prefix.position_tokens

    def take(self, tokens: Sequence[int], prefix: Prefix) -> str:
        """Ask for a state by its content; return "" if it came byte for byte, else the reason."""
        blocks = take_from_each(self._pools, len(tokens))
        handoff_id = uuid.uuid4().hex
        end = self._session.request(handoff_id, blocks, prefix=prefix)
        asked = Asked(handoff_id, tuple(tokens), blocks, end)
        ended = end.result(2 * WAIT_S)
        if not ended.done:
            self._give_back_when_free(asked)
            return ended.reason
        got = collect(self.layout, self.pages, blocks, prefix.position_tokens)
        wanted = self.state_at(tokens, prefix.position_tokens)
        assert got.keys() == wanted.keys()
        for name, values in got.items():
            assert torch.equal(values, wanted[name].to(values.dtype)), name
        if prefix.position_tokens == len(tokens) - 1:
            said = self.decode(asked, STEPS).token_ids
            assert said == self.decode_alone(tokens, STEPS).token_ids
        else:
            self._give_back_when_free(asked)
        return ""

    def answer(self, offer: Offer) -> None:
        blocks = self.held.get(offer.prefix)
        if blocks is None:
            self._session.decline_offer(offer.handoff_id, "evicted")
            return
        for agent in self._agents:
            agent.fence(offer.handoff_id)
        position_tokens = offer.prefix.position_tokens
        self._session.publish(offer.handoff_id, blocks, position_tokens, content=offer.content)

    def _offered(self, offer: Offer) -> None:
        self.offers.append(offer)
        if not self.silent:
            self.answer(offer)

    def _hashes(self, prefix: Prefix) -> list[tuple[str, list[bytes]]]:
        """Return the hashes by which each group knows a state: of block ends, or of a snapshot."""
        last = prefix.end_hash or prefix.hashes[-1]
        found: dict[str, list[bytes]] = {}
        for region in self.layout.ranks[0].regions:
            if not region.block_tokens:
                found[region.group] = [last]
                continue
            quanta = region.block_tokens // prefix.form.quantum_tokens
            ends = list(prefix.hashes[quanta - 1 :: quanta])
            partial = prefix.position_tokens % region.block_tokens
            found[region.group] = [*ends, last] if partial else ends
        return list(found.items())
