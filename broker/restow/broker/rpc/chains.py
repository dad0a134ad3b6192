"""What a chain may be made by: bounds that both sides check before anything is sent or kept."""

from __future__ import annotations

import re

from restow.broker.block_ids import is_whole
from restow.broker.errors import ChainInvalidError, RequestError
from restow.broker.layout.limits import MAX_WORD_LENGTH

MAX_ALGORITHM_LENGTH = 64
MAX_QUANTUM_TOKENS = 16_384
MAX_HASH_BYTES = 64
MAX_SALT_LENGTH = 256
MAX_BATCH_HASHES = 4096
"""Of one batch of holdings, in all of its runs."""
WORD_BYTES = 8
_HALF = re.compile("[\ud800-\udfff]")
"""Of a character that UTF-16 writes as two: no message can have it alone."""


def check_form(algorithm: str, quantum_tokens: int, hash_bytes: int) -> None:
    """Raise `ChainInvalidError` for what no chain can be made by."""
    if not 0 < len(algorithm) <= MAX_ALGORITHM_LENGTH or not algorithm.isprintable():
        raise ChainInvalidError(
            f"algorithm must have 1 to {MAX_ALGORITHM_LENGTH} printable characters",
            field="algorithm",
        )
    if hash_bytes % WORD_BYTES or not WORD_BYTES <= hash_bytes <= MAX_HASH_BYTES:
        raise ChainInvalidError(
            f"hash_bytes is {hash_bytes}; it must be a multiple of {WORD_BYTES}, at most "
            f"{MAX_HASH_BYTES}",
            field="hash_bytes",
        )
    if not is_whole(quantum_tokens, MAX_QUANTUM_TOKENS + 1) or not quantum_tokens:
        raise ChainInvalidError(
            f"quantum_tokens is {quantum_tokens!r}; it must be 1 to {MAX_QUANTUM_TOKENS}",
            field="quantum_tokens",
        )


def check_salt(salt: str) -> None:
    """Raise `ChainInvalidError` for one that is too long, or no text that can be sent."""
    if len(salt) > MAX_SALT_LENGTH:
        raise ChainInvalidError(
            f"a salt has {len(salt)} characters; it may have {MAX_SALT_LENGTH}", field="salt"
        )
    if _HALF.search(salt):
        raise ChainInvalidError("a salt has half of a character", field="salt")


def check_revision(revision: str) -> None:
    """Raise `RequestError` for text that can be no revision; empty text is no revision, too."""
    if not 0 < len(revision) <= MAX_WORD_LENGTH or not revision.isprintable():
        raise RequestError(
            f"a revision must have 1 to {MAX_WORD_LENGTH} printable characters", field="revision"
        )
