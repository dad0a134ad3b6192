"""`SchedulerSide` stands in the engine's core between its requests and the broker's session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import structlog

from restow.agents.engines.common.decode import DecodeSide, Requester
from restow.agents.engines.common.errors import BlocksError, ParametersError
from restow.agents.engines.common.groups import Group, handoff_blocks
from restow.agents.engines.common.parameters import Part, Side, answer, part_of
from restow.agents.engines.common.position import backoff_tokens, position_tokens
from restow.agents.engines.common.prefill import PrefillSide, Publisher
from restow.agents.engines.common.unwritten import unwritten
from restow.agents.engines.vllm.scheduler.lora_adapters import Adapters
from restow.agents.engines.vllm.scheduler.prompt import Request, content, truncate
from restow.agents.engines.vllm.scheduler.request_ids import place_of
from restow.agents.engines.vllm.scheduler.tally import Tally
from restow.agents.engines.vllm.settings import ConnectorSettings
from restow.agents.engines.vllm.step import Step


class Session(Publisher, Requester, Protocol):
    """Names what the scheduler's side needs of `restow.broker.client.BlockingSession`."""


class SchedulerSide:
    """Follows every request from its arrival to its end. Belongs to the scheduler's thread."""

    def __init__(
        self,
        engine_id: str,
        life: str,
        kv_role: str,
        groups: Sequence[Group],
        windows: Mapping[str, int],
        lookahead_tokens: int,
        session: Session,
        settings: ConnectorSettings,
    ) -> None:
        """Serve ``groups``, of which some keep only ``windows`` of tokens.

        ``life`` tells handoffs apart that P names itself, over restarts of the engine.
        """
        self._engine_id, self._life, self._kv_role = engine_id, life, kv_role
        self._groups, self._windows = tuple(groups), dict(windows)
        self._recurrent = any(group.is_state for group in groups)
        self._backoff = backoff_tokens(self._recurrent, lookahead_tokens)
        self._prefill = PrefillSide(session, settings.lease_ms, settings.hold_ms)
        self._decode = DecodeSide(session, settings.request_timeout_ms)
        self._adapters = Adapters()
        self._parts: dict[str, Part] = {}
        self._refused: set[str] = set()
        """Requests whose parameters are no use, before vLLM has heard that."""
        self._prompt_tokens: dict[str, int] = {}
        """Of P's requests whose prompt is not yet computed."""
        self._step = Step()
        self.tally = Tally()
        self._log = structlog.get_logger("restow.vllm").bind(engine=engine_id)

    # -- a request's way --------------------------------------------------------------------------

    def new_request(self, request: Request) -> None:
        """Find the part of a request that came in, and cut P's prompt."""
        request_id = request.request_id
        place = place_of(request_id)
        try:
            default_id = f"{self._engine_id}/{self._life}/{place.shared_id}"
            part = part_of(request.kv_transfer_params, self._kv_role, default_id, place)
        except ParametersError as error:
            self._log.error("parameters are no use", request=request_id, detail=error.message)
            self._refused.add(request_id)
            self.tally.refused(self._kv_role, error.reason)
            return
        if part is None:
            return
        handoff_ids = part.handoff_ids(place)
        # vLLM fills them where it traces itself.
        trace_parent = (request.trace_headers or {}).get("traceparent", "")
        if part.side is Side.DECODE:
            self._parts[request_id] = part
            tokens = position_tokens(request.num_prompt_tokens, self._backoff)
            self._decode.begin(request_id, handoff_ids[0], tokens, part.timeout_ms, trace_parent)
            return
        truncate(request, self._backoff)
        self._parts[request_id] = part
        self._prompt_tokens[request_id] = request.num_prompt_tokens
        self._prefill.begin(request_id, handoff_ids, trace_parent)

    def loadable_tokens(self, request: Request, computed_tokens: int) -> int:
        """Return how many tokens of the prompt another engine has, beyond those computed here."""
        if request.request_id in self._refused:
            # A load that fails at once: vLLM does then as its policy says.
            return request.num_prompt_tokens - computed_tokens
        if self._decode.idle:
            return 0
        return self._decode.loadable_tokens(request.request_id, computed_tokens)

    def decides(self, request_id: str) -> bool:
        """Return whether `allocated` has something to decide for the request. Nearly always not."""
        if request_id in self._refused:
            return True
        return not self._decode.idle and self._decode.waits(request_id)

    def allocated(
        self, request: Request, blocks: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """Ask for the ``external_tokens`` of a request that has blocks now."""
        request_id = request.request_id
        if not self.decides(request_id):
            return
        if request_id in self._refused:
            self._refused.discard(request_id)
            if external_tokens:
                self._step.received = {**self._step.received, request_id: False}
            return
        if not external_tokens:
            self._decode.do_without(request_id, "it computes the prompt itself")
            return
        try:
            named = handoff_blocks(self._groups, blocks)
        except BlocksError as error:
            # vLLM waits for an end: it gets one, and the load counts as failed.
            self._log.error("no state can be loaded", request=request_id, detail=error.message)
            self._decode.do_without(request_id, error.message)
            self._step.received = {**self._step.received, request_id: False}
            return
        position = self._decode.position_tokens(request_id)
        self._decode.load(request_id, named, external_tokens, self._content(request, position))
        held = position - external_tokens
        holes = unwritten(self._groups, self._windows, named, held, position)
        self._step.loading.append(holes)

    def finished(
        self, request: Request, blocks: Sequence[Sequence[int]], computed: bool
    ) -> dict[str, Any] | None:
        """Publish or free the blocks of a request that has ended, ``computed`` to its end or not.

        Returns the answer for the router if the pages are held until D has read them.
        """
        request_id = request.request_id
        self._refused.discard(request_id)
        part = self._parts.pop(request_id, None)
        if part is None:
            return None
        if part.side is Side.DECODE:
            self._decode.finish(request_id)
            return None
        self._prompt_tokens.pop(request_id, None)
        position = request.num_computed_tokens
        if not self._recurrent:  # what P has said itself follows the prompt, and does not matter
            position = min(position, request.num_prompt_tokens)
        if not computed or not position:
            self._prefill.give_up(request_id, "P's request ended before its prompt was computed")
            return None
        try:
            named = handoff_blocks(self._groups, blocks)
        except BlocksError as error:
            self._log.error("no state can be published", request=request_id, detail=error.message)
            self._prefill.give_up(request_id, error.message)
            return None
        of = self._content(request, position)
        if not self._prefill.finish(request_id, named, position, of):
            return None
        return answer(part, self._engine_id, request_id, position)

    def _content(self, request: Request, position: int) -> bytes:
        return content(request, position, self._adapters.word(request.lora_request))

    # -- a step -----------------------------------------------------------------------------------

    def step(self, progress: Iterator[tuple[str, int]]) -> Step:
        """Return what workers do in this step; ``progress`` yields requests and their tokens then.

        A step of an engine without handoffs costs next to nothing.
        """
        if self._prompt_tokens:
            done = [
                request_id
                for request_id, tokens in progress
                if tokens >= self._prompt_tokens.get(request_id, tokens + 1)
            ]
            self._step.fences += self._prefill.completed(done)
        (sent, free), received = self._prefill.sent(), self._decode.received()
        self._step.sent += free
        for end in sent:
            self.tally.sent(end)
        if received:
            ends = {end.request_id: not end.reason for end in received}
            self._step.received = {**self._step.received, **ends}
            for end in received:
                self.tally.received(end)
        step, self._step = self._step, Step()
        return step
