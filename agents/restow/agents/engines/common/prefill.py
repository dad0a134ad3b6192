"""P's requests: what of them is published, fenced, and held until D has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from restow.agents.engines.common.ends import End, Ends
from restow.broker.client import HandoffEnded

Blocks = Mapping[str, Sequence[int]]


class Publisher(Protocol):
    """What P needs of a session."""

    def publish(
        self,
        handoff_id: str,
        blocks: Blocks,
        position_tokens: int,
        *,
        final: bool = True,
        lease_ms: int = 30_000,
        hold_ms: int = 300_000,
        trace_parent: str = "",
        content: bytes = b"",
    ) -> Future[HandoffEnded]:
        """Publish blocks; the future tells when they are free."""

    def cancel(self, handoff_id: str, detail: str = "") -> None:
        """Give a handoff up."""


@dataclass(slots=True)
class _Prompt:
    """A request whose prompt is computed for another engine."""

    handoff_ids: Sequence[str]
    fenced: bool = False


@dataclass(slots=True)
class PrefillSide:
    """The prompts of P. Belongs to the scheduler's thread."""

    session: Publisher
    lease_ms: int
    hold_ms: int
    ends: Ends = field(default_factory=Ends)
    _prompts: dict[str, _Prompt] = field(default_factory=dict)
    _held: dict[str, str] = field(default_factory=dict)
    """By request and handoff: the request that is finished, and whose pages D may still read."""

    def begin(self, request_id: str, handoff_ids: Sequence[str], trace_parent: str = "") -> None:
        """A prompt came in. D may know of it from now on, and learns if it is given up."""
        self._prompts[request_id] = _Prompt(handoff_ids)
        for handoff_id in handoff_ids:
            self.session.publish(
                handoff_id,
                {},
                0,
                final=False,
                lease_ms=self.lease_ms,
                hold_ms=self.hold_ms,
                trace_parent=trace_parent,
            )

    def completed(self, request_ids: Iterable[str]) -> list[str]:
        """The handoffs of those requests whose prompt this step completes: workers fence them."""
        found: list[str] = []
        for request_id in request_ids:
            prompt = self._prompts.get(request_id)
            if prompt is not None and not prompt.fenced:
                prompt.fenced = True
                found += prompt.handoff_ids
        return found

    def finish(self, request_id: str, blocks: Blocks, position_tokens: int, content: bytes) -> bool:
        """The prompt is computed. Returns whether its pages are held until `sent` names it."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return False
        for handoff_id in prompt.handoff_ids:
            future = self.session.publish(
                handoff_id,
                blocks,
                position_tokens,
                lease_ms=self.lease_ms,
                hold_ms=self.hold_ms,
                content=content,
            )
            key = f"{request_id} {handoff_id}"
            self._held[key] = request_id
            self.ends.watch(key, handoff_id, future)
        return True

    def give_up(self, request_id: str, why: str) -> None:
        """The request ended before its prompt was computed: D is told, nothing is held."""
        prompt = self._prompts.pop(request_id, None)
        for handoff_id in prompt.handoff_ids if prompt is not None else ():
            self.session.cancel(handoff_id, why)

    def sent(self) -> tuple[list[End], set[str]]:
        """What has ended since the last call, and the requests whose pages are free by that."""
        if not self._held:
            return [], set()
        ended = [
            replace(end, request_id=self._held.pop(end.request_id))
            for end in self.ends.take()
            if end.request_id in self._held
        ]
        for end in ended:
            if end.failed:
                structlog.get_logger("restow.engine").warning(
                    "a state was not handed over",
                    request=end.request_id,
                    handoff=end.handoff_id,
                    reason=end.reason,
                    detail=end.detail,
                )
        return ended, {end.request_id for end in ended}.difference(self._held.values())
