"""Share prefixes with other engines: find theirs, report the engine's own, hand them over.

`PrefixSharing` joins a `PrefixFinder` and a `PrefixGiver` over the engine's `PrefixCache`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol
from uuid import uuid4

from restow.agents.engines.common.blocks import BlockLists, Group
from restow.agents.engines.common.chains import FollowedPrompt, RequestChains
from restow.agents.engines.common.handoff_ends import HandoffEnds
from restow.agents.engines.common.holdings import CacheChanges, StatesToKeep
from restow.agents.engines.common.prefill_decode import DecodeSide
from restow.agents.engines.common.registration import ConnectorSettings
from restow.broker.client import BlockingSession, HashForm, Offer, Prefix, PrefixChain
from restow.broker.client.engine.chains import CONTENT_FORM, Holders
from restow.broker.errors import ChainFormError, RestowError
from restow.broker.logs import get_logger

PATIENCE_MS = 10_000
"""How long a request waits for a prefix, which its holder has already."""
MOVED_S, MOVED_AGAIN_S = 1.0, 0.02
"""How long a reply that moves waits until the broker knows its state, and how often it asks. The
engine that has ended the reply tells of the state in its next step."""


class PrefixCache(Protocol):
    """What an adapter provides of its engine's prefix cache, so that others can use it.

    All methods are called in the scheduler's thread.
    """

    @property
    def pending(self) -> bool:
        """Whether the cache needs a step, though no request runs."""

    @property
    def pinned_blocks(self) -> int:
        """The number of blocks that are pinned now."""

    def changes(self) -> CacheChanges:
        """Return what came and went, after a step was scheduled."""

    def holds(self, prefix: Prefix) -> bool:
        """Return whether all of a state is held, as of the last `changes`."""

    def pin_state(self, prefix: Prefix) -> Any:
        """Pin a state in its place; None: it is not held, or too much is pinned.

        The pin has ``blocks``: block ids by group, as a handoff names them. They stay in place
        until `let_go` gets the pin.
        """

    def let_go(self, pin: Any) -> None:
        """Give a pin's blocks back, once."""

    def replied(self, name: bytes, tokens: int, blocks: BlockLists) -> bool:
        """Keep the state after a reply before the engine frees its blocks; return if it is kept."""

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended; what was cached of it stays known."""

    def forget(self) -> None:
        """Forget everything that is cached now."""

    def forget_ends(self) -> None:
        """Forget the states that `replied` has kept."""


@dataclass(frozen=True, slots=True)
class _Question:
    """A question to the broker about a request."""

    chain: PrefixChain
    answer: Future[Holders]
    asked_s: float
    until_s: float
    patient_until_s: float
    """Until when to ask again if nobody holds all of the state; 0: do not ask again."""

    @property
    def is_over(self) -> bool:
        """Whether the request need not wait any longer."""
        return self.answer.done() or time.monotonic() >= self.until_s


class PrefixFinder:
    """Finds engines that hold more of a prompt than is cached here, before it is computed.

    Asks once for each request. Belongs to the scheduler's thread.
    """

    def __init__(
        self,
        session: BlockingSession,
        engine_id: str,
        form: HashForm,
        chains: RequestChains,
        ends: bool,
        find_s: float,
        block_tokens: int = 0,
    ) -> None:
        """Find prefixes, by ``chains`` of ``form``, that engines other than ``engine_id`` hold.

        ``ends``: also states at the ends of earlier replies. A request waits ``find_s`` for the
        broker's answer. ``block_tokens``: states at multiples of it are cached once they are
        loaded; 0: none is.
        """
        self._session, self._engine_id, self._find_s = session, engine_id, find_s
        self._form, self._chains, self._ends = form, chains, ends
        self._block_tokens = block_tokens
        self._new: set[str] = set()
        """Requests that may ask, and have not yet."""
        self._open: dict[str, _Question] = {}
        """By request."""
        self._loads: dict[str, bytes] = {}
        """By request that loads a state which will be cached: the hash of the state."""
        self._loaders: dict[bytes, str] = {}
        """By hash of the state: the request that loads it."""
        self._loaded: list[str] = []
        """Requests that have begun with what they loaded since the last step."""
        self._failed = ""
        """The reason why the last question had no answer, if it had none."""
        self._log = get_logger("restow.engine").bind(engine=engine_id)

    def begin(self, request_id: str) -> None:
        """Follow a request that may begin with any engine's state."""
        self._new.add(request_id)

    def end(self, request_id: str) -> None:
        """Forget a request that has ended or needs no answer."""
        self._new.discard(request_id)
        question = self._open.pop(request_id, None)
        if question is not None:
            question.answer.cancel()
        self._release(request_id)

    def end_all(self) -> None:
        """Forget all requests."""
        for request_id in [*self._new, *self._open, *self._loads]:
            self.end(request_id)

    def loads(self, request_id: str) -> bool:
        """Return whether other requests may wait for the state that a request loads."""
        return request_id in self._loads

    def loaded(self, request_id: str) -> None:
        """Have other requests wait until this step is scheduled: then the state can be found."""
        self._loaded.append(request_id)

    def step(self) -> None:
        """Have other requests wait no longer for what was loaded before this step."""
        for request_id in self._loaded:
            self._release(request_id)
        self._loaded.clear()

    def _release(self, request_id: str) -> None:
        """Have other requests wait no longer for what a request loads."""
        name = self._loads.pop(request_id, None)
        if name is not None:
            del self._loaders[name]

    def look(
        self,
        request_id: str,
        computed_tokens: int,
        last_tokens: int,
        decode: DecodeSide,
        trace_parent: str,
    ) -> bool:
        """Return False while an answer is awaited; ``decode`` waits for a state that was found.

        The request waits if another engine holds a state that stands a quantum or more behind the
        ``computed_tokens`` that are cached here, and at ``last_tokens`` at most. It also waits
        while another request loads that state, so that each state is read once.
        """
        least_tokens = computed_tokens + self._form.quantum_tokens
        if request_id in self._new:
            self._new.discard(request_id)
            if least_tokens <= last_tokens and self._session.is_open:
                self._ask(request_id, last_tokens)
        question = self._open.get(request_id)
        if question is None:
            if not decode.waits(request_id):  # its load has failed
                self._release(request_id)
            return True
        if not question.is_over:
            return False
        tokens, now_s = self._most_tokens(question), time.monotonic()
        if tokens < last_tokens and now_s < question.patient_until_s:
            if now_s >= question.asked_s + MOVED_AGAIN_S:
                self._ask(request_id, last_tokens, question.patient_until_s)
            return False
        prefix = question.chain.prefix(tokens) if tokens >= least_tokens else None
        cached = bool(prefix and self._block_tokens) and tokens % self._block_tokens == 0
        if prefix is not None and cached and prefix.hashes[-1] in self._loaders:
            return False
        self.end(request_id)
        if prefix is not None:
            decode.begin(request_id, uuid4().hex, tokens, PATIENCE_MS, trace_parent, prefix)
            if cached:
                self._loads[request_id] = prefix.hashes[-1]
                self._loaders[prefix.hashes[-1]] = request_id
        return True

    def _ask(self, request_id: str, last_tokens: int, patient_until_s: float = 0.0) -> None:
        chain, now_s = self._chains.chain(request_id), time.monotonic()
        if chain is None:
            return
        if self._ends and self._chains.is_moved(request_id):
            patient_until_s = patient_until_s or now_s + MOVED_S
        hashes = chain.hashes[: last_tokens // self._form.quantum_tokens]
        ends = self._chains.ends(request_id, last_tokens) if self._ends else ()
        asked = PrefixChain(self._form, hashes, ends=ends)
        answer = self._session.find([asked], timeout_s=self._find_s)
        until_s = now_s + self._find_s
        self._open[request_id] = _Question(asked, answer, now_s, until_s, patient_until_s)

    def _most_tokens(self, question: _Question) -> int:
        """Return how many tokens another engine holds."""
        if not question.answer.done():
            self._log_unknown("LATE", f"the broker has not answered in {self._find_s * 1e3:g} ms")
            return 0
        try:
            (holders,) = question.answer.result()
        except CancelledError:
            return 0
        except RestowError as error:
            self._log_unknown(error.reason, error.message)
            return 0
        self._failed = ""
        return max(
            (holder.tokens for holder in holders if holder.engine_id != self._engine_id), default=0
        )

    def _log_unknown(self, reason: str, detail: str) -> None:
        """Log why a question had no answer, once for several in a row."""
        if reason != self._failed:
            self._failed = reason
            words = "who holds prefixes is not known"
            self._log.warning(words, reason=reason, detail=detail)


class PrefixOffers:
    """Brings offers from the session's thread to the scheduler's, and wakes the scheduler.

    The broker offers to this engine that it hands a prefix over to another engine.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """``wake`` has the engine take a step if it is idle."""
        self.wake = wake
        self._queue: SimpleQueue[tuple[Offer, float]] = SimpleQueue()

    def hear(self, offer: Offer) -> None:
        """Take an offer, in the session's thread."""
        self._queue.put((offer, time.monotonic() + offer.within_ms / 1e3))
        self.wake()

    @property
    def empty(self) -> bool:
        """Whether no offer waits."""
        return self._queue.empty()

    def take(self) -> Iterator[tuple[Offer, float]]:
        """Yield the offers that came since the last call, and until when each is open."""
        while True:
            try:
                yield self._queue.get_nowait()
            except Empty:
                return


class PrefixGiver:
    """Hands prefixes over, and keeps their blocks in place while others read them.

    Belongs to the scheduler's thread. Blocks that are cached when a step was scheduled are complete
    when that step is over: workers fence them then.
    """

    def __init__(
        self,
        session: BlockingSession,
        offers: PrefixOffers,
        cached: PrefixCache,
        form: HashForm,
        lease_ms: int,
        hold_ms: int,
    ) -> None:
        """Answer ``offers`` of ``form`` with what is ``cached``."""
        self._session, self._offers, self._cached, self._form = session, offers, cached, form
        self._lease_ms, self._hold_ms = lease_ms, hold_ms
        self._ends = HandoffEnds()
        self._pins: dict[str, Any] = {}
        """By handoff that is published."""
        self._waiting: list[tuple[Offer, float]] = []
        """Offers of states that can be pinned when others have been read."""

    @property
    def pending(self) -> bool:
        """Whether the next step has something to do here."""
        return not (self._offers.empty and self._ends.empty)

    def step(self) -> list[str]:
        """Answer offers and let go what was read; return the handoffs that workers fence."""
        for end in self._ends.take():
            self._cached.let_go(self._pins.pop(end.handoff_id))
            if end.failed:
                end.log("a prefix was not handed over")
        offers, self._waiting = [*self._waiting, *self._offers.take()], []
        now_s = time.monotonic()
        return [
            offer.handoff_id
            for offer, until_s in offers
            if now_s < until_s and self._publish(offer, until_s)
        ]

    def decline_all(self) -> None:
        """Decline all offers, since it is unknown which weights computed what is cached."""
        for offer, _ in (*self._waiting, *self._offers.take()):
            self._session.decline_offer(offer.handoff_id, "its weights were replaced")
        self._waiting = []

    def _publish(self, offer: Offer, until_s: float) -> bool:
        """Publish an offered prefix; return False if it was declined, or waits for room."""
        handoff_id, prefix = offer.handoff_id, offer.prefix
        known = prefix.form == self._form and not prefix.salt and handoff_id not in self._pins
        pin = self._cached.pin_state(prefix) if known else None
        if pin is None and known and self._pins and self._cached.holds(prefix):
            self._waiting.append((offer, until_s))  # too much is pinned now
            return False
        if pin is None:
            self._session.decline_offer(handoff_id, "it is not cached any more")
            return False
        try:
            future = self._session.publish(
                handoff_id,
                pin.blocks,
                prefix.position_tokens,
                lease_ms=self._lease_ms,
                hold_ms=self._hold_ms,
                content=offer.content,
            )
        except RestowError as error:
            self._cached.let_go(pin)
            self._session.decline_offer(handoff_id, error.message)
            return False
        self._pins[handoff_id] = pin
        self._ends.watch(handoff_id, handoff_id, future)
        future.add_done_callback(lambda _: self._offers.wake())
        return True


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
        block_tokens = self._block_tokens if cached is not None else 0
        self._finder = PrefixFinder(
            session, engine_id, self._form, chains, self._recurrent, find_s, block_tokens
        )
        self._to_keep = to_keep or StatesToKeep()
        self._begun: dict[str, int] = {}
        """By request: the tokens cached here with which it began."""
        self._marked: dict[str, list[Prefix]] = {}
        """By request: the states at its marks that are not held yet."""
        self._over: set[str] = set()
        """Requests with marks that have ended since the last step."""
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

    def mark(self, request_id: str, marks: Sequence[int]) -> list[int]:
        """Keep the states at the marks of a request, or at the ends of blocks before them.

        Returns after how many tokens each state stands; 0: there is none.
        """
        chain = self._chains.chain(request_id) if self._cached is not None else None
        if chain is None:
            return [0] * len(marks)
        points = [mark - mark % self._block_tokens for mark in marks]
        quantum_tokens = self._form.quantum_tokens
        self._marked[request_id] = [
            Prefix(self._form, tokens, chain.hashes[: tokens // quantum_tokens], marked=True)
            for tokens in sorted(set(points) - {0})
        ]
        return points

    def marks(self, request_id: str) -> list[int]:
        """Return the tokens after which a request has states to keep that are not held yet."""
        return [prefix.position_tokens for prefix in self._marked.get(request_id, ())]

    def look(
        self,
        request_id: str,
        computed_tokens: int,
        last_tokens: int,
        decode: DecodeSide,
        trace_parent: str,
    ) -> bool:
        """Return False while the broker's answer is awaited (`PrefixFinder.look`)."""
        if computed_tokens and self._sparse:
            self._begun.setdefault(request_id, computed_tokens)
        return self._finder.look(request_id, computed_tokens, last_tokens, decode, trace_parent)

    def begins_with(self, request_id: str, prefix: Prefix) -> bool:
        """Return whether a request's tokens begin with the whole quanta of a prefix.

        Raises `ChainFormError` if the prefix has hashes of another form.
        """
        if prefix.form != self._form:
            raise ChainFormError(f"the engine's hashes are of {self._form}, not of {prefix.form}")
        chain, hashes = self._chains.chain(request_id), prefix.hashes
        return chain is not None and bool(hashes) and chain.hashes[: len(hashes)] == hashes

    def loads(self, request_id: str) -> bool:
        """Return whether other requests may wait for the state that a request loads."""
        return self._finder.loads(request_id)

    def loaded(self, request_id: str) -> None:
        """Hear that a request begins with what it has loaded."""
        self._finder.loaded(request_id)

    def forget_cached(self) -> None:
        """Report nothing that is cached now, since its names may be wrong."""
        if self._cached is not None:
            self._cached.forget()

    def finished(self, request_id: str) -> None:
        """Forget a request. What was cached of it stays known."""
        self._note_begun(request_id, self._begun.pop(request_id, 0))
        self._finder.end(request_id)
        if request_id in self._marked:
            self._over.add(request_id)
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

    def _note_marked(self, is_held: Callable[[Prefix], bool]) -> None:
        """Note the states at marks that are held now; forget those of requests that have ended."""
        for request_id, prefixes in list(self._marked.items()):
            left = [prefix for prefix in prefixes if not is_held(prefix)]
            for prefix in prefixes:
                if prefix not in left:
                    self._to_keep.note(prefix)
            if left and request_id not in self._over:
                self._marked[request_id] = left
            else:
                del self._marked[request_id]
        self._over.clear()

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
        self._begun, self._marked = {}, {}
        if self._cached is not None:
            self._cached.forget_ends()

    def step(self, known: bool = True) -> list[str]:
        """Report what came and went, and answer offers; return the handoffs that workers fence.

        ``known`` False: the engine's weights are unknown, so nothing is reported or handed over.
        """
        self._finder.step()
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
        if self._marked:
            self._note_marked(self._cached.holds)
        for prefix in self._to_keep.take_new(self._cached.holds):
            self._session.keep(prefix)
        return self._giver.step()
