"""`EarlyPrefill` publishes leading tokens of P's prompts while the rest of them is computed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from restow.agents.engines.common.groups import BlockLists, Group
from restow.broker.client import BlockingSession


class Scheduled(NamedTuple):
    """What a step of P does of one request."""

    request_id: str
    tokens: int
    """That are computed when it is over."""
    blocks: BlockLists
    """Those that it adds, by group."""


@dataclass(slots=True)
class _Prompt:
    handoff_ids: Sequence[str]
    tokens: int
    readers: int
    counts: dict[str, int] = field(default_factory=dict)
    """How many blocks of each group are published."""


@dataclass(slots=True)
class EarlyPrefill:
    """The prompts that P computes in several steps. Belongs to the scheduler's thread."""

    session: BlockingSession
    lease_ms: int
    hold_ms: int
    groups: frozenset[str]
    """Whose tokens may be read early; none: nothing is."""
    _prompts: dict[str, _Prompt] = field(default_factory=dict)

    @classmethod
    def of(
        cls, session: BlockingSession, lease_ms: int, hold_ms: int, groups: Sequence[Group]
    ) -> EarlyPrefill:
        """For an engine of ``groups``: of a window the last tokens alone stay, so nothing is."""
        tokens = [group for group in groups if not group.is_state]
        windows = any(group.window_tokens or group.whole_blocks for group in tokens)
        names = frozenset() if windows else frozenset(group.name for group in tokens)
        return cls(session, lease_ms, hold_ms, names)

    @property
    def request_ids(self) -> Collection[str]:
        """Of prompts that are not computed yet."""
        return self._prompts.keys()

    def begin(
        self, request_id: str, handoff_ids: Sequence[str], prompt_tokens: int, readers: int
    ) -> None:
        """A prompt came in."""
        if self.groups:
            self._prompts[request_id] = _Prompt(handoff_ids, prompt_tokens, readers)

    def computed(self, scheduled: Iterable[Scheduled]) -> dict[str, int]:
        """Publish what a step adds, and return which handoffs' leading tokens are to be fenced.

        The step that completes a prompt is left to `PrefillSide`.
        """
        fences: dict[str, int] = {}
        for one in scheduled:
            prompt = self._prompts.get(one.request_id)
            if prompt is None:
                continue
            if one.tokens >= prompt.tokens:
                del self._prompts[one.request_id]
                continue
            self._publish(prompt, {name: one.blocks.get(name, ()) for name in self.groups})
            fences |= dict.fromkeys(prompt.handoff_ids, one.tokens)
        return fences

    def preempted(self, request_ids: Iterable[str]) -> None:
        """Take back what was published of prompts whose pages other requests have now.

        D reads such a prompt when P has computed it again: `PrefillSide` publishes it whole.
        """
        for request_id in request_ids:
            prompt = self._prompts.get(request_id)
            if prompt is not None and any(prompt.counts.values()):
                del self._prompts[request_id]
                for handoff_id in prompt.handoff_ids:
                    self.session.take_back(handoff_id, "P has preempted the prompt")

    def end(self, request_id: str) -> None:
        """The request has ended."""
        self._prompts.pop(request_id, None)

    def _publish(self, prompt: _Prompt, blocks: Mapping[str, Sequence[int]]) -> None:
        added = {name: ids for name, ids in blocks.items() if ids}
        if not added:
            return
        for handoff_id in prompt.handoff_ids:
            self.session.publish(
                handoff_id,
                added,
                0,
                final=False,
                first_blocks=dict(prompt.counts),
                lease_ms=self.lease_ms,
                hold_ms=self.hold_ms,
                readers=prompt.readers,
            )
        for name, ids in added.items():
            prompt.counts[name] = prompt.counts.get(name, 0) + len(ids)
