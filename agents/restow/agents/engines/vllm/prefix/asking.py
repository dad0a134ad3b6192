"""`Asking` finds who holds more of a prompt than is cached here, before it is computed."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from uuid import uuid4

from restow.agents.engines.common.decode import DecodeSide
from restow.agents.engines.vllm.prefix.request_chains import RequestChains
from restow.broker.client import BlockingSession, HashForm, PrefixChain
from restow.broker.client.engine.chains import Holders
from restow.broker.errors import RestowError
from restow.broker.logs import get_logger

PATIENCE_MS = 10_000
"""How long it waits for a state: who holds it has it at once."""


@dataclass(frozen=True, slots=True)
class _Question:
    """What the broker was asked for a request."""

    chain: PrefixChain
    answer: Future[Holders]
    until_s: float

    @property
    def is_over(self) -> bool:
        """Whether nobody need wait any longer."""
        return self.answer.done() or time.monotonic() >= self.until_s


class Asking:
    """Asks once for each request. Belongs to the scheduler's thread."""

    def __init__(
        self,
        session: BlockingSession,
        engine_id: str,
        form: HashForm,
        chains: RequestChains,
        ends: bool,
        find_s: float,
    ) -> None:
        """Ask for prefixes, by ``chains`` of ``form``, that others than ``engine_id`` hold.

        ``ends``: for the ends of replies in a prompt too. A request waits ``find_s`` for the word.
        """
        self._session, self._engine_id, self._find_s = session, engine_id, find_s
        self._form, self._chains, self._ends = form, chains, ends
        self._new: set[str] = set()
        """Requests that may ask, and have not yet."""
        self._open: dict[str, _Question] = {}
        """By request."""
        self._failed = ""
        """Why the last question had no answer, if it had none."""
        self._log = get_logger("restow.vllm").bind(engine=engine_id)

    def begin(self, request_id: str) -> None:
        """A request came in that may begin with anybody's state."""
        self._new.add(request_id)

    def end(self, request_id: str) -> None:
        """It has ended, or needs no answer."""
        self._new.discard(request_id)
        question = self._open.pop(request_id, None)
        if question is not None:
            question.answer.cancel()

    def end_all(self) -> None:
        """No request asks any more."""
        for request_id in [*self._new, *self._open]:
            self.end(request_id)

    def look(
        self,
        request_id: str,
        computed_tokens: int,
        last_tokens: int,
        decode: DecodeSide,
        trace_parent: str,
    ) -> bool:
        """Return whether it is settled if the request waits for a state, which ``decode`` has then.

        It does if somebody holds one that stands a quantum or more behind the
        ``computed_tokens`` that are cached here, and at ``last_tokens`` at most.
        """
        least_tokens = computed_tokens + self._form.quantum_tokens
        if request_id in self._new:
            self._new.discard(request_id)
            if least_tokens <= last_tokens and self._session.is_open:
                self._ask(request_id, last_tokens)
        question = self._open.get(request_id)
        if question is None:
            return True
        if not question.is_over:
            return False
        tokens = self._most_tokens(question)
        self.end(request_id)
        if tokens >= least_tokens:
            prefix = question.chain.prefix(tokens)
            decode.begin(request_id, uuid4().hex, tokens, PATIENCE_MS, trace_parent, prefix)
        return True

    def _ask(self, request_id: str, last_tokens: int) -> None:
        chain = self._chains.chain(request_id)
        if chain is None:
            return
        hashes = chain.hashes[: last_tokens // self._form.quantum_tokens]
        ends = self._chains.ends(request_id, last_tokens) if self._ends else ()
        asked = PrefixChain(self._form, hashes, ends=ends)
        answer = self._session.find([asked], timeout_s=self._find_s)
        self._open[request_id] = _Question(asked, answer, time.monotonic() + self._find_s)

    def _most_tokens(self, question: _Question) -> int:
        """How much another engine holds."""
        if not question.answer.done():
            self._not_known("LATE", f"the broker has not answered in {self._find_s * 1e3:g} ms")
            return 0
        try:
            (holders,) = question.answer.result()
        except CancelledError:
            return 0
        except RestowError as error:
            self._not_known(error.reason, error.message)
            return 0
        self._failed = ""
        return max((one.tokens for one in holders if one.engine_id != self._engine_id), default=0)

    def _not_known(self, reason: str, detail: str) -> None:
        """Say why a question had no answer, once in a row."""
        if reason != self._failed:
            self._failed = reason
            words = "who holds prefixes is not known"
            self._log.warning(words, reason=reason, detail=detail)
