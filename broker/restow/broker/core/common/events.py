"""Events: the words of engines and agents as the directory receives them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import NamedTuple

from restow.broker.core.common.keys import Counterpart, EngineKey, GroupIds, State
from restow.broker.layout.values import ModelIdentity
from restow.broker.planner import CopyCosts, ReadCosts
from restow.broker.state_commands import Verb

MAX_CHAIN_HASHES = 65_536
"""Hashes per call, in all of its chains: a million tokens in quanta of 16."""
MAX_CHAINS = 64
MAX_HASH_BYTES = 64
MAX_ENDS = 64
"""Ends between quanta in a chain."""


class HashForm(NamedTuple):
    """How the tokens of a prompt become a chain of hashes, with a hash after each quantum."""

    algorithm: str
    quantum_tokens: int
    hash_bytes: int

    def __str__(self) -> str:
        """Describe the form for people."""
        tokens, size = self.quantum_tokens, self.hash_bytes
        return f"{self.algorithm!r} after every {tokens} tokens, of {size} bytes"


class HashRun(NamedTuple):
    """Consecutive hashes of a chain for one group; ``parent`` is the hash before the first.

    Each hash stands for what the group holds of the tokens just before it: a block or a snapshot.
    """

    group: str
    hashes: bytes
    parent: bytes = b""


class Batch(NamedTuple):
    """An engine's evictions, and what it has held since then. Batch numbers rise by 1, from 1."""

    number: int
    form: HashForm
    salt: str
    held: tuple[HashRun, ...] = ()
    evicted: tuple[HashRun, ...] = ()
    revision: str = ""
    """Revision of the weights that computed the states; empty: that of the engine's layout."""


class ChainEnd(NamedTuple):
    """A position between two quanta where a state may stand, and the hash of all tokens before."""

    position_tokens: int
    hashed: bytes


class Chain(NamedTuple):
    """The hashes of a prompt to look up, after its first, second, ... quantum.

    A state must stand before token ``below_tokens``; 0 allows any position. Possible positions are
    the quanta of the chain and its ``ends``, whose positions rise.
    """

    model: ModelIdentity
    form: HashForm
    salt: str
    hashes: bytes
    below_tokens: int = 0
    ends: tuple[ChainEnd, ...] = ()


class Held(NamedTuple):
    """The number of leading tokens of a chain that an engine holds in all of its groups."""

    engine: EngineKey
    tokens: int


CONTENT_BYTES = 16


class NamedPrefix(NamedTuple):
    """The state after exactly ``position_tokens`` tokens, identified by their hashes.

    ``hashes`` are the hashes of all whole quanta. ``end_hash`` is the hash of all tokens if these
    are no whole number of quanta, and empty otherwise.
    """

    position_tokens: int
    form: HashForm
    salt: str
    hashes: bytes
    end_hash: bytes = b""
    revision: str = ""
    """Revision of the weights that computed the state; empty: that of the speaker's layout."""

    @property
    def size_bytes(self) -> int:
        """Return the size of the hashes."""
        return len(self.hashes) + len(self.end_hash)

    @property
    def last_hash(self) -> bytes:
        """Return the hash of all tokens."""
        return self.end_hash or self.hashes[-self.form.hash_bytes :]

    @property
    def content(self) -> bytes:
        """Return the content that a publication of this state names, the same at every broker."""
        named = json.dumps([*self.form, self.salt, self.position_tokens]).encode() + self.last_hash
        return hashlib.blake2b(named, digest_size=CONTENT_BYTES).digest()

    def chain(self, model: ModelIdentity) -> Chain:
        """Return the chain to look up; a holder may have the state at its end or before it."""
        ends = (ChainEnd(self.position_tokens, self.end_hash),) if self.end_hash else ()
        return Chain(model, self.form, self.salt, self.hashes, ends=ends)


class Command(NamedTuple):
    """A command as a caller gave it."""

    command_id: str
    verb: Verb
    engine: EngineKey
    prefix: NamedPrefix
    timeout_s: float
    for_s: float = 0.0
    """How long a pin lasts."""
    target: EngineKey | None = None
    """The store that gets the state of a move."""

    @property
    def state(self) -> tuple[str, bytes]:
        """Name the state in a few bytes: its revision and content."""
        return self.prefix.revision, self.prefix.content


class Chunk(NamedTuple):
    """A chunk of P's publication."""

    blocks: tuple[tuple[str, int, bytes], ...]
    """For each group: its name, the index of the first id in the group's list, and the packed ids.
    """
    position_tokens: int
    final: bool
    lease_s: float
    trace_parent: str = ""
    content: bytes = b""
    """Identifies the state's content; empty if P named none."""
    repeated: bool = False
    """Whether P already sent the chunk on an earlier stream."""
    readers: int = 0
    """Readers that must have the state before P's pages are free; 0 if P named no number."""
    sampled_token: int | None = None
    """The token that P sampled after the position; None if it sampled none."""
    anew: bool = False
    """Whether P has withdrawn all chunks before the first chunk with this flag."""
    revision: str = ""
    """Revision of the weights that computed the state; empty: that of P's layout."""
    number: int = 0
    """The number of P's message, the same when it is repeated; 0 if it has none."""


class Wish(NamedTuple):
    """D's demand; a ``position_tokens`` of 0 accepts a state at any position.

    ``repeated`` says that D already sent it on an earlier stream, perhaps to an earlier broker.
    """

    blocks: tuple[GroupIds, ...]
    held_tokens: int
    timeout_s: float
    position_tokens: int = 0
    repeated: bool = False
    trace_parent: str = ""
    content: bytes = b""
    """Identifies the content that D wants; empty if D named none."""
    demand: int = 0
    """The number of D's message, the same when it is repeated."""
    readers: int = 0
    """Readers that the handoff is for, as a router told D; 0 if D named no number."""
    prefix: NamedPrefix | None = None
    """The prefix to find among holders; None if a router told a P to publish."""
    takes_sampled: bool = False
    """Whether D continues after the token that P sampled."""
    revision: str = ""
    """Revision of the weights that D computes with; empty: that of D's layout."""
    write_mark: int = 0
    """Agents write after D's engine has told them that its writes before this mark are done; 0: at
    once."""


class StagedRun(NamedTuple):
    """A run that a source's agent gathered, and the digest of what is read there, if any."""

    address: int
    size_bytes: int
    digest: bytes = b""

    def kept(self, hashed: bool) -> StagedRun:
        """Return the run to store; it keeps its digest only if a digest was requested."""
        return self if hashed else self._replace(digest=b"")


class Settlement(NamedTuple):
    """The report of a destination's agent at the end of its part."""

    number: int
    bytes: int
    elapsed_us: int
    reason: str
    detail: str
    compared: bool = False
    """Whether the agent compared digests and found no difference."""


class Probed(NamedTuple):
    """The measurement of an agent, or why it could not measure."""

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
    """Why a handoff ended with a state other than DONE."""

    state: State
    reason: str
    detail: str


class KnownEnd(NamedTuple):
    """An end that an engine heard from an earlier broker and reports to this broker."""

    of_demand: bool
    """Whether the engine's demand ended; otherwise its publication ended."""
    failure: Failure | None
    """None if the handoff ended DONE."""
    bytes: int
    position: int
    compared: bool
    counterparts: tuple[Counterpart, ...]
    sampled: int | None = None
    readers: int = 0
