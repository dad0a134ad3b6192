"""Follow an engine's requests as P and as D.

`PrefillSide` publishes prompts, their leading tokens while the rest is computed, and holds their
pages until D has read them. `DecodeSide` has the requests that wait for a state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from restow.agents.engines.common.blocks import BlockLists, Group
from restow.agents.engines.common.handoff_ends import HandoffEnd, HandoffEnds
from restow.broker.client import BlockingDelivery, BlockingSession, HandoffEnded, Prefix


class Scheduled(NamedTuple):
    """A request's part of a step of P."""

    request_id: str
    tokens: int
    """Tokens that are computed when the step is over."""
    blocks: BlockLists
    """Blocks that the step adds, by group."""


class Fences(NamedTuple):
    """What workers fence when a step of P is over."""

    whole: list[str]
    """Handoffs whose prompts the step completes."""
    leading: dict[str, int]
    """Handoffs whose prompts it computes in part, and the leading tokens that are computed then."""


@dataclass(slots=True)
class _Prompt:
    """A prompt that P computes for handoffs."""

    handoff_ids: Sequence[str]
    tokens: int
    readers: int
    """The number of D's that read each handoff, where a router gave it."""
    early: bool
    """Whether leading tokens may be published before the others are computed."""
    counts: dict[str, int] = field(default_factory=dict)
    """By group: the number of blocks that are published early."""


@dataclass(slots=True)
class PrefillSide:
    """The prompts of P. Belongs to the scheduler's thread."""

    session: BlockingSession
    lease_ms: int
    hold_ms: int
    early_groups: frozenset[str] = frozenset()
    """Groups whose tokens may be read early; empty: nothing is published early."""
    _ends: HandoffEnds = field(default_factory=HandoffEnds)
    _prompts: dict[str, _Prompt] = field(default_factory=dict)
    """By request."""
    _computing: dict[str, None] = field(default_factory=dict)
    """Requests whose prompts are not computed yet."""
    _held: dict[str, int] = field(default_factory=dict)
    """By finished request: the number of handoffs in which D may still read its pages."""
    _held_blocks: dict[str, int] = field(default_factory=dict)
    """By finished request: the number of blocks that are held."""

    @property
    def computing(self) -> Collection[str]:
        """The requests whose prompts are not computed yet."""
        return self._computing.keys()

    def begin(
        self,
        request_id: str,
        handoff_ids: Sequence[str],
        prompt_tokens: int,
        trace_parent: str,
        readers: int,
    ) -> None:
        """Announce a prompt that came in. D learns from now on if it is given up."""
        early = bool(self.early_groups)
        self._prompts[request_id] = prompt = _Prompt(handoff_ids, prompt_tokens, readers, early)
        self._computing[request_id] = None
        self._publish(prompt, {}, final=False, trace_parent=trace_parent)

    def step(self, scheduled: Iterable[Scheduled]) -> Fences:
        """Publish leading tokens that a step computes; return what workers fence after it.

        ``scheduled`` yields the step's requests that are `computing`. It is only read while some
        prompt is not computed.
        """
        fences = Fences([], {})
        for part in scheduled if self._computing else ():
            prompt = self._prompts[part.request_id]
            if part.tokens >= prompt.tokens:
                del self._computing[part.request_id]
                fences.whole.extend(prompt.handoff_ids)
            elif prompt.early:
                self._publish_early(prompt, part.blocks)
                fences.leading.update(dict.fromkeys(prompt.handoff_ids, part.tokens))
        return fences

    def preempted(self, request_ids: Iterable[str]) -> None:
        """Take back what was published of prompts whose pages other requests have now.

        D reads such a prompt after P has computed it again, when it is published whole.
        """
        for request_id in request_ids:
            prompt = self._prompts.get(request_id)
            if prompt is not None and prompt.early and prompt.counts:
                prompt.early = False
                for handoff_id in prompt.handoff_ids:
                    self.session.take_back(handoff_id, "P has preempted the prompt")

    def finish(
        self,
        request_id: str,
        blocks: BlockLists,
        position_tokens: int,
        content: bytes,
        sampled_token: int | None = None,
    ) -> None:
        """Publish a computed prompt. Its pages are held until `sent` names the request.

        ``sampled_token``: the token that P sampled behind the prompt, for a D that takes it.
        """
        prompt = self._pop(request_id)
        self._held[request_id] = len(prompt.handoff_ids)
        self._held_blocks[request_id] = sum(len(ids) for ids in blocks.values())
        whole = {"content": content, "sampled_token": sampled_token}
        for handoff_id, future in self._publish(prompt, blocks, position_tokens, **whole):
            self._ends.watch(request_id, handoff_id, future)

    def give_up(self, request_id: str, why: str) -> None:
        """Cancel the handoffs of a request that ended before its prompt was computed."""
        for handoff_id in self._pop(request_id).handoff_ids:
            self.session.cancel(handoff_id, why)

    def follows(self, request_id: str) -> bool:
        """Return whether the request's prompt is computed for a handoff that is not given up."""
        return request_id in self._prompts

    @property
    def held_blocks(self) -> int:
        """The number of blocks held for D, in all groups."""
        return sum(self._held_blocks.values())

    def sent(self) -> tuple[list[HandoffEnd], list[str]]:
        """Return handoffs that ended since the last call, and requests whose pages are free now."""
        ended, free = list(self._ends.take()), []
        for end in ended:
            self._held[end.request_id] -= 1
            if not self._held[end.request_id]:
                del self._held[end.request_id], self._held_blocks[end.request_id]
                free.append(end.request_id)
            if end.failed:
                end.log("a state was not handed over")
        return ended, free

    def _pop(self, request_id: str) -> _Prompt:
        self._computing.pop(request_id, None)
        return self._prompts.pop(request_id)

    def _publish_early(self, prompt: _Prompt, blocks: BlockLists) -> None:
        added = {name: blocks[name] for name in self.early_groups if blocks.get(name)}
        if added:
            self._publish(prompt, added, final=False, first_blocks=dict(prompt.counts))
        for name, ids in added.items():
            prompt.counts[name] = prompt.counts.get(name, 0) + len(ids)

    def _publish(
        self, prompt: _Prompt, blocks: BlockLists, position_tokens: int = 0, **more: Any
    ) -> list[tuple[str, Future[HandoffEnded]]]:
        """Publish blocks for all handoffs of a prompt; return the handoffs and their ends."""
        more |= {"lease_ms": self.lease_ms, "hold_ms": self.hold_ms, "readers": prompt.readers}
        return [
            (handoff_id, self.session.publish(handoff_id, blocks, position_tokens, **more))
            for handoff_id in prompt.handoff_ids
        ]


def early_groups(groups: Sequence[Group]) -> frozenset[str]:
    """Return the groups whose tokens may be read early.

    An engine with windows publishes nothing early, since only the last tokens of windows stay.
    """
    tokens = [group for group in groups if not group.is_state]
    windows = any(group.window_tokens or group.whole_blocks for group in tokens)
    return frozenset() if windows else frozenset(group.name for group in tokens)


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
        timeout_ms: int,
        trace_parent: str,
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
        write_mark: int,
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
            delivery.cancel()  # only this demand: another request may have the same handoff

    def received(self) -> list[HandoffEnd]:
        """Return the waits that have ended since the last call. The pages are D's own again."""
        ended = list(self._ends.take())
        for end in ended:
            self._loading.pop(end.request_id, None)
            if end.reason:
                end.log("no state was received")
        return ended
