"""Share prefixes with other engines: find theirs, report those of the own cache, hand them over."""

from __future__ import annotations

from collections.abc import Sequence

from restow.agents.engines.common.blocks import BlockLists, Group
from restow.agents.engines.common.chains import FollowedPrompt, RequestChains
from restow.agents.engines.common.decode import DecodeSide
from restow.agents.engines.common.holdings import StatesToKeep
from restow.agents.engines.common.prefix_exchange import (
    PrefixCache,
    PrefixFinder,
    PrefixGiver,
    PrefixOffers,
)
from restow.agents.engines.common.registration import ConnectorSettings
from restow.broker.client import BlockingSession, HashForm, Prefix
from restow.broker.client.engine.chains import CONTENT_FORM


class PrefixSharing:
    """The prefixes of an engine whose settings say ``find``. Belongs to the scheduler's thread."""

    def __init__(
        self,
        engine_id: str,
        session: BlockingSession,
        settings: ConnectorSettings,
        chains: RequestChains,
        groups: Sequence[Group],
        cached: PrefixCache | None = None,
        offers: PrefixOffers | None = None,
        to_keep: StatesToKeep | None = None,
    ) -> None:
        """Find prefixes by ``chains``; report what is ``cached`` of ``groups``; answer ``offers``.

        ``to_keep`` are the states that the session hands over when the engine leaves.
        """
        self._session, self._chains, self._cached = session, chains, cached
        self._form = HashForm(CONTENT_FORM, chains.quantum_tokens)
        self._recurrent = any(group.is_state for group in groups)
        self._sparse = any(group.is_state or group.window_tokens for group in groups)
        self._block_tokens = max(group.block_tokens for group in groups)
        find_s = settings.find_ms / 1e3
        self._finder = PrefixFinder(session, engine_id, self._form, chains, self._recurrent, find_s)
        self._to_keep = to_keep or StatesToKeep()
        self._begun: dict[str, int] = {}
        """By request: the tokens cached here with which it began."""
        self._giver: PrefixGiver | None = None
        if cached is not None and offers is not None:
            self._giver = PrefixGiver(
                session, offers, cached, self._form, settings.lease_ms, settings.hold_ms
            )

    def new_request(self, request_id: str, prompt: FollowedPrompt | None, asks: bool) -> None:
        """Follow a request that came in, its prompt cut already where P's is.

        ``prompt`` None: its content has no chain. ``asks``: it may begin with any engine's state.
        """
        if prompt is not None:
            self._chains.begin(request_id, prompt)
        if asks:
            self._finder.begin(request_id)

    def look(
        self,
        request_id: str,
        computed_tokens: int,
        last_tokens: int,
        decode: DecodeSide,
        trace_parent: str,
    ) -> bool:
        """Return whether it is decided if the request waits for a state (`PrefixFinder.look`)."""
        if computed_tokens and self._sparse:
            self._begun.setdefault(request_id, computed_tokens)
        return self._finder.look(request_id, computed_tokens, last_tokens, decode, trace_parent)

    def forget_cached(self) -> None:
        """Report nothing that is cached now, since its names may be wrong."""
        if self._cached is not None:
            self._cached.forget()

    def finished(self, request_id: str) -> None:
        """Forget a request. What was cached of it stays known."""
        self._note_begun(request_id, self._begun.pop(request_id, 0))
        self._finder.end(request_id)
        if self._cached is not None:
            self._cached.finished(request_id)
        else:
            self._chains.end(request_id)

    def replied(self, request_id: str, tokens: int, blocks: BlockLists, name: bytes) -> None:
        """Keep the state after a reply, which stands after ``tokens`` and has the hash ``name``.

        To be called before the engine frees the ``blocks``, and before `finished`. A model without
        recurrent states has the last whole blocks in its cache.
        """
        chain = self._chains.chain(request_id)
        if self._cached is None or chain is None:
            return
        if not self._recurrent:
            tokens -= tokens % self._block_tokens
        elif not self._cached.replied(name, tokens, blocks):
            return
        whole, rest = divmod(tokens, self._form.quantum_tokens)
        if tokens:
            hashes = chain.hashes[:whole]
            self._to_keep.note(Prefix(self._form, tokens, hashes, name if rest else b""))

    def _note_begun(self, request_id: str, tokens: int) -> None:
        """Note that a request began with a state that was cached here.

        This is not needed for attention alone, where such a state is a part of what is kept at the
        ends of replies.
        """
        chain = self._chains.chain(request_id) if tokens else None
        if chain is not None and chain.at(tokens) is not None:
            hashes = chain.hashes[: tokens // self._form.quantum_tokens]
            self._to_keep.begin(Prefix(self._form, tokens, hashes))

    @property
    def pending(self) -> bool:
        """Whether a step has something to do here, though no request runs."""
        return bool(self._cached and self._cached.pending) or bool(
            self._giver and self._giver.pending
        )

    @property
    def pinned_blocks(self) -> int:
        """The number of blocks that stay in place for others who read them."""
        return 0 if self._cached is None else self._cached.pinned_blocks

    def forget(self) -> None:
        """Forget all that was computed by weights that were replaced; requests go on without."""
        self._finder.end_all()
        self._to_keep.clear()
        self._begun = {}
        if self._cached is not None:
            self._cached.forget_ends()

    def step(self, known: bool = True) -> list[str]:
        """Report what came and went, and answer offers; return the handoffs that workers fence.

        ``known`` False: the engine's weights are unknown, so nothing is reported or handed over.
        """
        if self._cached is None or self._giver is None:
            return []
        changes = self._cached.changes()
        if not known:
            self._giver.decline_all()
            return self._giver.step()
        for evicted in changes.evicted:
            self._session.evict(self._form, evicted.group, evicted.hashes)
            self._to_keep.forget(evicted.hashes)
        for held in changes.held:
            self._session.hold(self._form, held.group, held.hashes, parent=held.parent)
        for prefix in self._to_keep.take_new(self._cached.holds):
            self._session.keep(prefix)
        return self._giver.step()
