"""Follow D's requests: which of them wait for a state, and how each wait ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from restow.agents.engines.common.blocks import BlockLists
from restow.agents.engines.common.handoff_ends import HandoffEnd, HandoffEnds
from restow.broker.client import BlockingDelivery, BlockingSession, Prefix


@dataclass(frozen=True, slots=True)
class _Wait:
    """A request that may begin with another engine's state."""

    handoff_id: str
    position_tokens: int
    timeout_ms: int
    trace_parent: str
    prefix: Prefix | None
    readers: int
    takes_sampled: bool


@dataclass(slots=True)
class DecodeSide:
    """The requests of D that wait for states. Belongs to the scheduler's thread."""

    session: BlockingSession
    timeout_ms: int
    _ends: HandoffEnds = field(default_factory=HandoffEnds)
    _waits: dict[str, _Wait] = field(default_factory=dict)
    """By request: waits for which no state was asked for or declined yet."""
    _loading: dict[str, BlockingDelivery] = field(default_factory=dict)
    """By request: states that were asked for and have not arrived."""

    def begin(
        self,
        request_id: str,
        handoff_id: str,
        position_tokens: int,
        timeout_ms: int = 0,
        trace_parent: str = "",
        prefix: Prefix | None = None,
        readers: int = 0,
        takes_sampled: bool = False,
    ) -> None:
        """Follow a request whose state another engine has, or will have.

        ``prefix``: the state may come from any engine that holds it; the broker hears of the
        handoff when the state is asked for. ``readers``: the number of D's that read the handoff,
        where a router gave it. ``takes_sampled``: D goes on behind the token that P samples.
        """
        timeout_ms = timeout_ms or self.timeout_ms
        more = (timeout_ms, trace_parent, prefix, readers, takes_sampled)
        self._waits[request_id] = _Wait(handoff_id, position_tokens, *more)

    def loadable_tokens(self, request_id: str, computed_tokens: int) -> int:
        """Return how many tokens can be loaded beyond those computed here. Changes nothing."""
        wait = self._waits.get(request_id)
        return 0 if wait is None else max(wait.position_tokens - computed_tokens, 0)

    def waits(self, request_id: str) -> bool:
        """Return whether the request has neither asked for its state nor declined it."""
        return request_id in self._waits

    def position_tokens(self, request_id: str) -> int:
        """Return the position of the state that the request waits for."""
        return self._waits[request_id].position_tokens

    def load(
        self,
        request_id: str,
        blocks: BlockLists,
        external_tokens: int,
        content: bytes,
        write_mark: int = 0,
    ) -> BlockingDelivery:
        """Ask for the state of ``content``, of which D has all but ``external_tokens``.

        ``write_mark``: D's earlier writes to the blocks are over when the agents are told of this
        mark.
        """
        wait = self._waits.pop(request_id)
        delivery = self.session.request(
            wait.handoff_id,
            blocks,
            held_tokens=wait.position_tokens - external_tokens,
            position_tokens=0 if wait.prefix else wait.position_tokens,
            timeout_ms=wait.timeout_ms,
            trace_parent=wait.trace_parent,
            content=b"" if wait.prefix else content,
            prefix=wait.prefix,
            readers=wait.readers,
            takes_sampled_token=wait.takes_sampled,
            write_mark=write_mark,
        )
        self._loading[request_id] = delivery
        self._ends.watch(
            request_id, wait.handoff_id, delivery, delivery.pages_free, external_tokens
        )
        return delivery

    def do_without(self, request_id: str, why: str) -> None:
        """Decline the state: D computes the prompt itself, or does not need it. Frees P's pages."""
        wait = self._waits.pop(request_id, None)
        if wait is not None and wait.prefix is None:
            self.session.decline(wait.handoff_id, why, readers=wait.readers)

    def finish(self, request_id: str) -> None:
        """Forget a request that has ended, for whatever reason."""
        self.do_without(request_id, "its request ended before it was scheduled")
        delivery = self._loading.pop(request_id, None)
        if delivery is not None:
            delivery.cancel()  # this demand alone: another request may have the same handoff

    def received(self) -> list[HandoffEnd]:
        """Return the waits that have ended since the last call. The pages are D's own again."""
        ended = list(self._ends.take())
        for end in ended:
            self._loading.pop(end.request_id, None)
            if end.reason:
                end.log("no state was received")
        return ended
