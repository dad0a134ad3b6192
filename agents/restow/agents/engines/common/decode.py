"""`DecodeSide` follows D's requests: which wait for a state, and how the wait ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from restow.agents.engines.common.groups import BlockLists
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
    """The waits of D. Belongs to the scheduler's thread."""

    session: BlockingSession
    timeout_ms: int
    _ends: HandoffEnds = field(default_factory=HandoffEnds)
    _waits: dict[str, _Wait] = field(default_factory=dict)
    """By request; of those that have not yet decided where their state comes from."""
    _loading: dict[str, BlockingDelivery] = field(default_factory=dict)
    """By request; what was asked for and has not come yet."""

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
        """A request came in whose state another engine has, or will have.

        ``prefix``: whichever engine that is; the broker hears of it when the state is asked for.
        ``readers``: for how many D's the handoff is, where a router said so. ``takes_sampled``: it
        goes on behind the token that P samples.
        """
        timeout_ms = timeout_ms or self.timeout_ms
        said = (timeout_ms, trace_parent, prefix, readers, takes_sampled)
        self._waits[request_id] = _Wait(handoff_id, position_tokens, *said)

    def loadable_tokens(self, request_id: str, computed_tokens: int) -> int:
        """How many tokens beyond those computed here can be loaded. Changes nothing."""
        wait = self._waits.get(request_id)
        return 0 if wait is None else max(wait.position_tokens - computed_tokens, 0)

    def waits(self, request_id: str) -> bool:
        """Whether the request has not yet decided where its state comes from."""
        return request_id in self._waits

    def position_tokens(self, request_id: str) -> int:
        """Where the state that the request waits for will stand."""
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

        ``write_mark``: what D still writes to the blocks is done when the agents are told of it.
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
        """D computes the prompt itself, or needs it no more: P's pages are free at once."""
        wait = self._waits.pop(request_id, None)
        if wait is not None and wait.prefix is None:
            self.session.decline(wait.handoff_id, why, readers=wait.readers)

    def finish(self, request_id: str) -> None:
        """The request has ended, however."""
        self.do_without(request_id, "its request ended before it was scheduled")
        delivery = self._loading.pop(request_id, None)
        if delivery is not None:
            delivery.cancel()  # its own demand: another request may have the same handoff

    def received(self) -> list[HandoffEnd]:
        """Requests that need not wait any longer, since the last call. Pages are D's own again."""
        ended = list(self._ends.take())
        for end in ended:
            self._loading.pop(end.request_id, None)
            if end.reason:
                end.tell("no state was received")
        return ended
