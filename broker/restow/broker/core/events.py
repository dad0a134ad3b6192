"""What is said of a handoff, as the state machines take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from restow.broker.core.actions import Counterpart, GroupIds, State
from restow.broker.core.prefix.named import NamedPrefix
from restow.broker.planner import CopyCosts, ReadCosts


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
