"""Events: what engines and agents say, as the directory takes it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import NamedTuple

from restow.broker.core.common.keys import Counterpart, EngineKey, GroupIds, State
from restow.broker.layout.values import ModelIdentity
from restow.broker.planner import CopyCosts, ReadCosts

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


CONTENT_BYTES = 16


class NamedPrefix(NamedTuple):
    """The state after exactly so many tokens, known by their hashes.

    ``hashes`` are those of all whole quanta of them; ``end_hash`` is that of all tokens, where they
    are no whole number of quanta.
    """

    position_tokens: int
    form: HashForm
    salt: str
    hashes: bytes
    end_hash: bytes = b""
    revision: str = ""
    """Revision of the weights that computed it; empty: that of the layout of who names it."""

    @property
    def size_bytes(self) -> int:
        """Of its hashes."""
        return len(self.hashes) + len(self.end_hash)

    @property
    def last_hash(self) -> bytes:
        """That of all of its tokens."""
        return self.end_hash or self.hashes[-self.form.hash_bytes :]

    @property
    def content(self) -> bytes:
        """What a publication of it names as its content: the same in every broker's life."""
        named = json.dumps([*self.form, self.salt, self.position_tokens]).encode() + self.last_hash
        return hashlib.blake2b(named, digest_size=CONTENT_BYTES).digest()

    def chain(self, model: ModelIdentity) -> Chain:
        """It as what is looked up: of a holder's states the one at its end, or an earlier one."""
        ends = (ChainEnd(self.position_tokens, self.end_hash),) if self.end_hash else ()
        return Chain(model, self.form, self.salt, self.hashes, ends=ends)


class Chunk(NamedTuple):
    """A part of P's publication."""

    blocks: tuple[tuple[str, int, bytes], ...]
    """Group, place of the first id, ids."""
    position_tokens: int
    final: bool
    lease_s: float
    trace_parent: str = ""
    content: bytes = b""
    """Names the state's content; empty: not named."""
    repeated: bool = False
    """It was said on an earlier stream."""
    readers: int = 0
    """How many must have it before P's pages are free; 0: not said."""
    sampled_token: int | None = None
    """What P sampled behind the position; None: nothing."""
    anew: bool = False
    """Whether P has taken back every chunk that was said without it."""
    revision: str = ""
    """Revision of the weights that computed the state; empty: that of P's layout."""
    number: int = 0
    """The number of P's message; the same when it is repeated. 0: it has none."""


class Wish(NamedTuple):
    """D's demand; ``position_tokens`` 0: a state at any position.

    ``repeated``: it was said on an earlier stream, perhaps to a broker before this one.
    """

    blocks: tuple[GroupIds, ...]
    held_tokens: int
    timeout_s: float
    position_tokens: int = 0
    repeated: bool = False
    trace_parent: str = ""
    content: bytes = b""
    """Names the content that D wants; empty: not named."""
    demand: int = 0
    """The number of D's message; the same when it is repeated."""
    readers: int = 0
    """For how many the handoff is, as a router told D; 0: not said."""
    prefix: NamedPrefix | None = None
    """What is to be found, in place of what a P was told to publish."""
    takes_sampled: bool = False
    """Whether D goes on behind the token that P sampled."""
    revision: str = ""
    """Revision of the weights that D computes with; empty: that of its layout."""
    write_mark: int = 0
    """Agents write when D's engine has told them that its writes before this are done; 0: now."""


class StagedRun(NamedTuple):
    """What a source's agent gathered, and the digest of all that is read there, if it made one."""

    address: int
    size_bytes: int
    digest: bytes = b""

    def kept(self, hashed: bool) -> StagedRun:
        """What is kept of it: a digest only where one was asked for."""
        return self if hashed else self._replace(digest=b"")


class Settlement(NamedTuple):
    """What a destination's agent reports at the end of its part."""

    number: int
    bytes: int
    elapsed_us: int
    reason: str
    detail: str
    compared: bool = False
    """Whether it compared digests, and found none that differs."""


class Probed(NamedTuple):
    """What an agent measured, or why it could not."""

    number: int
    address: int
    size_bytes: int
    copying: CopyCosts
    reading: ReadCosts | None
    elapsed_us: int
    reason: str
    detail: str = ""
    transport: str = ""
    method: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a handoff ends other than DONE."""

    state: State
    reason: str
    detail: str


class KnownEnd(NamedTuple):
    """An end that another broker told an engine, as the engine tells it to this one."""

    of_demand: bool
    """Whether it ended the engine's demand; else its publication."""
    failure: Failure | None
    """None: DONE."""
    bytes: int
    position: int
    compared: bool
    counterparts: tuple[Counterpart, ...]
    sampled: int | None = None
    readers: int = 0
