"""The engines of each side: which is asked, whether it is well, and what it answers."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Self

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout

from restow.broker.client import PrefixHolder
from restow.broker.errors import RestowError
from restow.broker.logs import get_logger
from restow.broker.router.bodies import (
    DONE,
    Body,
    Said,
    event_data,
    json_of,
    meaning,
)

EVENT_END: Final = re.compile(rb"\r?\n\r?\n")
Held = Mapping[str, PrefixHolder]
"""What engines hold of one prompt, by their ids."""


class AnswerError(RestowError, status="UNAVAILABLE", reason="NOT_ANSWERED"):
    """A request without an answer. If there is an ``engine`` to blame another one may have it."""

    def __init__(
        self, code: int, message: str, engine: Engine | None = None, said: Any = None
    ) -> None:
        """``said`` is what the engine answered, if it did."""
        super().__init__(message[:500])
        self.code, self.engine = code, engine
        kind = "engine_failed" if engine else "invalid_request_error"
        own = {"message": self.message, "type": kind, "param": None, "code": code}
        error = said.get("error") if isinstance(said, dict) else None
        self.body: Body = {"error": error or own}
        self.fate: Body | None = error.get("handoff") if isinstance(error, dict) else None
        """What became of the handoff, if the engine says that it failed by that."""


@dataclass(slots=True, eq=False)
class Engine:
    """One engine, by its base address."""

    base: str
    engine_id: str = ""
    """Its id at the broker; empty: not known."""
    in_flight: int = 0
    healthy: bool = True
    aside_until_s: float = 0.0
    waits: set[asyncio.Timeout] = field(default_factory=set)
    """For answers that it has not begun."""

    @classmethod
    def named(cls, words: str) -> Self:
        """Return the engine of ``URL`` or ``ID=URL``.

        >>> Engine.named("p1=http://h:8100/").engine_id, Engine.named("http://h/?a=b").engine_id
        ('p1', '')
        """
        engine_id, equals, base = words.partition("=")
        if is_url(words) or not equals:
            engine_id, base = "", words
        return cls(base.rstrip("/"), engine_id)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count one more request under way."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def failed(self, message: str, said: Any = None, code: int = 502) -> AnswerError:
        """Return the error of an engine that did not answer, or answered that it can not."""
        return AnswerError(code, f"{self.base}: {message}", self, said)


def is_url(words: str) -> bool:
    """Return whether ``words`` are a URL without an id before it."""
    return words.startswith(("http://", "https://"))


class Engines:
    """All engines that prefill, or all that decode."""

    def __init__(self, named: Sequence[str], busy_tokens: int = 0) -> None:
        """Take engines as `Engine.named` does.

        ``busy_tokens`` is how many tokens held outweigh one request more under way.
        """
        self.engines = tuple(map(Engine.named, named))
        self._busy_tokens = busy_tokens
        self._log = get_logger("restow.router")

    def choose(
        self, failed: Mapping[Engine, bool], held: Held | None = None, only_well: bool = False
    ) -> Engine | None:
        """Return the engine that holds most and is not busy; None: there is none left to ask.

        Of those that ``failed`` before, True means not to ask again. Each request under way counts
        against what an engine holds of the prompt. Equals are drawn by lot, so that the two sides
        do not go in step.
        """
        now_s = time.monotonic()

        def rank(engine: Engine) -> tuple[bool, bool, int, int, float]:
            busy, tokens = engine.in_flight, 0
            unwell = not engine.healthy or now_s < engine.aside_until_s
            if (holder := (held or {}).get(engine.engine_id)) is not None:
                # The broker knows of what other routers have under way.
                busy, tokens = max(busy, holder.open), holder.tokens
                unwell |= holder.draining
            worth = busy * self._busy_tokens - tokens
            return unwell, engine in failed, worth, busy, random.random()  # noqa: S311

        ranks = {rank(one): one for one in self.engines if not failed.get(one)}
        best = min(ranks, default=None)
        return None if best is None or (only_well and best[0]) else ranks[best]

    async def watch(
        self, http: ClientSession, engine: Engine, look_s: float, health_s: float, last: bool
    ) -> None:
        """Ask an engine how it is, for ever. What waits for one that is lost waits no longer.

        An engine is lost when it does not answer in ``health_s`` twice, or says that it is not
        well; a ``last`` resort only if another one is well.
        """
        missed, limit = 0, ClientTimeout(health_s)
        while True:
            try:
                async with http.get(
                    engine.base + "/health", timeout=limit, allow_redirects=False
                ) as response:
                    missed = 0 if response.status == 200 else 2
            except (ClientError, TimeoutError) as error:
                missed += 1 if isinstance(error, TimeoutError) else 2
            if engine.healthy is bool(missed):
                engine.healthy = not missed
                self._log.warning("an engine's health", engine=engine.base, healthy=not missed)
            if missed > 1 and (not last or any(one.healthy for one in self.engines)):
                for wait in engine.waits:
                    if not wait.expired():
                        wait.reschedule(0)
            await asyncio.sleep(look_s)


@dataclass(slots=True)
class Answer:
    """An engine's answer that has begun well: ``whole``, or a stream from its first token on."""

    engine: Engine
    response: ClientResponse
    whole: bytes = b""
    events: AsyncIterator[tuple[bytes, Any]] | None = None
    first: tuple[bytes, Any] = (b"", None)
    prefill: asyncio.Future[Answer] | None = None
    """P's answer, if P computes the prompt."""


async def ask(
    http: ClientSession,
    engine: Engine,
    path: str,
    headers: Mapping[str, str],
    body: bytes | None,
    limits_s: tuple[float, float],
    reached: asyncio.Future[None] | None = None,
) -> Answer:
    """Wait for the whole of an answer, or for a stream's first token. Raises `AnswerError`.

    ``limits_s`` are for that, and between pieces of a stream; ``reached`` is set when the engine
    has been sent the request.
    """
    answer_s, silence_s = limits_s
    try:
        async with asyncio.timeout(answer_s) as wait:
            engine.waits.add(wait)
            response = await http.request(
                "GET" if body is None else "POST",
                engine.base + path,
                data=body,
                headers={**headers, "Content-Type": "application/json"},
                allow_redirects=False,
                trace_request_ctx=reached,
            )
            answer = Answer(engine, response)
            try:
                if response.status < 300 and response.content_type == "text/event-stream":
                    answer.events = _events(answer, silence_s)
                    answer.first = await anext(answer.events)
                else:
                    answer.whole = await response.read()
                    _check(answer)
            except BaseException:
                response.close()
                raise
    except (ClientError, TimeoutError) as error:
        words = str(error) or f"no answer in {answer_s:g} s, or no sign of health"
        raise engine.failed(f"{type(error).__name__}: {words}") from None
    finally:
        engine.waits.discard(wait)
    return answer


def _check(answer: Answer) -> None:
    code, said = answer.response.status, json_of(answer.whole)
    if code == 429 or code >= 500 or 300 <= code < 400:
        raise answer.engine.failed(f"HTTP {code}", said, 502 if code < 400 else code)
    if code >= 400:
        raise AnswerError(code, answer.whole.decode(errors="replace"), said=said)
    if meaning(said) is Said.FAILED:
        raise answer.engine.failed("it gave up its answer", said)


async def _events(answer: Answer, silence_s: float) -> AsyncIterator[tuple[bytes, Any]]:
    """Yield events and their data: from the first token on, all at once that came before it."""
    kept, held, ended, begun = b"", list[tuple[bytes, Any]](), False, False
    chunk = b"-"
    while chunk:
        try:
            async with asyncio.timeout(silence_s if begun else None):
                chunk = await answer.response.content.readany()
        except (ClientError, TimeoutError) as error:
            words = str(error) or f"it was silent for {silence_s:g} s"
            raise answer.engine.failed(f"{type(error).__name__}: {words}") from None
        *events, kept = EVENT_END.split(kept + (chunk or b"\n\n"))
        for event in filter(None, events):
            said = meaning(data := event_data(event))
            if said is Said.FAILED:
                raise answer.engine.failed("its stream broke off", data)
            ended |= said is Said.END
            begun |= said is Said.TOKEN or (said is Said.END and data != DONE)
            held.append((event, data))
            while begun and held:
                yield held.pop(0)
    if not (begun and ended):
        raise answer.engine.failed("its stream ended in its midst")
