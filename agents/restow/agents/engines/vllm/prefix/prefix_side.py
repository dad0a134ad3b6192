"""`PrefixSide` asks for prefixes that others hold, tells of those here, and gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from restow.agents.engines.common.decode import DecodeSide
from restow.agents.engines.common.groups import BlockLists, Group
from restow.agents.engines.vllm.prefix.answering import Answering, Offers
from restow.agents.engines.vllm.prefix.asking import Asking
from restow.agents.engines.vllm.prefix.request_chains import RequestChains
from restow.agents.engines.vllm.prefix.worth_keeping import WorthKeeping
from restow.agents.engines.vllm.scheduler.prompt import Request
from restow.agents.engines.vllm.settings import ConnectorSettings
from restow.broker.client import BlockingSession, HashForm, Prefix
from restow.broker.client.engine.chains import CONTENT_FORM

if TYPE_CHECKING:
    from restow.agents.engines.vllm.prefix.cached_prefixes import CachedPrefixes


class PrefixSide:
    """Follows the requests of an engine that finds. Belongs to the scheduler's thread."""

    def __init__(
        self,
        engine_id: str,
        session: BlockingSession,
        settings: ConnectorSettings,
        chains: RequestChains,
        groups: Sequence[Group],
        cached: CachedPrefixes | None = None,
        offers: Offers | None = None,
        worth: WorthKeeping | None = None,
    ) -> None:
        """Ask by ``chains``; tell of what is ``cached`` of ``groups``, and answer ``offers``.

        ``worth`` is for who hands states over when the engine is to leave.
        """
        self._session, self._chains, self._cached = session, chains, cached
        self._form = HashForm(CONTENT_FORM, chains.quantum_tokens)
        self._recurrent = any(group.is_state for group in groups)
        self._sparse = any(group.is_state or group.window_tokens for group in groups)
        self._block_tokens = max(group.block_tokens for group in groups)
        find_s = settings.find_ms / 1e3
        self._asking = Asking(session, engine_id, self._form, chains, self._recurrent, find_s)
        self._worth = worth or WorthKeeping()
        self._begun: dict[str, int] = {}
        """By request, how many tokens it began with that were cached here."""
        self._answering: Answering | None = None
        if cached is not None and offers is not None:
            self._answering = Answering(
                session, offers, cached, self._form, settings.lease_ms, settings.hold_ms
            )

    def new_request(self, request: Request, adapter: str, asks: bool) -> None:
        """Follow a request that came in, its prompt cut already where P's is.

        ``asks``: it may begin with a state that anybody holds.
        """
        self._chains.begin(request, adapter)
        if asks and not request.get_skip_reading_prefix_cache():
            self._asking.begin(request.request_id)

    def look(
        self, request: Request, computed_tokens: int, last_tokens: int, decode: DecodeSide
    ) -> bool:
        """Return whether it is settled if the request waits for a state (`Asking.look`)."""
        if computed_tokens and self._sparse:
            self._begun.setdefault(request.request_id, computed_tokens)
        trace_parent = (request.trace_headers or {}).get("traceparent", "")
        return self._asking.look(
            request.request_id, computed_tokens, last_tokens, decode, trace_parent
        )

    def forget_cached(self) -> None:
        """Tell of nothing that is cached now: some of it may not be what it is named after."""
        if self._cached is not None:
            self._cached.forget()

    def finished(self, request_id: str) -> None:
        """Forget a request. What was cached of it stays known."""
        self._note_begun(request_id, self._begun.pop(request_id, 0))
        self._asking.end(request_id)
        if self._cached is not None:
            self._cached.finished(request_id)
        else:
            self._chains.end(request_id)

    def replied(self, request: Request, tokens: int, blocks: BlockLists, name: bytes) -> None:
        """Keep where a reply ended: the state after ``tokens``, which ``name`` names.

        To be called before vLLM frees the ``blocks``, and before `finished`. A model without states
        has the last whole blocks in its cache.
        """
        chain = self._chains.chain(request.request_id)
        if self._cached is None or chain is None:
            return
        if not self._recurrent:
            # vLLM caches no block by a token that is computed in a step ahead.
            tokens = min(tokens, len(request._all_token_ids) - 1)
            tokens -= tokens % self._block_tokens
        elif not self._cached.replied(name, tokens, blocks):
            return
        whole, rest = divmod(tokens, self._form.quantum_tokens)
        if tokens:
            hashes = chain.hashes[:whole]
            self._worth.note(Prefix(self._form, tokens, hashes, name if rest else b""))

    def _note_begun(self, request_id: str, tokens: int) -> None:
        """A request began with a state that was cached here.

        Of attention alone that is a part of what is kept anyway, where replies end.
        """
        chain = self._chains.chain(request_id) if tokens else None
        if chain is not None and chain.at(tokens) is not None:
            hashes = chain.hashes[: tokens // self._form.quantum_tokens]
            self._worth.begin(Prefix(self._form, tokens, hashes))

    @property
    def pending(self) -> bool:
        """Whether a step has something to do here, though no request runs."""
        return bool(self._cached and self._cached.pending) or bool(
            self._answering and self._answering.pending
        )

    @property
    def pinned_blocks(self) -> int:
        """How many blocks stay for others who read them."""
        return 0 if self._cached is None else self._cached.pinned_blocks

    def forget(self) -> None:
        """Forget all that the weights computed that were replaced; requests go on without."""
        self._asking.end_all()
        self._worth.clear()
        self._begun = {}
        if self._cached is not None:
            self._cached.forget_ends()

    def step(self, known: bool = True) -> list[str]:
        """Tell what came and went, and answer; return the handoffs that workers fence.

        ``known`` False: nobody knows which weights compute, so nothing is told and given.
        """
        if self._cached is None or self._answering is None:
            return []
        changes = self._cached.changes()
        if not known:
            self._answering.decline_all()
            return self._answering.step()
        for gone in changes.evicted:
            self._session.evict(self._form, gone.group, gone.hashes)
            self._worth.forget(gone.hashes)
        for come in changes.held:
            self._session.hold(self._form, come.group, come.hashes, parent=come.parent)
        for prefix in self._worth.take_new(self._cached.holds):
            self._session.keep(prefix)
        return self._answering.step()
