"""Prompts whose prefixes are named."""

from __future__ import annotations

from restow.agents.engines.common.chains import FollowedPrompt
from restow.broker.client import content_of

TOKENS = list(range(40))


def prompt(
    tokens: list[int], block_tokens: int = 8, adapter: str = "", salt: str = ""
) -> FollowedPrompt:
    """Return a prompt whose block hashes stand for its tokens and its salt."""
    hashes = [
        b"own" + content_of(tokens, end, salt=salt)
        for end in range(block_tokens, len(tokens) + 1, block_tokens)
    ]
    return FollowedPrompt(list(tokens), adapter, salt, block_hashes=hashes)
