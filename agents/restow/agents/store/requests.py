"""Request the states that engines report as worth keeping."""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from restow.agents.store.holdings import StoredStates
from restow.agents.store.kept import Pinned
from restow.broker.client import (
    BlockingDelivery,
    BlockingSession,
    Prefix,
)
from restow.broker.client.engine.chains import Holders
from restow.broker.errors import ChainFormError, RestowError
from restow.broker.logs import get_logger
from restow.broker.state_commands import Answer, Outcome, refused

MAX_HASHES = 1 << 18
"""Most hashes of all waiting states: about 20 MB. Fewer states of longer prompts may wait."""


class Waiting:
    """A queue of states to request, which drops the oldest if it is too long. Thread-safe."""

    def __init__(self, max_hashes: int = MAX_HASHES) -> None:
        """Begin empty."""
        self.dropped = 0
        """Number of states that were dropped."""
        self._max_hashes = max_hashes
        self._hashes = 0
        self._prefixes: OrderedDict[Prefix, None] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of waiting states."""
        return len(self._prefixes)

    def add(self, prefix: Prefix) -> list[Prefix]:
        """Add a state, unless it already waits; return the states that are dropped for it."""
        gone: list[Prefix] = []
        with self._lock:
            if prefix in self._prefixes:
                return gone
            self._prefixes[prefix] = None
            self._hashes += _size(prefix)
            while self._hashes > self._max_hashes:
                dropped, _ = self._prefixes.popitem(last=False)
                self._hashes -= _size(dropped)
                self.dropped += 1
                gone.append(dropped)
        return gone

    def take(self) -> Prefix | None:
        """Take the state that has waited longest; None if none waits."""
        with self._lock:
            if not self._prefixes:
                return None
            prefix, _ = self._prefixes.popitem(last=False)
            self._hashes -= _size(prefix)
            return prefix


def _size(prefix: Prefix) -> int:
    return len(prefix.hashes) + 1


MOST_AT_ONCE = 4
"""Open requests, enough to have the next request granted while a state is read."""


class StateRequests:
    """Requests states, a few at a time. All methods but `hear` run on one thread."""

    def __init__(
        self,
        session: BlockingSession,
        holdings: StoredStates,
        run: Callable[[Callable[[], None]], None],
        arrived: Callable[[Prefix], None],
    ) -> None:
        """Begin; ``run`` does work on the thread, ``arrived`` is called with new states."""
        self.waiting = Waiting()
        self.asked = self.kept = 0
        """Requests made, and requests that brought their state."""
        self._session, self._holdings = session, holdings
        self._run, self._arrived = run, arrived
        self._open: set[Prefix] = set()
        self._wanted: dict[Prefix, list[Callable[[Answer], None]]] = {}
        """Who is told how the request for a state ends."""
        self._called = False
        self._refused: str = ""
        self._log = get_logger("restow.store")

    def fetch(self, prefix: Prefix, tell: Callable[[Answer], None]) -> None:
        """Request a state that a command wants, and ``tell`` how that ended."""
        self._wanted.setdefault(prefix, []).append(tell)
        self.hear(prefix)

    def hear(self, prefix: Prefix) -> None:
        """Note that a state is worth keeping. Returns at once, on any thread."""
        for dropped in self.waiting.add(prefix):
            self._run(partial(self._tell, dropped, refused("QUEUE_FULL", "too many states wait")))
        if not self._called:
            self._called = True
            self._run(self._next)

    def _next(self) -> None:
        self._called = False
        while len(self._open) < MOST_AT_ONCE and (prefix := self.waiting.take()) is not None:
            if prefix not in self._open:
                self._consider(prefix)

    def _consider(self, prefix: Prefix) -> None:
        try:
            self._holdings.check(prefix)
            if self._holdings.holds(prefix):
                self._holdings.use(prefix)
                self._tell(prefix, Answer(Outcome.DONE, prefix.position_tokens))
                return
            answer = self._session.find([prefix.chain], limit=1)
        except RestowError as error:
            self._refuse(prefix, error)
            return
        self._open.add(prefix)
        answer.add_done_callback(lambda _: self._run(lambda: self._found(prefix, answer)))

    def _found(self, prefix: Prefix, answer: Future[Holders]) -> None:
        """Request the state if someone holds it: nothing is evicted for a state that is gone."""
        self._open.discard(prefix)
        try:
            (holders,) = answer.result()
            tokens = max((holder.tokens for holder in holders), default=0)
            if tokens == prefix.position_tokens:
                self._reserve(prefix)
            else:
                words = f"nobody holds more than the first {tokens} tokens"
                missing = Answer(Outcome.MISSING, tokens, "NOT_HELD", words)
                self._tell(prefix, missing)
        except RestowError as error:
            self._refuse(prefix, error)
        self._next()

    def _reserve(self, prefix: Prefix) -> None:
        pinned = self._holdings.reserve(prefix)
        if pinned is not None:
            self._ask(pinned)
        else:
            words = "a state is not kept, because the memory has no room"
            self._log.warning(words, tokens=prefix.position_tokens)
            self._tell(prefix, refused("STORE_FULL", words))

    def _ask(self, pinned: Pinned) -> None:
        prefix = pinned.prefix
        try:
            delivery = self._session.request(
                f"keep-{uuid.uuid4().hex}",
                pinned.blocks,
                held_tokens=pinned.held_tokens,
                prefix=prefix,
            )
        except RestowError:
            self._holdings.give_up(pinned)
            raise
        self.asked += 1
        self._open.add(prefix)
        delivery.add_done_callback(lambda _: self._run(lambda: self._ended(delivery, pinned)))

    def _ended(self, delivery: BlockingDelivery, pinned: Pinned) -> None:
        self._open.discard(pinned.prefix)
        error = delivery.exception()
        if error is None and delivery.result().done:
            try:
                self._holdings.commit(pinned)
            except ChainFormError as other:
                self._refuse(pinned.prefix, other)
            else:
                self.kept += 1
                self._arrived(pinned.prefix)
                tokens = pinned.prefix.position_tokens
                self._tell(pinned.prefix, Answer(Outcome.DONE, tokens))
        else:
            why = str(error or delivery.result().reason)
            words = "a state did not arrive"
            self._log.info(words, tokens=pinned.prefix.position_tokens, detail=why)
            self._tell(pinned.prefix, refused("NOT_ARRIVED", f"{words}: {why}"))
            delivery.pages_free.add_done_callback(
                lambda free: self._run(lambda: self._give_up_if(free, pinned))
            )
        self._next()

    def _give_up_if(self, free: Future[None], pinned: Pinned) -> None:
        """Release the pages, unless nobody can tell whether they are still written to."""
        if free.exception() is None:
            self._holdings.give_up(pinned)

    def _tell(self, prefix: Prefix, answer: Answer) -> None:
        """Tell whoever wants the state how its request ended."""
        for tell in self._wanted.pop(prefix, ()):
            tell(answer)

    def _refuse(self, prefix: Prefix, error: RestowError) -> None:
        """Log why a state is not kept, unless the last refusal was the same."""
        self._tell(prefix, refused(error.reason, error.message))
        if error.message != self._refused:
            self._refused = error.message
            self._log.warning("a state is not kept", reason=error.reason, detail=error.message)
