"""A `Prefix` names the state after some tokens by its content, and the blocks of it by theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from restow.broker.client import content_of
from restow.broker.errors import RequestError

MAX_POSITION = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first ``position_tokens`` tokens of a prompt.

    ``block_hashes`` has a hash for each whole block of ``block_tokens`` tokens before the position,
    each of all tokens up to the block's end: equal hashes, equal states. ``content`` names the
    state at the position itself, as a handoff's content does; it must not be empty. Raises
    `RequestError` for another number of hashes.
    """

    block_tokens: int
    block_hashes: tuple[bytes, ...]
    position_tokens: int
    content: bytes

    def __post_init__(self) -> None:
        """Check."""
        if self.block_tokens < 1 or not 0 < self.position_tokens <= MAX_POSITION:
            raise RequestError(
                f"a prefix of {self.position_tokens} tokens in blocks of {self.block_tokens}",
                field="position_tokens",
            )
        whole = self.position_tokens // self.block_tokens
        if len(self.block_hashes) != whole:
            raise RequestError(
                f"{len(self.block_hashes)} hashes for the {whole} whole blocks of "
                f"{self.block_tokens} tokens before token {self.position_tokens}",
                field="block_hashes",
            )
        if not self.content or not all(self.block_hashes):
            raise RequestError("a prefix without a hash", field="content")

    @property
    def tail_tokens(self) -> int:
        """How many tokens lie behind the last whole block."""
        return self.position_tokens % self.block_tokens


def prefix_of(
    token_ids: Sequence[int], position_tokens: int, block_tokens: int, *, salt: str = ""
) -> Prefix:
    """The prefix of a prompt by `content_of`, which is a chain.

    >>> prefix = prefix_of([5, 6, 7], 3, 2)
    >>> prefix.block_hashes == (content_of([5, 6], 2),), prefix.content == content_of([5, 6, 7], 3)
    (True, True)
    """
    hashes = [
        content_of(token_ids, stop, salt=salt)
        for stop in range(block_tokens, position_tokens + 1, block_tokens)
    ]
    content = content_of(token_ids, position_tokens, salt=salt)
    return Prefix(block_tokens, tuple(hashes), position_tokens, content)
