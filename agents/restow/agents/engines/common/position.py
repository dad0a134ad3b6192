"""P stops where D goes on: the state stands before the tokens that D computes anew.

D computes a prompt's last token again to sample the next one. Keys and values do not mind being
written twice; a recurrent state must not take the same token twice (vLLM PR #37310). And D's window
begins with what the token behind the position sees: the prompt's last one sees one token more.
"""

from __future__ import annotations


def backoff_tokens(recurrent: bool, windows: bool = False, lookahead_tokens: int = 0) -> int:
    """Tokens at a prompt's end that D computes anew and P must not have computed.

    ``lookahead_tokens``: what a speculative decoder at D writes ahead.
    """
    return max(1 if recurrent or windows else 0, lookahead_tokens - 1)


def position_tokens(prompt_tokens: int, backoff: int) -> int:
    """Where the state of a handed-over prompt stands; 0: there is nothing to hand over.

    >>> position_tokens(100, 1), position_tokens(100, 0), position_tokens(1, 1)
    (99, 100, 0)
    """
    return max(prompt_tokens - backoff, 0)
