"""What a scheduler does with its prompts: the same in simulated engines and in real ones."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from restow.broker.client import Delivery, EngineSession, Prefix
from restow.broker.errors import HandoffConflictError, RestowError
from stamped.memory import HostMemory, Ids
from stamped.pages import Pages
from stamped.stamps import Stamps, Violation

COMPUTED_IN_CHUNKS = 0.4
"""Of the prompts that are long enough; their leading tokens may be read while others are computed.
"""
PREEMPTED = 0.15
"""Of the chunks behind the first; the prompt's pages go to others, and it is computed again."""
NAMED_TWICE = 0.1
"""Of the demands; another one names the same pages."""
NAMED_TWICE_MS = 300
NO_PAGES_S = 10.0
"""After which a prompt that finds no free pages is given up."""


@dataclass(frozen=True)
class Prompt:
    """What is handed over, and how the two sides behave."""

    name: str
    """What it is of. ``id#word`` is another prompt than ``id``, under the same handoff's id."""
    position_tokens: int
    compute_s: float
    lease_ms: int
    hold_ms: int
    timeout_ms: int
    attempt_s: float = 0.0
    """How long before P computes it under the id once more ranks have fenced an attempt, of which
    nothing was published; 0: there was none."""
    p_cancels_s: float = 0.0
    """After which P gives it up; 0: never."""
    d_cancels_s: float = 0.0
    uses_s: float = 0.0
    """How long D keeps what it got."""
    readers: int = 0
    """As P publishes it; 0: it names none."""
    told_readers: int = 0
    """As D's are told of it by a router."""
    declines: bool = False
    """Whether this D goes on without it."""
    may_decline: int = 0
    """How many of the readers may do that."""

    @property
    def handoff_id(self) -> str:
        """Return the id under which the prompt is handed over."""
        return self.name.split("#")[0]

    @property
    def counted(self) -> int:
        """Return how many readers must have the state before P's pages are free."""
        return self.readers or self.told_readers or 1

    @property
    def content(self) -> bytes:
        """Return the content hash of the prompt."""
        return hashlib.sha256(self.name.encode()).digest()

    @property
    def sampled_token(self) -> int | None:
        """Return the token that P samples behind the prompt; None: D samples it."""
        drawn = int.from_bytes(self.content[:4])
        return drawn >> 1 if drawn % 2 else None


@dataclass(frozen=True)
class Received:
    """What D's pages hold when its demand has ended; a state if it ended well."""

    ids: Ids
    stamps: set[int]
    done: bool


class Requests:
    """The prompts of one life of an engine."""

    def __init__(
        self,
        session: Callable[[], Awaitable[EngineSession]],
        memory: HostMemory,
        stamps: Stamps,
        rng: Random,
    ) -> None:
        """Keep the prompts of a life; ``session`` waits until the engine has a session."""
        self.pages = Pages(memory, stamps, rng)
        self.pending: set[str] = set()
        self.said: dict[str, tuple[str, str]] = {}
        """How handoffs ended here."""
        self.late_s: dict[str, float] = {}
        """D: how long after their timeouts handoffs ended; P: after their hold."""
        self.revision = ""
        """Which weights the engine has; empty: those that it began with."""
        self.stamps = stamps
        self._session, self._memory, self._rng = session, memory, rng

    async def prefill(
        self,
        prompt: Prompt,
        computed: Callable[[str, int], None],
        fence: Callable[[str, int], None],
    ) -> None:
        """Play P's part. ``computed`` hears of the stamp before everything is fenced.

        ``fence`` is given how many leading tokens are complete; 0: all are.
        """
        session = await self._session()
        if prompt.attempt_s:
            await self._attempt(prompt, session, fence)
        if (taken := await self.take(prompt)) is None:
            return self._end(prompt, "", "NO_PAGES")
        ids = taken
        early = bool(prompt.attempt_s) or self._rng.random() < 0.3
        chunks = [] if early else self._chunks(prompt)
        stamp, revision = self.pages.stamp(), self.revision

        def publish_chunk(tokens: int) -> asyncio.Future[Any]:
            part = self._memory.holding(ids, tokens)
            self.pages.write(part, stamp)
            return session.publish(
                prompt.handoff_id,
                part,
                0,
                final=False,
                lease_ms=prompt.lease_ms,
                hold_ms=prompt.hold_ms,
                readers=prompt.readers,
            )

        def publish() -> asyncio.Future[Any]:
            return session.publish(
                prompt.handoff_id,
                ids,
                prompt.position_tokens,
                lease_ms=prompt.lease_ms,
                hold_ms=prompt.hold_ms,
                content=prompt.content,
                readers=prompt.readers,
                sampled_token=prompt.sampled_token,
            )

        try:
            ended = publish() if early else None
            for tokens in chunks:
                await asyncio.sleep(prompt.compute_s / (len(chunks) + 1))
                if (ended is not None and ended.done()) or self.revision != revision:
                    break
                if ended is not None and self._rng.random() < PREEMPTED:
                    session.take_back(prompt.handoff_id)
                    self.pages.give(ids)
                    if (again := await self.take(prompt)) is None:
                        session.cancel(prompt.handoff_id)
                        return self._end(prompt, "", "NO_PAGES")
                    ids = again
                    break
                ended = publish_chunk(tokens)
                fence(prompt.handoff_id, tokens)
            await asyncio.sleep(prompt.compute_s / (len(chunks) + 1))
            if self.revision != revision:  # nothing of it is fenced
                if ended is None:
                    self._end(prompt, "", "REVISED")
                    return self.pages.give(ids)
                session.cancel(prompt.handoff_id)
            elif ended is None or not ended.done():
                self.stamps.revisions[stamp] = revision
                computed(prompt.name, self.pages.write(ids, stamp))
                ended = ended if early and ended else publish()
                fence(prompt.handoff_id, 0)
        except HandoffConflictError as error:
            # The id was used before: nobody can ask for this under it.
            self._end(prompt, "REFUSED", error.reason)
            return self.pages.give(ids)
        due_s = asyncio.get_running_loop().time() + prompt.hold_ms / 1000
        await self._await_end(prompt, session, ended, prompt.p_cancels_s, due_s)
        self.pages.give(ids)

    async def _attempt(
        self, prompt: Prompt, session: EngineSession, fence: Callable[[str, int], None]
    ) -> None:
        """Compute and fence a prompt, and give it up before it is published."""
        if (ids := await self.take(prompt)) is None:
            return
        self.pages.write(ids)
        fence(prompt.handoff_id, 0)
        await asyncio.sleep(prompt.attempt_s / 2)
        session.cancel(prompt.handoff_id)
        self.pages.give(ids)
        await asyncio.sleep(prompt.attempt_s / 2)

    async def decode(self, prompt: Prompt, received: Callable[[str, set[int]], None]) -> None:
        """Play D's part. ``received`` hears of the stamps that came, if all went well."""
        if prompt.declines:
            return await self._decline(prompt)
        if (came := await self.receive(prompt)) is None:
            return
        # D goes on from there: nothing may land any more, were it the same once again.
        self.pages.write(came.ids)
        if came.done:
            received(prompt.name, came.stamps)
            await asyncio.sleep(prompt.uses_s)
        self.pages.give(came.ids)

    async def _decline(self, prompt: Prompt) -> None:
        session = await self._session()
        ended = session.decline(prompt.handoff_id, readers=prompt.told_readers)
        due_s = asyncio.get_running_loop().time()
        if await self._await_end(prompt, session, ended, 0.0, due_s):
            raise Violation(f"{prompt.name} is DONE for a D that went on without it")

    async def receive(self, prompt: Prompt, prefix: Prefix | None = None) -> Received | None:
        """Ask for a state, or for that of ``prefix``; None: there are no pages for it."""
        session = await self._session()
        if (ids := await self.take(prompt)) is None:
            self._end(prompt, "", "NO_PAGES")
            return None
        self.pages.lend(ids)
        due_s = asyncio.get_running_loop().time() + prompt.timeout_ms / 1000
        takes = prefix is None and prompt.sampled_token is not None
        ended = session.request(
            prompt.handoff_id,
            ids,
            position_tokens=0 if prefix else prompt.position_tokens,
            timeout_ms=prompt.timeout_ms,
            content=b"" if prefix else prompt.content,
            readers=0 if prefix else prompt.told_readers,
            prefix=prefix,
            takes_sampled_token=takes,
        )
        named_twice = self._name_twice(session, prompt, ids)
        done = await self._await_end(prompt, session, ended, prompt.d_cancels_s, due_s)
        if named_twice is not None and not named_twice.cancel():
            _check_refused(prompt, named_twice)
        _check_sampled(prompt, ended, done and takes)
        await ended.pages_free
        return Received(ids, self.pages.take_back(ids, prompt.position_tokens), done)

    def _name_twice(self, session: EngineSession, prompt: Prompt, ids: Ids) -> Delivery | None:
        """Ask for another handoff into the same pages, now and then, as a faulty engine would.

        Nobody publishes that handoff, so nothing is written if the first demand has ended by then.
        """
        if self._rng.random() >= NAMED_TWICE:
            return None
        name = f"{prompt.handoff_id} in the same pages"
        return session.request(name, ids, timeout_ms=NAMED_TWICE_MS)

    def _chunks(self, prompt: Prompt) -> list[int]:
        """Return how many tokens are computed after each of several steps but the last."""
        inner = range(1, prompt.position_tokens)
        if not inner or self._rng.random() >= COMPUTED_IN_CHUNKS:
            return []
        return sorted(self._rng.sample(inner, self._rng.randint(1, min(3, len(inner)))))

    async def take(self, prompt: Prompt) -> Ids | None:
        """Wait for pages for a state; None: there were none in time."""
        counts = self._memory.counts(prompt.position_tokens)
        for _ in range(20):
            if (ids := self.pages.take(counts)) is not None:
                return ids
            await asyncio.sleep(NO_PAGES_S / 20)
        return None

    async def _await_end(
        self,
        prompt: Prompt,
        session: EngineSession,
        ended: asyncio.Future[Any],
        cancels_s: float,
        due_s: float,
    ) -> bool:
        """Wait for the end of a handoff; return whether it ended well."""
        loop = asyncio.get_running_loop()
        if cancels_s and isinstance(ended, Delivery) and self._rng.random() < 0.5:
            loop.call_later(cancels_s, ended.cancel)
        elif cancels_s:
            loop.call_later(cancels_s, session.cancel, prompt.handoff_id)
        try:
            told = await asyncio.shield(ended)
        except asyncio.CancelledError:
            if not ended.cancelled():
                raise
            state, reason, done = "GIVEN_UP", "", False
        except RestowError as error:
            state, reason, done = "REFUSED", error.reason, False
        else:
            state, reason, done = told.state, told.reason, bool(told.done)
            readers = 1 if isinstance(ended, Delivery) else prompt.counted
            least = readers if isinstance(ended, Delivery) else readers - prompt.may_decline
            if done and not max(least, 1) <= told.delivered <= readers:
                raise Violation(f"{prompt.name} is DONE, and {told.delivered} of {readers} have it")
        self.late_s[prompt.name] = loop.time() - due_s
        self._end(prompt, state, reason)
        return done

    def _end(self, prompt: Prompt, state: str, reason: str) -> None:
        self.said[prompt.name] = state, reason
        self.pending.discard(prompt.name)


def _check_refused(prompt: Prompt, twice: Delivery) -> None:
    """Check that the broker did not accept a demand into pages of another demand."""
    if not twice.cancelled() and twice.exception() is None:
        ended = twice.result()
        if ended.reason == "NOT_PUBLISHED":
            raise Violation(f"pages of {prompt.name} were taken for {ended.handoff_id} as well")


def _check_sampled(prompt: Prompt, ended: Delivery, must: bool) -> None:
    """Check that D heard P's true token, or none; if ``must``, it has heard the token."""
    told = ended.sampled.result() if is_told(ended.sampled) else None
    if told != prompt.sampled_token and (must or told is not None):
        raise Violation(f"D goes on behind {told}, and P sampled {prompt.sampled_token}")


def is_told(sampled: asyncio.Future[int]) -> bool:
    """Return whether the token has come."""
    return sampled.done() and not sampled.cancelled()
