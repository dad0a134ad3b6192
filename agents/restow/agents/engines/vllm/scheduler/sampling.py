"""`why_not_handed_on` tells requests whose first token P may sample from those where D must."""

from __future__ import annotations

import hashlib

from restow.agents.engines.vllm.scheduler.prompt import Request

_DECIDING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("logit_bias", "allowed_token_ids", "watermarking"),
)
"""Parameters that a token depends on, where P may sample it."""
_LOOKING_BACK = ("presence_penalty", "frequency_penalty", "min_tokens", "bad_words")
"""Parameters by which a token depends on those that were sampled before it."""
_OF_EACH_TOKEN = (
    *("logprobs", "prompt_logprobs", "logprob_token_ids"),
    *("structured_outputs", "thinking_token_budget", "repetition_detection"),
    "trace_decode_token_ids",
)
"""Parameters for which D would have to know more of a token than which it is."""


def sampling_word(request: Request) -> bytes:
    """Return a hash of all that decides the next token beside what the model says of it.

    P's token is D's first where both were told the same. Which token ends a reply does not decide
    it, nor does a seed where nothing is drawn.
    """
    params = request.sampling_params
    said = {name: getattr(params, name, None) for name in _DECIDING}
    said["logit_bias"] = sorted((said["logit_bias"] or {}).items())
    said["allowed_token_ids"] = sorted(set(said["allowed_token_ids"] or ()))
    return hashlib.sha256(repr(sorted(said.items())).encode()).digest()


def why_not_handed_on(request: Request) -> str:
    """Return why P's token can't be D's first, in words; empty: it can.

    What D samples later must be as if it had sampled that one too, and D's worker takes it for the
    prompt's. P and D say the same as long as they are given the same parameters (vLLM 0.32
    `sampling_params.py`).
    """
    params = request.sampling_params
    if request.prompt_token_ids is None or request.prompt_embeds is not None or request.resumable:
        return "the prompt is not given by tokens alone"
    if params is None:
        return "nothing is sampled"
    if params.seed is not None and params.temperature > 0:
        return "seed"
    for name in _LOOKING_BACK:
        if getattr(params, name, None):
            return name
    for name in _OF_EACH_TOKEN:
        if getattr(params, name, None) is not None:
            return name
    return ""


def is_of_vocabulary(token: int, vocabulary_tokens: int) -> bool:
    """Return whether a model with so many tokens has this one; no client is told another one.

    >>> is_of_vocabulary(31_999, 32_000), is_of_vocabulary(32_000, 32_000), is_of_vocabulary(-1, 9)
    (True, False, False)
    """
    return 0 <= token < vocabulary_tokens
