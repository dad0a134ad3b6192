"""P's requests: what of them is published, fenced, and held until D has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from restow.agents.engines.vllm.ends import End, Ends
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
    ) -> Future[HandoffEnded]:
        """Publish blocks; the future tells when they are free."""

    def cancel(self, handoff_id: str, detail: str = "") -> None:
        """Give a handoff up."""


@dataclass(slots=True)
class _Prompt:
    """A request whose prompt is computed for another engine."""

    handoff_id: str
    fenced: bool = False


@dataclass(slots=True)
class PrefillSide:
    """The prompts of P. Belongs to the scheduler's thread."""

    session: Publisher
    lease_ms: int
    hold_ms: int
    ends: Ends = field(default_factory=Ends)
    _prompts: dict[str, _Prompt] = field(default_factory=dict)
    _held: set[str] = field(default_factory=set)
    """Requests that are finished, and whose pages D may still read."""

    def begin(self, request_id: str, handoff_id: str, trace_parent: str = "") -> None:
        """A prompt came in. D may know of it from now on, and learns if it is given up."""
        self._prompts[request_id] = _Prompt(handoff_id)
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
        found = []
        for request_id in request_ids:
            prompt = self._prompts.get(request_id)
            if prompt is not None and not prompt.fenced:
                prompt.fenced = True
                found.append(prompt.handoff_id)
        return found

    def finish(self, request_id: str, blocks: Blocks, position_tokens: int) -> bool:
        """The prompt is computed. Returns whether its pages are held until `sent` names it."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return False
        future = self.session.publish(
            prompt.handoff_id,
            blocks,
            position_tokens,
            lease_ms=self.lease_ms,
            hold_ms=self.hold_ms,
        )
        self._held.add(request_id)
        self.ends.watch(request_id, prompt.handoff_id, future)
        return True

    def give_up(self, request_id: str, why: str) -> None:
        """The request ended before its prompt was computed: D is told, nothing is held."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            self.session.cancel(prompt.handoff_id, why)

    def sent(self) -> list[End]:
        """Requests whose pages are free again since the last call."""
        if not self._held:
            return []
        ended = [end for end in self.ends.take() if end.request_id in self._held]
        self._held.difference_update(end.request_id for end in ended)
        for end in ended:
            if end.failed:
                structlog.get_logger("restow.vllm").warning(
                    "a state was not handed over",
                    request=end.request_id,
                    handoff=end.handoff_id,
                    reason=end.reason,
                    detail=end.detail,
                )
        return ended
