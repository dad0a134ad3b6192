"""Follow vLLM's requests in the engine's core, and tell broker and workers what they need."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from restow.agents.engines.common.adapter_errors import (
    BlocksError,
    ParametersError,
    RevisionUnknownError,
)
from restow.agents.engines.common.blocks import (
    BlockLists,
    Group,
    backoff_tokens,
    handoff_blocks,
    position_tokens,
    unwritten,
)
from restow.agents.engines.common.checkpoint import LoraAdapters
from restow.agents.engines.common.handoff_ends import HandoffTally
from restow.agents.engines.common.prefill_decode import (
    DecodeSide,
    PrefillSide,
    Scheduled,
    early_groups,
)
from restow.agents.engines.common.prefix_sharing import PrefixSharing
from restow.agents.engines.common.registration import ConnectorSettings
from restow.agents.engines.vllm.private import keep_loaded, token_ids
from restow.agents.engines.vllm.scheduler.hints import KvHints
from restow.agents.engines.vllm.scheduler.moves import MoveOrders, ReplyMoves
from restow.agents.engines.vllm.scheduler.requests import (
    MARKS,
    HandoffParameters,
    HandoffSide,
    Request,
    answer_index,
    content,
    followed_prompt,
    marks_of,
    parameters_of,
    sampling_word,
    trace_parent,
    truncate,
    why_not_handed_on,
)
from restow.agents.engines.vllm.scheduler.weights import Weights
from restow.agents.engines.vllm.worker.worker_side import WorkerStep
from restow.broker.client import BlockingSession, SessionClosedError
from restow.broker.logs import get_logger

if TYPE_CHECKING:
    from restow.agents.engines.vllm.scheduler.engine_core import SampledTokens


ADAPTER_UNKNOWN = "it is not known yet, or no longer, which weights its LoRA adapter has"


class _Unnamed(NamedTuple):
    """A computed prompt that P publishes as soon as its content has a name."""

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
        incarnation: str,
        kv_role: str,
        groups: Sequence[Group],
        lookahead_tokens: int,
        session: BlockingSession,
        settings: ConnectorSettings,
        prefixes: PrefixSharing | None = None,
        cached_tokens: Callable[[Request], int] | None = None,
        sampled: SampledTokens | None = None,
        weights: Weights | None = None,
        moves: MoveOrders | None = None,
    ) -> None:
        """Serve ``groups``; with ``prefixes`` also take what others hold.

        ``incarnation`` keeps the ids of handoffs that P names itself apart over restarts.
        ``cached_tokens`` tells how much of a request is cached here, keys and states alike.
        ``sampled`` brings the tokens that P's engines sampled to D's clients; None: D samples them.
        ``weights`` None: the engine's weights are never replaced. ``moves`` brings orders to have
        replies move to other engines.
        """
        self._moves = ReplyMoves(moves or MoveOrders(lambda: None), session, prefixes)
        self._weights = weights
        if weights is not None:
            weights.on_replaced, weights.on_known = self._replaced, self._revise
        self._alive: set[str] = set()
        self._stale: set[str] = set()
        """Requests that were there when the weights were replaced."""
        self._engine_id, self._incarnation, self._kv_role = engine_id, incarnation, kv_role
        self._groups = tuple(groups)
        self._recurrent = any(group.is_state for group in groups)
        windows = any(group.window_tokens for group in groups)
        self._backoff = backoff_tokens(self._recurrent, windows, lookahead_tokens)
        self._session, self._prefixes, self._cached_tokens = session, prefixes, cached_tokens
        # Draft layers lag behind where a prompt is computed in several steps.
        early = early_groups(() if lookahead_tokens else self._groups)
        self._prefill = PrefillSide(session, settings.lease_ms, settings.hold_ms, early)
        self._decode = DecodeSide(session, settings.request_timeout_ms)
        self._sampled = sampled
        self._handed_on: set[str] = set()
        """Requests whose first token P samples for D."""
        self._sampling: dict[str, bytes] = {}
        """By request whose token P samples: a hash of what decides it, the same on P and D."""
        self._adapters = LoraAdapters()
        self._unnamed: list[_Unnamed] = []
        """Computed prompts whose adapters the workers have not reported yet."""
        self._followed: dict[str, str] = {}
        """Requests whose prefixes are followed, and the names of their adapters."""
        self._parameters: dict[str, HandoffParameters] = {}
        self._refused: set[str] = set()
        """Requests that are refused, before vLLM has heard that."""
        self._behind: set[str] = set()
        """Requests whose state stands behind what is cached here, but among the cached keys."""
        self._step = WorkerStep()
        self._write_mark = 0
        """The write mark of the last step in which a state was asked for."""
        self.tally = HandoffTally()
        self.hints = KvHints(self.tally.hints)
        self._marks: dict[str, list[int]] = {}
        """By request: after how many tokens a state is kept for each of its marks; 0: none is."""
        self._log = get_logger("restow.vllm").bind(engine=engine_id)

    # -- the life of a request --------------------------------------------------------------------

    def new_request(self, request: Request) -> None:
        """Find the handoff of a request that came in, and cut P's prompt."""
        self._alive.add(request.request_id)
        self._moves.begin(request)
        known = self._known  # before the request is announced
        self._begin(request)
        adapter = self._adapter(request)
        why_no_fetch = "this engine looks for no prefixes (its setting prefix is off)"
        if not known:
            self._refuse_unknown(request.request_id)
            why_no_fetch = "the engine's weights were replaced, and are not known"
        elif self._prefixes is not None and adapter is not None:
            asks = not self.decides(request.request_id)
            asks = asks and not request.get_skip_reading_prefix_cache()
            prompt = followed_prompt(request, adapter)
            asks_for_none = "this request has a handoff, or is to compute its whole prompt"
            why_no_fetch = "" if asks and prompt is not None else asks_for_none
            self._prefixes.new_request(request.request_id, prompt, asks)
            if request.request_id in self._marks:
                given = request.kv_transfer_params or {}
                marks = marks_of(given, request.num_prompt_tokens)
                self._marks[request.request_id] = self._prefixes.mark(request.request_id, marks)
            if request.lora_request is not None:
                self._followed[request.request_id] = request.lora_request.lora_name
        elif self._prefixes is not None:
            why_no_fetch = ADAPTER_UNKNOWN
        self.hints.begin(request, why_no_fetch)

    def _begin(self, request: Request) -> None:
        request_id = request.request_id
        index = answer_index(request_id)
        try:
            default_id = f"{self._engine_id}/{self._incarnation}/{index.shared_id}"
            parameters = parameters_of(request.kv_transfer_params, self._kv_role, default_id, index)
            if marks := marks_of(request.kv_transfer_params or {}, request.num_prompt_tokens):
                self._marks[request_id] = [0] * len(marks)
        except ParametersError as error:
            self._log.error("parameters are invalid", request=request_id, detail=error.message)
            self._refuse(request_id, error.reason)
            return
        if parameters is None:
            return
        self._parameters[request_id] = parameters
        handoff_ids = parameters.handoff_ids(index)
        hands_on = parameters.sampled_token and self._hands_on(request, parameters.side)
        if hands_on:
            self._handed_on.add(request_id)
        if parameters.side is HandoffSide.DECODE:
            backoff = 0 if hands_on else self._backoff
            tokens = position_tokens(request.num_prompt_tokens, backoff)
            self._decode.begin(
                *(request_id, handoff_ids[0], tokens, parameters.timeout_ms, trace_parent(request)),
                readers=parameters.readers,
                takes_sampled=hands_on,
            )
            if request.get_skip_reading_prefix_cache():
                self._decode.do_without(request_id, "its parameters want the whole prompt computed")
            elif self._adapter(request) is None:
                self._log.info(
                    "D computes the prompt itself", request=request_id, why=ADAPTER_UNKNOWN
                )
                self._decode.do_without(request_id, ADAPTER_UNKNOWN)
            return
        if hands_on:
            request.max_tokens = 1
        else:
            truncate(request, self._backoff)
        tokens, readers = request.num_prompt_tokens, parameters.readers
        self._prefill.begin(request_id, handoff_ids, tokens, trace_parent(request), readers)

    def _hands_on(self, request: Request, side: HandoffSide) -> bool:
        """Return whether P's token is D's first, as the router wants; else D samples it itself."""
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

    def _refuse(self, request_id: str, reason: str) -> None:
        """Have a request's load fail, and count it."""
        self._refused.add(request_id)
        side = HandoffSide.PREFILL if self._kv_role == "kv_producer" else HandoffSide.DECODE
        self.tally.refused(side, reason)

    def _refuse_unknown(self, request_id: str) -> None:
        """Hand nothing over for a request whose weights are unknown."""
        parameters = self._parameters.pop(request_id, None)
        if parameters is None:
            return
        error = RevisionUnknownError("the engine's weights were replaced, and are not known")
        self._give_up(request_id, f"{error.reason}: {error.message}")
        self._handed_on.discard(request_id)
        self._log.error("no state is handed over", request=request_id, detail=error.message)
        self._refuse(request_id, error.reason)

    def loadable_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Return how many tokens of the prompt another engine has, beyond those computed here.

        None: it is not known yet, or vLLM is to begin where all is cached (`wants_whole_hits`). The
        ``computed_tokens`` of a recurrent model may be those of which only the keys are cached.
        """
        request_id = request.request_id
        if request_id in self._refused:
            # The load fails at once: vLLM then does what its policy says.
            return request.num_prompt_tokens - computed_tokens
        cached_tokens = self._cached(request, computed_tokens)
        if self._prefixes is not None:
            # At least one token is computed here.
            last = position_tokens(request.num_prompt_tokens, max(self._backoff, 1))
            place = request_id, cached_tokens, last
            if not self._prefixes.look(*place, self._decode, trace_parent(request)):
                return None
        self._behind.discard(request_id)
        loadable = self._decode.loadable_tokens(request_id, computed_tokens)
        if not loadable and self._decode.loadable_tokens(request_id, cached_tokens):
            self._behind.add(request_id)
            return None
        return loadable

    def _cached(self, request: Request, computed_tokens: int) -> int:
        """Return how many tokens of a request are cached here, with keys and states."""
        if not computed_tokens or not self._recurrent or self._cached_tokens is None:
            return computed_tokens
        return min(self._cached_tokens(request), computed_tokens)

    @property
    def wants_whole_hits(self) -> bool:
        """Whether a request is to begin where keys and states are cached, and load from there.

        vLLM counts keys that reach further as computed. A state that stands among these keys would
        add no tokens, so vLLM would compute the prompt.
        """
        return bool(self._behind)

    def decides(self, request_id: str) -> bool:
        """Return whether `allocated` has to decide about the request. Nearly always it does not."""
        if request_id in self._refused or self._decode.waits(request_id):
            return True
        return self._prefixes is not None and self._prefixes.loads(request_id)

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
            if self._prefixes is not None:  # vLLM has cached what was loaded
                self._prefixes.loaded(request_id)
            return
        try:
            named = handoff_blocks(self._groups, blocks)
        except BlocksError as error:
            self._log.error("no state can be loaded", request=request_id, detail=error.message)
            self._fail_load(request_id, error.message)
            return
        position = self._decode.position_tokens(request_id)
        content = self._content(request, position, self._sampling.get(request_id, b""))
        if content is None:  # the adapter was loaded again meanwhile
            self._fail_load(request_id, ADAPTER_UNKNOWN)
            return
        # The mark of the step that is being scheduled; steps before may still write to the blocks.
        mark = self._step.write_mark = self._write_mark + 1
        if self._recurrent and self._prefixes is not None and self._prefixes.loads(request_id):
            keep_loaded(request, position)
        delivery = self._decode.load(request_id, named, external_tokens, content, mark)
        if self._sampled is not None and request_id in self._handed_on:
            self._sampled.wait(request, delivery)
        held = position - external_tokens
        self._step.unwritten += unwritten(self._groups, named, held, position)

    def _fail_load(self, request_id: str, why: str) -> None:
        """Decline a state; vLLM waits for the end of the load, and gets a failure."""
        self._decode.do_without(request_id, why)
        self._step.received[request_id] = False

    def finished(
        self, request: Request, blocks: Sequence[Sequence[int]], computed: bool
    ) -> dict[str, Any] | None:
        """Publish or free the blocks of a request that has ended, ``computed`` to its end or not.

        Return the answer for the router if the pages are held until D has read them.
        """
        request_id = request.request_id
        stale = request_id in self._stale
        for requests in (self._alive, self._stale, self._refused, self._behind):
            requests.discard(request_id)
        self._followed.pop(request_id, None)
        self._moves.end(request_id)
        self._decode.finish(request_id)
        handed_on = request_id in self._handed_on
        self._handed_on.discard(request_id)
        if self._sampled is not None:
            self._sampled.finish(request_id)
        parameters = self._parameters.pop(request_id, None)
        replies = parameters is None or parameters.side is HandoffSide.DECODE
        if self._prefixes is not None:
            if replies and computed and not stale and self._known:
                self._replied(self._prefixes, request, blocks)
            self._prefixes.finished(request_id)
        sampling = self._sampling.pop(request_id, b"")
        if parameters is None or replies or not self._prefill.follows(request_id):
            return None
        position = request.num_computed_tokens
        if not self._recurrent:  # P's own reply follows the prompt, and is not handed over
            position = min(position, request.num_prompt_tokens)
        if not computed or not position:
            self._prefill.give_up(request_id, "P's request ended before its prompt was computed")
            return None
        token = None
        if handed_on:
            if position != request.num_prompt_tokens or len(request.output_token_ids) != 1:
                self._prefill.give_up(request_id, "P has not sampled exactly one token")
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
        answered = replace(parameters, sampled_token=handed_on)
        return answered.answer(self._engine_id, request_id, position)

    def answered(self, request_id: str) -> dict[str, Any]:
        """Return the answer to the hints and marks of a request that has ended, once."""
        marks = self._marks.pop(request_id, None)
        return self.hints.answer(request_id) | ({} if marks is None else {MARKS: marks})

    def loaded(self, fingerprints: Mapping[str, str]) -> None:
        """Hear which adapters workers have loaded up to a step whose requests have ended.

        A prompt that this step has completed is published only now, since the step may have loaded
        its adapter, or another adapter under that name.
        """
        lost = self._adapters.loaded(fingerprints)
        if lost and self._prefixes is not None:
            for request_id in [
                followed_id for followed_id, name in self._followed.items() if name in lost
            ]:
                self._prefixes.finished(request_id)
            # The step has reported its blocks under the earlier fingerprint.
            self._prefixes.forget_cached()
        self._publish()

    def _publish(self) -> None:
        ready, self._unnamed = self._unnamed, []
        for prompt in ready:
            request_id = prompt.request.request_id
            content = self._content(prompt.request, prompt.position, prompt.sampling)
            if content is None:
                words = "no state can be published"
                self._log.error(words, request=request_id, detail=ADAPTER_UNKNOWN)
                self._free(prompt, ADAPTER_UNKNOWN)
            else:
                self._prefill.finish(
                    request_id, prompt.blocks, prompt.position, content, prompt.token
                )

    def _free(self, prompt: _Unnamed, why: str) -> None:
        """Give up a prompt that has ended; vLLM holds its pages until it hears of that."""
        self._prefill.give_up(prompt.request.request_id, why)
        self._step.sent.append(prompt.request.request_id)

    def _replied(
        self, prefixes: PrefixSharing, request: Request, blocks: Sequence[Sequence[int]]
    ) -> None:
        """Keep the state after a reply. A step under way is over when vLLM frees the blocks."""
        tokens = request.num_computed_tokens
        if not 0 < tokens <= len(token_ids(request)):
            return
        try:
            named = handoff_blocks(self._groups, blocks)
        except BlocksError:
            return  # its states were never computed
        name = self._content(request, tokens) if self._recurrent else b""
        if name is None:
            return
        if not self._recurrent:
            # vLLM caches no block by a token that is computed in a step ahead.
            tokens = min(tokens, len(token_ids(request)) - 1)
        prefixes.replied(request.request_id, tokens, named, name)

    def _adapter(self, request: Request) -> str | None:
        """Return the fingerprint of the request's LoRA adapter; None: it is unknown."""
        lora = request.lora_request
        return self._adapters.fingerprint(None if lora is None else lora.lora_name)

    def _content(self, request: Request, position: int, sampling: bytes = b"") -> bytes | None:
        adapter = self._adapter(request)
        return None if adapter is None else content(request, position, adapter, sampling)

    # -- weights that are replaced ----------------------------------------------------------------

    @property
    def _known(self) -> bool:
        """Whether the engine's weights are known, so that states may be handed over."""
        return self._weights is None or self._weights.look()

    def _give_up(self, request_id: str, why: str) -> None:
        """Give up a request's handoff, on whichever side it is."""
        if self._prefill.follows(request_id):
            self._prefill.give_up(request_id, why)
        self._decode.finish(request_id)

    def _replaced(self, revision: str) -> None:
        """Hand over nothing that the earlier weights have computed, since they may be replaced."""
        self._stale |= self._alive
        why = "REVISION_CHANGED: its weights were replaced"
        for request_id in self._alive:
            self._give_up(request_id, why)
        for prompt in self._unnamed:
            self._free(prompt, why)
        self._unnamed = []
        if self._prefixes is not None:
            self._prefixes.forget()
        self._revise(revision)

    def _revise(self, revision: str) -> None:
        with suppress(SessionClosedError):  # the engine is ending, too
            self._session.set_revision(revision)

    def reset_cache(self) -> None:
        """Have stores drop the states of the engine's weights, as vLLM drops its own."""
        if self._weights is not None:
            with suppress(SessionClosedError):
                self._session.forget_states(self._weights.revision)
            self._weights.look()

    # -- a step -----------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether a step has something to do here, though no request runs."""
        return self._moves.pending or (self._prefixes is not None and self._prefixes.pending)

    @property
    def computing(self) -> Container[str]:
        """P's requests of which `step` wants to hear."""
        return self._prefill.computing

    def step(
        self, scheduled: Iterable[Scheduled] = (), preempted: Iterable[str] = ()
    ) -> WorkerStep:
        """Return what workers do in this step.

        ``scheduled`` has the step's requests that are `computing`; ``preempted`` requests have lost
        their blocks. A step of an engine without handoffs costs next to nothing.
        """
        self._publish()
        self._moves.step()
        step, self._step = self._step, WorkerStep()
        self._write_mark = max(self._write_mark, step.write_mark)
        self._prefill.preempted(preempted)
        step.fences, step.early_fences = self._prefill.step(scheduled)
        if self._prefixes is not None:
            step.fences += self._prefixes.step(self._known)
        ended, sent = self._prefill.sent()
        step.sent += sent
        for end in ended:
            self.tally.sent(end)
        received = self._decode.received()
        if self._sampled is not None:  # the tokens that came before these ends
            self._sampled.take()
        for end in received:
            arrived = not end.reason and end.request_id not in self._stale
            if self._sampled is not None and self._sampled.lacks(end.request_id):
                # Without the token the state would count as that of a shorter prompt.
                self._sampled.finish(end.request_id)
                arrived = False
            step.received[end.request_id] = arrived
            if arrived:
                self.hints.loaded(end.request_id, end.tokens)
            self.tally.received(end)
        return step

    def counted(self) -> dict[str, Any] | None:
        """Return the counts since the last call; None: nothing has changed."""
        pinned = 0 if self._prefixes is None else self._prefixes.pinned_blocks
        self.tally.present = {
            "held_blocks": self._prefill.held_blocks + pinned,
            "registered": int(self._session.is_open),
            "weights_known": int(self._weights is None or self._weights.known),
        }
        return None if self.tally.empty else self.tally.take()

    def close(self) -> None:
        """Leave the broker. May be repeated."""
        self._session.close()
