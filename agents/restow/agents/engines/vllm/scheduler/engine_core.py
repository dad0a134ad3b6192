"""Hand P's sampled token to D's client, through the loop of vLLM's engine core."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from queue import Empty, SimpleQueue

from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, FinishReason

from restow.agents.engines.vllm.private import CoreLoop, token_ids
from restow.agents.engines.vllm.scheduler.requests import Request
from restow.broker.client import BlockingDelivery
from restow.broker.errors import RestowError
from restow.broker.logs import get_logger


class SampledTokens:
    """D's requests that go on behind the token that P sampled. Belongs to the scheduler's thread.

    P computes the whole prompt and samples once. D's client gets that token as soon as D has heard
    of it, before the state is there. To D's scheduler it is the last token of the prompt, and D
    computes no other token of it. So nothing is computed twice: a D that computes the prompt itself
    after all goes on behind the same token.
    """

    def __init__(self, core: CoreLoop, vocabulary_tokens: int) -> None:
        """Reach clients through ``core``; the model's tokens are 0 to ``vocabulary_tokens`` - 1."""
        self._core, self._vocabulary_tokens = core, vocabulary_tokens
        self._waiting: dict[str, Request] = {}
        """By id: requests whose token has not come."""
        self._come: SimpleQueue[tuple[str, int]] = SimpleQueue()

    def wait(self, request: Request, delivery: BlockingDelivery) -> None:
        """Expect the token of a request with its ``delivery``."""
        request_id = request.request_id
        self._waiting[request_id] = request

        def came(sampled: Future[int]) -> None:
            try:
                self._come.put((request_id, sampled.result()))
            except (CancelledError, RestowError):
                return  # the end of the delivery has the reason

        delivery.sampled.add_done_callback(came)

    def take(self) -> None:
        """Hand on the tokens that have come since the last call."""
        while True:
            try:
                request_id, token = self._come.get_nowait()
            except Empty:
                return
            if not 0 <= token < self._vocabulary_tokens:
                log = get_logger("restow.vllm")
                words = f"P sampled token {token}: the model has {self._vocabulary_tokens}"
                log.error("sampled token refused", request=request_id, detail=words)
                continue  # without its token the load counts as failed
            request = self._waiting.pop(request_id, None)
            if request is not None:
                self._hand_on(request, token)

    def lacks(self, request_id: str) -> bool:
        """Return whether a request waits for its token."""
        return request_id in self._waiting

    def finish(self, request_id: str) -> None:
        """Forget a request that has ended, or computes its prompt itself."""
        self._waiting.pop(request_id, None)

    def _hand_on(self, request: Request, token: int) -> None:
        reason, stop = _end_by(request, token)
        request.record_event(EngineCoreEventType.SCHEDULED)  # before its prefill ends
        output = EngineCoreOutput(
            request.request_id,
            [token],
            finish_reason=reason,
            stop_reason=stop,
            events=request.take_events(),
            trace_headers=request.trace_headers,
            prefill_stats=request.take_prefill_stats(),
        )
        self._core.send(request.client_index, output)
        if reason is not None:
            self._core.abort(request.request_id)
            return
        prompt = request.prompt_token_ids
        if prompt is not None:
            prompt.append(token)
        token_ids(request).append(token)
        request.num_prompt_tokens += 1
        request.max_tokens -= 1
        request.update_block_hashes()


def _end_by(request: Request, token: int) -> tuple[FinishReason | None, int | None]:
    """Return how a request ends by its first token, as vLLM's `check_stop` decides it."""
    params = request.sampling_params
    if token == params.eos_token_id:
        return FinishReason.STOP, None
    if token in (params.stop_token_ids or ()):
        return FinishReason.STOP, token
    # vLLM has cut the requested length to what a sequence may have.
    return (FinishReason.LENGTH if request.max_tokens <= 1 else None), None
