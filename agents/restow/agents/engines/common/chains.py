"""Name prefixes by content: chains of hashes that all engines compute alike.

A `PromptChain` has a hash after each quantum of a prompt's tokens. `RequestChains` keeps the chains
of the requests under way and translates the engine's own block hashes into them. `longest_prefix`
finds the largest prefix of a chain that all groups of an engine hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    """

    token_ids: Sequence[int]
    adapter: str = ""
    salt: str = ""
    attachments: Sequence[tuple[int, bytes]] = ()
    stop_token_ids: Collection[int] = ()
    block_hashes: Sequence[bytes] = ()
    limit_tokens: int | None = None

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

    def ends(self, request_id: str, last_tokens: int) -> tuple[tuple[int, bytes], ...]:
        """Return where replies may have ended in a prompt: token counts and their hashes.

        A reply's state stands before the token that ended it, or behind that token if the engine
        computes a step ahead. Ends at a whole quantum are left out, since the chain names them. The
        last `MAX_ENDS` of the other ends are returned.
        """
        followed = self._followed.get(request_id)
        if followed is None or not followed.prompt.stop_token_ids:
            return ()
        token_ids = followed.prompt.token_ids
        tokens = np.asarray(token_ids[: last_tokens + 1])
        before = np.flatnonzero(np.isin(tokens, list(followed.prompt.stop_token_ids)))
        ends = np.union1d(before, before + 1)
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


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A prefix of ``tokens``, and the hash of each of its blocks by group.

    None stands for a block before a window, which the group does not need. States have one block.
    """

    tokens: int
    blocks: dict[str, tuple[bytes | None, ...]]


def longest_prefix(
    chain: PromptChain, groups: Sequence[Group], holds: Mapping[str, Holds], below_tokens: int
) -> PrefixMatch | None:
    """Return the largest prefix that is held and ends below a token; None: there is none.

    The prefix has all blocks of attention, the last blocks of a window, and a snapshot at its end.
    """
    held = [_HeldBlocks(group, chain, holds[group.name]) for group in groups if not group.is_state]
    states = [group for group in groups if group.is_state]
    last = min([chain.tokens, below_tokens - 1, *(group_blocks.end for group_blocks in held)])
    for tokens in range(last - last % chain.quantum_tokens, 0, -chain.quantum_tokens):
        name = chain.at(tokens)
        if name is None or not all(holds[group.name](name) for group in states):
            continue
        if all(group_blocks.covers(tokens) for group_blocks in held):
            blocks = {
                group_blocks.group.name: tuple(group_blocks.needed(tokens)) for group_blocks in held
            }
            return PrefixMatch(tokens, blocks | {group.name: (name,) for group in states})
    return None


class _HeldBlocks:
    """The blocks of a chain that a group of tokens holds, and their hashes."""

    def __init__(self, group: Group, chain: PromptChain, holds: Holds) -> None:
        self.group = group
        size = group.block_tokens
        self._filled: list[tuple[int, bytes] | None] = []
        """By block: the token up to which it is filled, and the hash under which it is held."""
        self._first: list[int] = []
        """By block: the first of the blocks that are held without a gap up to it."""
        quanta, odd = divmod(size, chain.quantum_tokens)
        ends = () if odd else chain.hashes[quanta - 1 :: quanta]
        first = 0
        for index, start in enumerate(range(0, chain.tokens, size)):
            if index < len(ends) and holds(ends[index]):
                filled: tuple[int, bytes] | None = (start + size, ends[index])
            else:
                filled = _filled_furthest(chain, holds, start, start + size)
            if filled is None:
                if not group.window_tokens:
                    break
                first = index + 1
            self._filled.append(filled)
            self._first.append(first)
            if filled is not None and filled[0] < start + size:
                first = index + 1
        self.end = max((filled[0] for filled in self._filled if filled), default=0)

    def covers(self, tokens: int) -> bool:
        """Return whether all blocks are held that a state after ``tokens`` needs."""
        last = (tokens - 1) // self.group.block_tokens
        filled = self._filled[last] if last < len(self._filled) else None
        return (
            filled is not None and filled[0] >= tokens and self._first[last] <= self._from(tokens)
        )

    def needed(self, tokens: int) -> Iterator[bytes | None]:
        """Yield the hashes of the blocks that hold the first tokens."""
        for index in range((tokens - 1) // self.group.block_tokens + 1):
            filled = self._filled[index] if index >= self._from(tokens) else None
            yield None if filled is None else filled[1]

    def _from(self, tokens: int) -> int:
        return self.group.first_token(tokens) // self.group.block_tokens


def _filled_furthest(
    chain: PromptChain, holds: Holds, start: int, end: int
) -> tuple[int, bytes] | None:
    """Return the furthest token of a block, and its hash, under which the block is held."""
    for token in range(min(end, chain.tokens), start, -chain.quantum_tokens):
        name = chain.at(token)
        if name is not None and holds(name):
            return token, name
    return None
