"""`PrefillSide` follows P's requests: what is published, fenced, and held until D has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from restow.agents.engines.common.groups import BlockLists
from restow.agents.engines.common.handoff_ends import HandoffEnd, HandoffEnds
from restow.broker.client import BlockingSession


@dataclass(slots=True)
class PrefillSide:
    """The prompts of P. Belongs to the scheduler's thread."""

    session: BlockingSession
    lease_ms: int
    hold_ms: int
    _ends: HandoffEnds = field(default_factory=HandoffEnds)
    _handoffs: dict[str, Sequence[str]] = field(default_factory=dict)
    """By request: the handoffs that its prompt is computed for."""
    _readers: dict[str, int] = field(default_factory=dict)
    """By request: for how many D's each of these is, where a router said so."""
    _unfenced: dict[str, int] = field(default_factory=dict)
    """By request: tokens of its prompt, which is not yet computed."""
    _held: dict[str, int] = field(default_factory=dict)
    """By request that is finished: of how many handoffs D may still read its pages."""
    _held_blocks: dict[str, int] = field(default_factory=dict)
    """By such a request: how many blocks it has."""

    def begin(
        self,
        request_id: str,
        handoff_ids: Sequence[str],
        prompt_tokens: int,
        trace_parent: str = "",
        readers: int = 0,
    ) -> None:
        """A prompt came in. D may know of it from now on, and learns if it is given up."""
        self._handoffs[request_id] = handoff_ids
        if readers:
            self._readers[request_id] = readers
        self._unfenced[request_id] = prompt_tokens
        for handoff_id in handoff_ids:
            self.session.publish(
                handoff_id,
                {},
                0,
                final=False,
                lease_ms=self.lease_ms,
                hold_ms=self.hold_ms,
                trace_parent=trace_parent,
                readers=readers,
            )

    def completed(self, progress: Iterable[tuple[str, int]]) -> list[str]:
        """The handoffs of those requests whose prompt this step completes: workers fence them.

        ``progress`` are the step's requests, and how many of their tokens are computed when it is
        over. It is only looked at while a prompt is to be completed.
        """
        if not self._unfenced:
            return []
        found: list[str] = []
        for request_id, tokens in progress:
            if tokens >= self._unfenced.get(request_id, tokens + 1):
                del self._unfenced[request_id]
                found += self._handoffs[request_id]
        return found

    def finish(
        self,
        request_id: str,
        blocks: BlockLists,
        position_tokens: int,
        content: bytes,
        sampled_token: int | None = None,
    ) -> None:
        """The prompt is computed. Its pages are held until `sent` names it.

        ``sampled_token``: what P has sampled behind all of it, for a D that takes that.
        """
        readers, handoff_ids = self._readers.get(request_id, 0), self._pop(request_id)
        self._held[request_id] = len(handoff_ids)
        self._held_blocks[request_id] = sum(len(ids) for ids in blocks.values())
        for handoff_id in handoff_ids:
            future = self.session.publish(
                handoff_id,
                blocks,
                position_tokens,
                lease_ms=self.lease_ms,
                hold_ms=self.hold_ms,
                content=content,
                readers=readers,
                sampled_token=sampled_token,
            )
            self._ends.watch(request_id, handoff_id, future)

    def give_up(self, request_id: str, why: str) -> None:
        """The request ended before its prompt was computed: D is told, nothing is held."""
        for handoff_id in self._pop(request_id):
            self.session.cancel(handoff_id, why)

    def follows(self, request_id: str) -> bool:
        """Whether the request's prompt is computed for a handoff that nobody has given up."""
        return request_id in self._handoffs

    @property
    def held_blocks(self) -> int:
        """How many blocks are held for D, of all groups."""
        return sum(self._held_blocks.values())

    def sent(self) -> tuple[list[HandoffEnd], list[str]]:
        """What has ended since the last call, and the requests whose pages are free by that."""
        ended, free = list(self._ends.take()), []
        for end in ended:
            self._held[end.request_id] -= 1
            if not self._held[end.request_id]:
                del self._held[end.request_id], self._held_blocks[end.request_id]
                free.append(end.request_id)
            if end.failed:
                end.tell("a state was not handed over")
        return ended, free

    def _pop(self, request_id: str) -> Sequence[str]:
        self._unfenced.pop(request_id, None)
        self._readers.pop(request_id, None)
        return self._handoffs.pop(request_id)
