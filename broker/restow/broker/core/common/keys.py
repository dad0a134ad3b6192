"""Keys and states of the core: how handoffs, engines, agents and pairs are identified."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """The state of a handoff; the last four states are ends."""

    WAITING = "WAITING"
    READY = "READY"
    STAGING = "STAGING"
    READING = "READING"
    DONE = "DONE"
    FAILED = "FAILED"
    EXPIRED = "EXPIRED"
    CANCELLED = "CANCELLED"

    # Enum hashes are computed in Python, which is slow: states are looked up for every handoff.
    __hash__ = str.__hash__

    @property
    def ended(self) -> bool:
        """Return whether the state is an end, after which nothing changes."""
        return self in _ENDS


_ENDS = frozenset({State.DONE, State.FAILED, State.EXPIRED, State.CANCELLED})


class EngineKey(NamedTuple):
    """An engine of a tenant."""

    tenant: str
    engine_id: str


class AgentKey(NamedTuple):
    """The agent of a rank of an engine."""

    engine: EngineKey
    rank: int


class HostPair(NamedTuple):
    """The hosts where pages are read and where they arrive, as a tenant's agents name them."""

    tenant: str
    source_host: str
    destination_host: str


class PairKey(NamedTuple):
    """Two layouts of a tenant, by digest, and the costs for which their plan is made.

    Tenants share no plans, so that no tenant learns what another tenant uses.
    """

    tenant: str
    source_digest: str
    destination_digest: str
    on_devices: bool = False
    """Whether both engines keep their pages in devices' memory, for which other costs hold."""
    hosts: HostPair | None = None
    """The hosts between which the costs were measured; None: costs that nobody measured."""

    def is_alike(self, other: PairKey) -> bool:
        """Return whether the plans of two keys differ in nothing but costs."""
        return self[:-1] == other[:-1]


GroupIds = tuple[str, bytes]
"""A group's name and its block ids as packed little-endian int32."""


def size_of(blocks: tuple[GroupIds, ...]) -> int:
    """Return the bytes of the ids of all groups."""
    size_bytes = 0
    for _, ids in blocks:
        size_bytes += len(ids)
    return size_bytes


class Counterpart(NamedTuple):
    """An engine that took part in an ended handoff, and the messages by which it took part."""

    engine_id: str
    incarnation: str
    messages: tuple[int, ...]
    """Numbers of D's demands, or the number of the last chunk of P's publication."""
    agents: bytes = b""
    """Fingerprint of D's agents (`EngineRecord.fingerprint`); empty for P, or if the end is not
    DONE."""
