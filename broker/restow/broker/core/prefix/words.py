"""What is said of prefixes, as the state machines take it."""

from __future__ import annotations

from typing import NamedTuple

from restow.broker.core.actions import EngineKey
from restow.broker.layout.values import ModelIdentity

MAX_CHAIN_HASHES = 65_536
"""Of one call, in one chain or many: a million tokens by 16."""
MAX_CHAINS = 64
MAX_HASH_BYTES = 64
MAX_ENDS = 64
"""Of one chain, between its quanta."""


class HashForm(NamedTuple):
    """How the tokens of a prompt become a chain of hashes, one after each quantum."""

    algorithm: str
    quantum_tokens: int
    hash_bytes: int

    def __str__(self) -> str:
        """For people."""
        tokens, size = self.quantum_tokens, self.hash_bytes
        return f"{self.algorithm!r} after every {tokens} tokens, of {size} bytes"


class Run(NamedTuple):
    """Hashes of a chain that follow each other, for one group. ``parent`` is the one before them.

    Each stands for what the group has of the tokens just before it: a block, or a snapshot.
    """

    group: str
    hashes: bytes
    parent: bytes = b""


class Batch(NamedTuple):
    """What an engine has evicted, and then what it holds since. Numbers rise by one, from 1."""

    number: int
    form: HashForm
    salt: str
    held: tuple[Run, ...] = ()
    evicted: tuple[Run, ...] = ()
    revision: str = ""
    """Revision of the weights that computed it all; empty: that of the engine's layout."""


class ChainEnd(NamedTuple):
    """A token between two quanta at which a state may stand too, and the hash of all before it."""

    position_tokens: int
    hashed: bytes


class Chain(NamedTuple):
    """What is asked for: hashes after the first, second, ... quantum of a prompt's tokens.

    ``below_tokens``: a state must stand before that token; 0: anywhere in the chain, or at one of
    its ``ends``, whose positions rise.
    """

    model: ModelIdentity
    form: HashForm
    salt: str
    hashes: bytes
    below_tokens: int = 0
    ends: tuple[ChainEnd, ...] = ()


class Held(NamedTuple):
    """How many tokens of a chain an engine says that it holds, in all of its groups."""

    engine: EngineKey
    tokens: int
