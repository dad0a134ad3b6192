"""A `Chain` names the prefixes of one prompt: a hash after each quantum of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

QUANTUM_TOKENS = 16
"""Of vLLM's block sizes a divisor, unless somebody asked for smaller ones."""


def quantum_of(hash_block_tokens: int) -> int:
    """The tokens of a quantum where vLLM hashes so many at a time.

    It is the same for nearly all engines, whatever the size of their blocks: those of a hybrid
    hold as many tokens as its states have room for, and so depend on its tensor parallelism.

    >>> quantum_of(16), quantum_of(528), quantum_of(8)
    (16, 16, 8)
    """
    return gcd(QUANTUM_TOKENS, hash_block_tokens)


@dataclass(frozen=True, slots=True)
class Chain:
    """Hashes after the first, second, ... ``quantum_tokens`` of a prompt."""

    quantum_tokens: int
    hashes: tuple[bytes, ...]

    @property
    def tokens(self) -> int:
        """How many tokens of the prompt are named."""
        return self.quantum_tokens * len(self.hashes)

    def at(self, token: int) -> bytes | None:
        """The hash of what comes before ``token``; None where the chain has none.

        >>> Chain(16, (b"a", b"b")).at(32), Chain(16, (b"a", b"b")).at(24)
        (b'b', None)
        """
        index, inside = divmod(token, self.quantum_tokens)
        return None if inside or not 0 < index <= len(self.hashes) else self.hashes[index - 1]
