"""Where prefill stops."""

from __future__ import annotations


def prefill_position(prompt_tokens: int, recurrent: bool) -> int:
    """Tokens that P absorbs of a prompt, and that D takes as held.

    D computes the last prompt token again to sample from it. For attention that is idempotent; a
    recurrence would absorb the token twice. So a model with recurrent state stops at N-1, unless
    that leaves nothing to prefill (vLLM `base_scheduler.py`, `_prefill_backoff`).

    >>> prefill_position(10, recurrent=True), prefill_position(10, recurrent=False)
    (9, 10)
    """
    return prompt_tokens - 1 if recurrent and prompt_tokens > 1 else prompt_tokens
