"""Words of the core: where a handoff stands, who is named, by which keys things are found."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """Where a handoff stands; the last four are ends."""

    WAITING = "WAITING"
    READY = "READY"
    STAGING = "STAGING"
    READING = "READING"
    DONE = "DONE"
    FAILED = "FAILED"
    EXPIRED = "EXPIRED"
    CANCELLED = "CANCELLED"

    # An enum's own hash is a Python function, and states are looked up for every handoff.
    __hash__ = str.__hash__

    @property
    def ended(self) -> bool:
        """Whether nothing can happen to it any more."""
        return self in _ENDS


_ENDS = frozenset({State.DONE, State.FAILED, State.EXPIRED, State.CANCELLED})


class EngineKey(NamedTuple):
    """One engine of a tenant."""

    tenant: str
    engine_id: str


class AgentKey(NamedTuple):
    """The agent of one rank of an engine."""

    engine: EngineKey
    rank: int


class HostPair(NamedTuple):
    """Where pages are read, and where they arrive, as a tenant's agents say it."""

    tenant: str
    source_host: str
    destination_host: str


class PairKey(NamedTuple):
    """Two layouts of a tenant, by their digests, and the hosts between which costs were measured.

    Tenants share no plan: each has its own kept, and none learns what another uses.
    """

    tenant: str
    source_digest: str
    destination_digest: str
    hosts: HostPair | None = None


GroupIds = tuple[str, bytes]
"""A group's name and its block ids as packed little-endian int32."""


def size_of(blocks: tuple[GroupIds, ...]) -> int:
    """Bytes of the ids of all groups."""
    size_bytes = 0
    for _, ids in blocks:
        size_bytes += len(ids)
    return size_bytes


class Counterpart(NamedTuple):
    """An engine that took part in an ended handoff, and its words by which it did."""

    engine_id: str
    incarnation: str
    messages: tuple[int, ...]
    """Numbers of D's demands, or of the last chunk of P's publication."""
    agents: bytes = b""
    """Fingerprint of D's agents (`EngineRecord.fingerprint`); empty: of P, or not DONE."""
