"""Name prefixes by content: chains of hashes that all engines compute alike.

A `PromptChain` has a hash after each quantum of a prompt's tokens. `RequestChains` keeps the chains
of the requests under way and translates the engine's own block hashes into them. `state_blocks`
finds the blocks of a state that all groups of an engine hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from restow.agents.engines.common.blocks import Group
from restow.broker.client import ContentChain
from restow.broker.client.engine.chains import contents_of

QUANTUM_TOKENS = 16
"""Tokens of a quantum. It divides the usual block sizes of engines."""
MAX_ENDS = 16
"""Ends of replies that one prompt asks for: two for each of eight turns."""


def quantum_of(hash_block_tokens: int) -> int:
    """Return the tokens of a quantum for an engine that hashes ``hash_block_tokens`` at a time.

    It is the same for nearly all engines, whatever the size of their blocks. The blocks of a hybrid
    hold as many tokens as its states take bytes, so their size depends on tensor parallelism.

    >>> quantum_of(16), quantum_of(528), quantum_of(8)
    (16, 16, 8)
    """
    return gcd(QUANTUM_TOKENS, hash_block_tokens)


@dataclass(frozen=True, slots=True)
class PromptChain:
    """Hashes after the first, second, ... ``quantum_tokens`` of a prompt."""

    quantum_tokens: int
    hashes: tuple[bytes, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens that the chain names."""
        return self.quantum_tokens * len(self.hashes)

    def at(self, token: int) -> bytes | None:
        """Return the hash of all tokens before ``token``; None where the chain has no hash.

        >>> PromptChain(16, (b"a", b"b")).at(32), PromptChain(16, (b"a", b"b")).at(24)
        (b'b', None)
        """
        index, inside = divmod(token, self.quantum_tokens)
        return None if inside or not 0 < index <= len(self.hashes) else self.hashes[index - 1]


# -- the chains of requests -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class FollowedPrompt:
    """A request's tokens and whatever else its state is computed from.

    ``token_ids`` and ``block_hashes`` are the engine's own lists, which grow with the request.
    ``block_hashes`` are the engine's names of full blocks; only those of the first ``limit_tokens``
    are used (None: all). ``stop_token_ids`` end replies, so earlier replies may have ended there.
    ``moved``: the prompt is that of a reply which another engine has begun, and it ends where that
    engine has left its state.
    """

    token_ids: Sequence[int]
    adapter: str = ""
    salt: str = ""
    attachments: Sequence[tuple[int, bytes]] = ()
    stop_token_ids: Collection[int] = ()
    block_hashes: Sequence[bytes] = ()
    limit_tokens: int | None = None
    moved: bool = False

    @property
    def made_of(self) -> dict[str, Any]:
        """What the content consists of beside tokens."""
        return {"adapter": self.adapter, "salt": self.salt, "attachments": self.attachments}


class HashedPrefix(NamedTuple):
    """The tokens before ``token``, by the hash that all engines compute alike.

    ``parent`` is the engine's own hash of the block before; None: this is the first block.
    """

    token: int
    hash: bytes
    parent: bytes | None


@dataclass(slots=True, eq=False)
class _Followed:
    """A request, and the hashes that were computed of its tokens so far."""

    prompt: FollowedPrompt
    text: ContentChain
    hashes: list[bytes] = field(default_factory=list)
    own: list[bytes] = field(default_factory=list)
    """The engine's own block hashes that were translated for the request."""


class RequestChains:
    """The chains of requests under way. Belongs to the scheduler's thread.

    An engine's own block hashes differ between engines by algorithm, seed and block size, and may
    name an adapter by its path. These hashes depend on content alone (`ContentChain`).
    """

    def __init__(self, hash_block_tokens: int) -> None:
        """Follow no request yet; the engine hashes ``hash_block_tokens`` at a time."""
        self._hash_block_tokens = hash_block_tokens
        self.quantum_tokens = quantum_of(hash_block_tokens)
        self._followed: dict[str, _Followed] = {}
        self._named: dict[bytes, HashedPrefix] = {}
        self._uses: dict[bytes, int] = {}

    def begin(self, request_id: str, prompt: FollowedPrompt) -> None:
        """Follow a request that came in."""
        self._followed[request_id] = _Followed(prompt, ContentChain(**prompt.made_of))

    def end(self, request_id: str) -> None:
        """Forget a request."""
        followed = self._followed.pop(request_id, None)
        for own in followed.own if followed else ():
            self._uses[own] -= 1
            if not self._uses[own]:
                del self._uses[own], self._named[own]

    def chain(self, request_id: str) -> PromptChain | None:
        """Return the chain of a request's tokens so far; None: the request is not followed."""
        followed = self._followed.get(request_id)
        if followed is None:
            return None
        self._read(followed)
        return PromptChain(self.quantum_tokens, tuple(followed.hashes))

    def is_moved(self, request_id: str) -> bool:
        """Return whether a request goes on with a reply of another engine."""
        followed = self._followed.get(request_id)
        return followed is not None and followed.prompt.moved

    def ends(self, request_id: str, last_tokens: int) -> tuple[tuple[int, bytes], ...]:
        """Return where replies may have ended in a prompt: token counts and their hashes.

        A reply's state stands before the token that ended it, or behind that token if the engine
        computes a step ahead. Ends at a whole quantum are left out, since the chain names them. The
        last `MAX_ENDS` of the other ends are returned.
        """
        followed = self._followed.get(request_id)
        if followed is None or not (followed.prompt.stop_token_ids or followed.prompt.moved):
            return ()
        token_ids = followed.prompt.token_ids
        tokens = np.asarray(token_ids[: last_tokens + 1])
        before = np.flatnonzero(np.isin(tokens, list(followed.prompt.stop_token_ids)))
        ends = np.union1d(before, before + 1)
        if followed.prompt.moved:
            ends = np.union1d(ends, [last_tokens])
        ends = ends[(ends % self.quantum_tokens != 0) & (ends <= last_tokens)][-MAX_ENDS:].tolist()
        names = contents_of(token_ids, ends, **followed.prompt.made_of)
        return tuple(zip(ends, names, strict=True))

    def named(self, own: bytes) -> HashedPrefix | None:
        """Translate the engine's own block hash; None: no request under way has that block."""
        prefix = self._named.get(own)
        if prefix is None:
            for followed in self._followed.values():
                if len(followed.prompt.block_hashes) > len(followed.own):
                    self._name(followed)
            prefix = self._named.get(own)
        return prefix

    def before(self, named: HashedPrefix, block_tokens: int) -> bytes:
        """Return the hash of the tokens before the full block that ends at ``named``."""
        prefix: HashedPrefix | None = named
        for _ in range(block_tokens // self._hash_block_tokens):
            prefix = (
                self._named.get(prefix.parent) if prefix and prefix.parent is not None else None
            )
        return prefix.hash if prefix else b""

    def _read(self, followed: _Followed) -> None:
        tokens = followed.prompt.token_ids[followed.text.tokens :]
        followed.hashes += followed.text.extend(tokens, self.quantum_tokens)

    def _name(self, followed: _Followed) -> None:
        self._read(followed)
        quanta = self._hash_block_tokens // self.quantum_tokens
        block_hashes, limit_tokens = followed.prompt.block_hashes, followed.prompt.limit_tokens
        count = min(len(block_hashes), len(followed.hashes) // quanta)
        if limit_tokens is not None:
            count = min(count, limit_tokens // self._hash_block_tokens)
        for index in range(len(followed.own), count):
            own = block_hashes[index]
            self._named[own] = HashedPrefix(
                (index + 1) * self._hash_block_tokens,
                followed.hashes[(index + 1) * quanta - 1],
                followed.own[index - 1] if index else None,
            )
            self._uses[own] = self._uses.get(own, 0) + 1
            followed.own.append(own)


# -- the largest prefix that is held --------------------------------------------------------------

Holds = Callable[[bytes], bool]
"""Return whether a group holds blocks of the tokens that a hash names."""


def state_blocks(
    chain: PromptChain, groups: Sequence[Group], holds: Mapping[str, Holds]
) -> dict[str, list[bytes | None]] | None:
    """Return the hashes of all blocks of the state after a chain, by group; None: one is missing.

    The state has all blocks of attention, the last blocks of a window, and a snapshot at its end.
    None in place of a hash stands for a block before a window, which the group does not need.
    """
    if not chain.hashes:
        return None
    blocks: dict[str, list[bytes | None]] = {}
    for group in groups:
        size, first = group.block_tokens, group.first_token(chain.tokens)
        ends = [min(start + size, chain.tokens) for start in range(0, chain.tokens, size)]
        if group.is_state:
            first, ends = 0, [chain.tokens]
        needed = [chain.at(end) for end in ends if end > first]
        if not all(name is not None and holds[group.name](name) for name in needed):
            return None
        blocks[group.name] = [*[None] * (len(ends) - len(needed)), *needed]
    return blocks
