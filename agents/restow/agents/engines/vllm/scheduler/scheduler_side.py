"""`SchedulerSide` stands in the engine's core between its requests and the broker's session."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from restow.agents.engines.common.decode import DecodeSide
from restow.agents.engines.common.early import EarlyPrefill, Scheduled
from restow.agents.engines.common.errors import BlocksError
from restow.agents.engines.common.groups import BlockLists, Group, handoff_blocks
from restow.agents.engines.common.position import backoff_tokens, position_tokens
from restow.agents.engines.common.prefill import PrefillSide
from restow.agents.engines.common.unwritten import unwritten
from restow.agents.engines.vllm.errors import ParametersError, RevisionUnknownError
from restow.agents.engines.vllm.parameters import HandoffParameters, HandoffSide, parameters_of
from restow.agents.engines.vllm.scheduler.lora_adapters import LoraAdapters
from restow.agents.engines.vllm.scheduler.prompt import Request, content, truncate
from restow.agents.engines.vllm.scheduler.request_ids import answer_index
from restow.agents.engines.vllm.scheduler.sampling import sampling_word, why_not_handed_on
from restow.agents.engines.vllm.scheduler.tally import Tally
from restow.agents.engines.vllm.settings import ConnectorSettings
from restow.agents.engines.vllm.worker_step import WorkerStep
from restow.broker.client import BlockingSession, SessionClosedError
from restow.broker.logs import get_logger

if TYPE_CHECKING:
    from restow.agents.engines.vllm.prefix.prefix_side import PrefixSide
    from restow.agents.engines.vllm.scheduler.sampled_tokens import SampledTokens
    from restow.agents.engines.vllm.scheduler.weights import Weights


UNKNOWN = "nothing tells yet, or any more, which weights its LoRA adapter has"


class _Unnamed(NamedTuple):
    """What P publishes of a request, as soon as its content has a name."""

    request: Request
    blocks: BlockLists
    position: int
    token: int | None
    sampling: bytes


class SchedulerSide:
    """Follows every request from its arrival to its end. Belongs to the scheduler's thread."""

    def __init__(
        self,
        engine_id: str,
        life: str,
        kv_role: str,
        groups: Sequence[Group],
        lookahead_tokens: int,
        session: BlockingSession,
        settings: ConnectorSettings,
        prefix: PrefixSide | None = None,
        cached_tokens: Callable[[Request], int] | None = None,
        sampled: SampledTokens | None = None,
        weights: Weights | None = None,
    ) -> None:
        """Serve ``groups``; with ``prefix`` find what others hold, too.

        ``life`` tells handoffs apart that P names itself, over restarts of the engine.
        ``cached_tokens``: how much of a request is cached here, keys and states alike.
        ``sampled``: how D's clients are told the tokens that P's sampled; None: not at all.
        ``weights``: which the engine has; None: they are never replaced.
        """
        self._weights = weights
        if weights is not None:
            weights.on_replaced, weights.on_known = self._replaced, self._revise
        self._alive: set[str] = set()
        self._stale: set[str] = set()
        """Requests that were there when the weights were replaced."""
        self._engine_id, self._life, self._kv_role = engine_id, life, kv_role
        self._groups = tuple(groups)
        self._recurrent = any(group.is_state for group in groups)
        windows = any(group.window_tokens for group in groups)
        self._backoff = backoff_tokens(self._recurrent, windows, lookahead_tokens)
        self._session, self._prefix, self._cached_tokens = session, prefix, cached_tokens
        self._prefill = PrefillSide(session, settings.lease_ms, settings.hold_ms)
        # Draft layers lag behind where a prompt is computed in several steps.
        early = () if lookahead_tokens else self._groups
        self._early = EarlyPrefill.of(session, settings.lease_ms, settings.hold_ms, early)
        self._decode = DecodeSide(session, settings.request_timeout_ms)
        self._sampled = sampled
        self._handed_on: set[str] = set()
        """Requests whose first token P samples for D."""
        self._sampling: dict[str, bytes] = {}
        """By request whose token P samples: what decides it, told alike to P and D."""
        self._adapters = LoraAdapters()
        self._unnamed: list[_Unnamed] = []
        """Prompts that are computed, before workers have told what their adapters were."""
        self._followed: dict[str, str] = {}
        """Requests whose prefixes are followed, by the names of their adapters."""
        self._parameters: dict[str, HandoffParameters] = {}
        self._refused: set[str] = set()
        """Requests whose parameters are no use, before vLLM has heard that."""
        self._behind: set[str] = set()
        """Requests whose state stands behind what is cached here, and among the keys that are."""
        self._step = WorkerStep()
        self._write_mark = 0
        """That of the last step in which a state was asked for."""
        self.tally = Tally()
        self._log = get_logger("restow.vllm").bind(engine=engine_id)

    # -- a request's way --------------------------------------------------------------------------

    def new_request(self, request: Request) -> None:
        """Find the handoff of a request that came in, and cut P's prompt."""
        self._alive.add(request.request_id)
        known = self._known  # before anything is said of it
        self._begin(request)
        word = self._adapters.word(request.lora_request)
        if not known:
            self._refuse_unknown(request.request_id)
        elif self._prefix is not None and word is not None:
            asks = not self.decides(request.request_id)
            self._prefix.new_request(request, word, asks)
            if request.lora_request is not None:
                self._followed[request.request_id] = request.lora_request.lora_name

    def _begin(self, request: Request) -> None:
        request_id = request.request_id
        index = answer_index(request_id)
        try:
            default_id = f"{self._engine_id}/{self._life}/{index.shared_id}"
            found = parameters_of(request.kv_transfer_params, self._kv_role, default_id, index)
        except ParametersError as error:
            self._log.error("parameters are no use", request=request_id, detail=error.message)
            self._refused.add(request_id)
            self.tally.refused(self._kv_role, error.reason)
            return
        if found is None:
            return
        self._parameters[request_id] = found
        handoff_ids = found.handoff_ids(index)
        # vLLM fills them where it traces itself.
        trace_parent = (request.trace_headers or {}).get("traceparent", "")
        hands_on = found.sampled_token and self._hands_on(request, found.side)
        if hands_on:
            self._handed_on.add(request_id)
        if found.side is HandoffSide.DECODE:
            backoff = 0 if hands_on else self._backoff
            tokens = position_tokens(request.num_prompt_tokens, backoff)
            self._decode.begin(
                *(request_id, handoff_ids[0], tokens, found.timeout_ms, trace_parent),
                readers=found.readers,
                takes_sampled=hands_on,
            )
            if request.get_skip_reading_prefix_cache():
                self._decode.do_without(request_id, "its parameters want the whole prompt computed")
            elif self._adapters.word(request.lora_request) is None:
                self._log.info("D computes the prompt itself", request=request_id, why=UNKNOWN)
                self._decode.do_without(request_id, UNKNOWN)
            return
        if hands_on:
            request.max_tokens = 1
        else:
            truncate(request, self._backoff)
        prompt_tokens, readers = request.num_prompt_tokens, found.readers
        self._prefill.begin(request_id, handoff_ids, prompt_tokens, trace_parent, readers)
        self._early.begin(request_id, handoff_ids, prompt_tokens, readers)

    @property
    def _known(self) -> bool:
        """Whether states may be handed over."""
        return self._weights is None or self._weights.look()

    def _refuse_unknown(self, request_id: str) -> None:
        """Hand nothing over for a request: nobody knows which weights compute it."""
        found = self._parameters.pop(request_id, None)
        if found is None:
            return
        error = RevisionUnknownError("the engine's weights were replaced, and are not known")
        self._give_up(request_id, f"{error.reason}: {error.message}")
        self._handed_on.discard(request_id)
        self._log.error("no state is handed over", request=request_id, detail=error.message)
        self._refused.add(request_id)
        self.tally.refused(self._kv_role, error.reason)

    def _give_up(self, request_id: str, why: str) -> None:
        """Tell the other side of a request's handoff that nothing comes of it."""
        self._early.end(request_id)
        if self._prefill.follows(request_id):
            self._prefill.give_up(request_id, why)
        self._decode.finish(request_id)

    def _replaced(self, word: str) -> None:
        """The weights may be replaced: what the ones before have computed is not handed over."""
        self._stale |= self._alive
        why = "REVISION_CHANGED: its weights were replaced"
        for request_id in self._alive:
            self._give_up(request_id, why)
        for one in self._unnamed:
            self._free(one, why)
        self._unnamed = []
        if self._prefix is not None:
            self._prefix.forget()
        self._revise(word)

    def _revise(self, revision: str) -> None:
        with suppress(SessionClosedError):  # the engine ends, too
            self._session.set_revision(revision)

    def reset_cache(self) -> None:
        """Have stores drop the states of the engine's weights, as vLLM drops its own."""
        if self._weights is not None:
            with suppress(SessionClosedError):
                self._session.forget_states(self._weights.revision)
            self._weights.look()

    def _hands_on(self, request: Request, side: HandoffSide) -> bool:
        """Whether P's token is D's first, where the router wants that; else D samples it itself."""
        why = why_not_handed_on(request)
        if self._backoff > 1:
            why = "drafts are computed ahead"
        if not why:
            self._sampling[request.request_id] = sampling_word(request)
        if self._sampled is None and side is HandoffSide.DECODE:
            why = "vLLM's engine core has no process of its own"
        if why:
            self._log.info("D samples the first token", request=request.request_id, why=why)
        return not why

    def loadable_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Return how many tokens of the prompt another engine has, beyond those computed here.

        None: that is not known yet, or vLLM is to begin where all is cached (`wants_whole_hits`):
        of a recurrent model ``computed_tokens`` may be those whose keys alone are.
        """
        request_id = request.request_id
        if request_id in self._refused:
            # A load that fails at once: vLLM does then as its policy says.
            return request.num_prompt_tokens - computed_tokens
        cached_tokens = self._cached(request, computed_tokens)
        if self._prefix is not None:
            # One token at least is computed here.
            last = position_tokens(request.num_prompt_tokens, max(self._backoff, 1))
            if not self._prefix.look(request, cached_tokens, last, self._decode):
                return None
        self._behind.discard(request_id)
        loadable = self._decode.loadable_tokens(request_id, computed_tokens)
        if not loadable and self._decode.loadable_tokens(request_id, cached_tokens):
            self._behind.add(request_id)
            return None
        return loadable

    def _cached(self, request: Request, computed_tokens: int) -> int:
        """How much of a request is cached here, all of its state."""
        if not computed_tokens or not self._recurrent or self._cached_tokens is None:
            return computed_tokens
        return min(self._cached_tokens(request), computed_tokens)

    @property
    def wants_whole_hits(self) -> bool:
        """Whether a request is to begin where keys and states are cached, and load from there.

        vLLM counts the keys as computed that reach further. A state that stands among these would
        add nothing to them, and the prompt be computed.
        """
        return bool(self._behind)

    def decides(self, request_id: str) -> bool:
        """Return whether `allocated` has something to decide for the request. Nearly always not."""
        return request_id in self._refused or self._decode.waits(request_id)

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
                self._step.received[request_id] = False
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
            self._step.received[request_id] = False
            return
        position = self._decode.position_tokens(request_id)
        content = self._content(request, position, self._sampling.get(request_id, b""))
        if content is None:  # the adapter was loaded again meanwhile
            self._decode.do_without(request_id, UNKNOWN)
            self._step.received[request_id] = False
            return
        # The step that is being scheduled; those before it may still be writing to the blocks.
        mark = self._step.write_mark = self._write_mark + 1
        delivery = self._decode.load(request_id, named, external_tokens, content, mark)
        if self._sampled is not None and request_id in self._handed_on:
            self._sampled.wait(request, delivery)
        held = position - external_tokens
        self._step.unwritten += unwritten(self._groups, named, held, position)

    def finished(
        self, request: Request, blocks: Sequence[Sequence[int]], computed: bool
    ) -> dict[str, Any] | None:
        """Publish or free the blocks of a request that has ended, ``computed`` to its end or not.

        Returns the answer for the router if the pages are held until D has read them.
        """
        request_id = request.request_id
        stale = request_id in self._stale
        self._alive.discard(request_id)
        self._stale.discard(request_id)
        self._refused.discard(request_id)
        self._behind.discard(request_id)
        self._followed.pop(request_id, None)
        self._decode.finish(request_id)
        handed_on = request_id in self._handed_on
        self._handed_on.discard(request_id)
        if self._sampled is not None:
            self._sampled.finish(request_id)
        found = self._parameters.pop(request_id, None)
        replies = found is None or found.side is HandoffSide.DECODE
        if self._prefix is not None:
            if replies and computed and not stale and self._known:
                self._replied(self._prefix, request, blocks)
            self._prefix.finished(request_id)
        self._early.end(request_id)
        sampling = self._sampling.pop(request_id, b"")
        if found is None or replies or not self._prefill.follows(request_id):
            return None
        position = request.num_computed_tokens
        if not self._recurrent:  # what P has said itself follows the prompt, and does not matter
            position = min(position, request.num_prompt_tokens)
        if not computed or not position:
            self._prefill.give_up(request_id, "P's request ended before its prompt was computed")
            return None
        token = None
        if handed_on:
            if position != request.num_prompt_tokens or len(request.output_token_ids) != 1:
                self._prefill.give_up(request_id, "P has not sampled just one token")
                return None
            token = request.output_token_ids[0]
        try:
            named = handoff_blocks(self._groups, blocks)
        except BlocksError as error:
            self._log.error("no state can be published", request=request_id, detail=error.message)
            self._prefill.give_up(request_id, error.message)
            return None
        self._unnamed.append(_Unnamed(request, named, position, token, sampling))
        if request.lora_request is None:
            self._publish()
        answered = replace(found, sampled_token=handed_on)
        return answered.answer(self._engine_id, request_id, position)

    def loaded(self, words: Mapping[str, str]) -> None:
        """Hear which adapters workers have loaded up to a step whose requests have ended.

        A prompt that this step has completed is published only now: the step may have loaded its
        adapter, or another one under that name.
        """
        lost = self._adapters.loaded(words)
        if lost and self._prefix is not None:
            for request_id in [one for one, name in self._followed.items() if name in lost]:
                self._prefix.finished(request_id)
            # The step has told of its blocks under the earlier word.
            self._prefix.forget_cached()
        self._publish()

    def _publish(self) -> None:
        ready, self._unnamed = self._unnamed, []
        for one in ready:
            request_id = one.request.request_id
            content = self._content(one.request, one.position, one.sampling)
            if content is None:
                self._log.error("no state can be published", request=request_id, detail=UNKNOWN)
                self._free(one, UNKNOWN)
            else:
                self._prefill.finish(request_id, one.blocks, one.position, content, one.token)

    def _free(self, one: _Unnamed, why: str) -> None:
        """Give up a prompt that has ended; vLLM holds its pages until it is told."""
        self._prefill.give_up(one.request.request_id, why)
        self._step.sent.append(one.request.request_id)

    def _replied(
        self, prefix: PrefixSide, request: Request, blocks: Sequence[Sequence[int]]
    ) -> None:
        """Have the end of a reply kept. A step that is under way is over when vLLM frees it."""
        tokens = request.num_computed_tokens
        if not 0 < tokens <= len(request._all_token_ids):
            return
        try:
            named = handoff_blocks(self._groups, blocks)
        except BlocksError:
            return  # its states were never computed
        name = self._content(request, tokens) if self._recurrent else b""
        if name is None:
            return
        prefix.replied(request, tokens, named, name)

    def _content(self, request: Request, position: int, sampling: bytes = b"") -> bytes | None:
        word = self._adapters.word(request.lora_request)
        return None if word is None else content(request, position, word, sampling)

    def counted(self) -> dict[str, Any] | None:
        """Return what became of handoffs since the last call; None: nothing has changed."""
        pinned = 0 if self._prefix is None else self._prefix.pinned_blocks
        self.tally.present = {
            "held_blocks": self._prefill.held_blocks + pinned,
            "registered": int(self._session.is_open),
            "weights_known": int(self._weights is None or self._weights.known),
        }
        return None if self.tally.empty else self.tally.take()

    def close(self) -> None:
        """Leave the broker. May be repeated."""
        self._session.close()

    @property
    def pending(self) -> bool:
        """Whether a step has something to do here, though no request runs."""
        return self._prefix is not None and self._prefix.pending

    # -- a step -----------------------------------------------------------------------------------

    @property
    def computing(self) -> Container[str]:
        """P's requests of which `step` is to hear what is ``scheduled``."""
        return self._early.request_ids

    def step(
        self,
        progress: Iterator[tuple[str, int]],
        scheduled: Iterable[Scheduled] = (),
        preempted: Iterable[str] = (),
    ) -> WorkerStep:
        """Return what workers do in this step; ``progress`` yields requests and their tokens then.

        ``scheduled`` says more of those that are `computing`; ``preempted`` have lost their blocks.
        A step of an engine without handoffs costs next to nothing.
        """
        self._publish()
        step, self._step = self._step, WorkerStep()
        self._write_mark = max(self._write_mark, step.write_mark)
        self._early.preempted(preempted)
        step.early_fences = self._early.computed(scheduled)
        step.fences = self._prefill.completed(progress)
        if self._prefix is not None:
            step.fences += self._prefix.step(self._known)
        ended, sent = self._prefill.sent()
        step.sent += sent
        for end in ended:
            self.tally.sent(end)
        received = self._decode.received()
        if self._sampled is not None:  # all that came before those ends
            self._sampled.take()
        for end in received:
            arrived = not end.reason and end.request_id not in self._stale
            if self._sampled is not None and self._sampled.lacks(end.request_id):
                # Without the token the state would be read as one before it.
                self._sampled.finish(end.request_id)
                arrived = False
            step.received[end.request_id] = arrived
            self.tally.received(end)
        return step
