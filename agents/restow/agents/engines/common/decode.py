"""D's requests: which wait for a state, and how the wait ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import structlog

from restow.agents.engines.common.ends import End, Ends
from restow.broker.client import BlockingDelivery

Blocks = Mapping[str, Sequence[int]]


class Requester(Protocol):
    """What D needs of a session."""

    def request(
        self,
        handoff_id: str,
        blocks: Blocks,
        *,
        held_tokens: int = 0,
        position_tokens: int = 0,
        timeout_ms: int = 30_000,
        trace_parent: str = "",
        content: bytes = b"",
    ) -> BlockingDelivery:
        """Ask for a state; the delivery tells how it ended, and when its pages are free."""

    def decline(self, handoff_id: str, detail: str = "") -> BlockingDelivery:
        """Go on without a state that was not asked for."""


class _Stage(Enum):
    NEW = auto()
    LOADING = auto()
    OVER = auto()


@dataclass(slots=True)
class _Wait:
    """A request that may begin with another engine's state."""

    handoff_id: str
    position_tokens: int
    timeout_ms: int
    trace_parent: str
    stage: _Stage = _Stage.NEW
    delivery: BlockingDelivery | None = None
    """Once it is asked for."""


@dataclass(slots=True)
class DecodeSide:
    """The waits of D. Belongs to the scheduler's thread."""

    session: Requester
    timeout_ms: int
    ends: Ends = field(default_factory=Ends)
    _waits: dict[str, _Wait] = field(default_factory=dict)
    _loading: set[str] = field(default_factory=set)

    @property
    def idle(self) -> bool:
        """Whether no request has a part to play."""
        return not self._waits

    def begin(
        self,
        request_id: str,
        handoff_id: str,
        position_tokens: int,
        timeout_ms: int = 0,
        trace_parent: str = "",
    ) -> None:
        """A request came in whose state another engine has, or will have."""
        timeout_ms = timeout_ms or self.timeout_ms
        self._waits[request_id] = _Wait(handoff_id, position_tokens, timeout_ms, trace_parent)

    def loadable_tokens(self, request_id: str, computed_tokens: int) -> int:
        """How many tokens beyond those computed here can be loaded. Changes nothing."""
        wait = self._waits.get(request_id)
        if wait is None or wait.stage is not _Stage.NEW:
            return 0
        return max(wait.position_tokens - computed_tokens, 0)

    def waits(self, request_id: str) -> bool:
        """Whether the request has not yet decided where its state comes from."""
        wait = self._waits.get(request_id)
        return wait is not None and wait.stage is _Stage.NEW

    def position_tokens(self, request_id: str) -> int:
        """Where the state that the request waits for will stand."""
        return self._waits[request_id].position_tokens

    def load(self, request_id: str, blocks: Blocks, external_tokens: int, content: bytes) -> None:
        """Ask for the state of ``content``, of which D has all but ``external_tokens``."""
        wait = self._waits[request_id]
        held_tokens = wait.position_tokens - external_tokens
        wait.stage = _Stage.LOADING
        self._loading.add(request_id)
        wait.delivery = self.session.request(
            wait.handoff_id,
            blocks,
            held_tokens=held_tokens,
            position_tokens=wait.position_tokens,
            timeout_ms=wait.timeout_ms,
            trace_parent=wait.trace_parent,
            content=content,
        )
        self.ends.watch(
            request_id, wait.handoff_id, wait.delivery, wait.delivery.pages_free, external_tokens
        )

    def do_without(self, request_id: str, why: str) -> None:
        """D computes the prompt itself: P's pages are free at once."""
        wait = self._waits.get(request_id)
        if wait is not None and wait.stage is _Stage.NEW:
            wait.stage = _Stage.OVER
            self.session.decline(wait.handoff_id, why)

    def finish(self, request_id: str) -> None:
        """The request has ended, however."""
        wait = self._waits.pop(request_id, None)
        if wait is None:
            return
        if wait.stage is _Stage.NEW:
            self.session.decline(wait.handoff_id, "its request ended before it was scheduled")
        elif wait.stage is _Stage.LOADING and wait.delivery is not None:
            wait.delivery.cancel()  # its own demand: another request may have the same handoff

    def received(self) -> list[End]:
        """Requests that need not wait any longer, since the last call. Pages are D's own again."""
        if not self._loading:
            return []
        ended = [end for end in self.ends.take() if end.request_id in self._loading]
        for end in ended:
            self._loading.discard(end.request_id)
            wait = self._waits.get(end.request_id)
            if wait is not None:
                wait.stage = _Stage.OVER
            if end.reason:
                structlog.get_logger("restow.engine").warning(
                    "no state was received",
                    request=end.request_id,
                    handoff=end.handoff_id,
                    reason=end.reason,
                    detail=end.detail,
                )
        return ended
