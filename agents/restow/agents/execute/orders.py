"""The broker's orders as values, and how they come out of messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from restow.agents.binding.pages import Blocks, RegionTable, Tokens
from restow.agents.memory.errors import OrderInvalidError
from restow.agents.memory.regions import HOST, MemoryKind, MemoryPlace, RegionMemory, is_memory
from restow.agents.reading.host_memory import HostMemory
from restow.broker.layout.rows import Int64s
from restow.broker.layout.values import MAX_PAGE_BYTES
from restow.broker.rpc import wire
from restow.v1 import agent_link_pb2 as pb

_KIND_NUMBERS = {
    MemoryKind.HOST: pb.MEMORY_KIND_HOST,
    MemoryKind.CUDA: pb.MEMORY_KIND_CUDA,
}
_KINDS = {
    pb.MEMORY_KIND_UNSPECIFIED: MemoryKind.HOST,
    **{number: kind for kind, number in _KIND_NUMBERS.items()},
}


@dataclass(frozen=True, eq=False)
class Peer:
    """An agent to read from, and the memory of its regions."""

    agent_name: str
    rank: int
    metadata: bytes
    regions: RegionTable
    place: MemoryPlace
    """Where its regions are, and its staging."""
    host_memory: HostMemory | None = None
    """None: only NIXL reads it."""

    @cached_property
    def page_strides_bytes(self) -> tuple[int, ...]:
        """Bytes from page to page of each region."""
        return tuple(self.regions.page_stride_bytes.tolist())


@dataclass(frozen=True, slots=True)
class StagePart:
    """What is gathered for one destination rank."""

    program_id: str
    dst_rank: int


@dataclass(frozen=True, slots=True)
class StageOrder:
    """Gather what programs pack and interleave, in one launch; if ``hashed``, hash all reads."""

    handoff: int
    parts: tuple[StagePart, ...]
    src_blocks: Blocks
    tokens: Tokens
    hashed: bool = False


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """Measure in at most so many bytes of staging; ``agent_name`` empty: hold them for a reader.

    ``name_transport``: read from that agent once, and say how.
    """

    number: int
    size_bytes: int
    agent_name: str
    address: int
    name_transport: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """Whom to read from. ``staged_bytes`` 0: nothing is staged there. ``digest`` of all reads."""

    src_rank: int
    agent_name: str
    staged_address: int
    staged_bytes: int
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class ExecuteOrder:
    """Fill own pages from the sources within ``grant_s`` of the receipt.

    ``hashed``: what each source hashed must be what arrives. ``write_mark``: nothing is written
    before the engine's own writes up to that mark are done (`WriteMarks`).
    """

    handoff: int
    program_id: str
    src_blocks: Blocks
    dst_blocks: Blocks
    tokens: Tokens
    sources: tuple[Source, ...]
    grant_s: float
    hashed: bool = False
    write_mark: int = 0


@dataclass(frozen=True, slots=True)
class StagedRun:
    """Where the share of one destination rank lies, and the digest of all that it reads here."""

    dst_rank: int
    address: int
    length_bytes: int
    digest: bytes = b""


def staged_to_proto(handoff: int, run: StagedRun) -> pb.Staged:
    """A run as its agent announces it."""
    return pb.Staged(
        handoff=handoff,
        dst_rank=run.dst_rank,
        address=run.address,
        bytes=run.length_bytes,
        digest=run.digest,
    )


def region_to_proto(region: RegionMemory, place: tuple[str, int] = ("", 0)) -> pb.RegionMemory:
    """A region as an agent announces it; ``place`` is where it begins in which address space."""
    return pb.RegionMemory(
        name=region.name,
        base_address=region.base_address,
        page_count=region.page_count,
        page_stride_bytes=region.page_stride_bytes,
        memory=_KIND_NUMBERS[region.kind],
        device_id=region.device_id,
        space=place[0],
        space_address=place[1],
    )


def peer_from_proto(message: pb.Peer) -> Peer:
    """A peer. Raises `OrderInvalidError` if its regions can't be."""
    for region in message.regions:
        stride = region.page_stride_bytes
        if (
            region.memory not in _KINDS
            or region.device_id < 0
            or not 0 < stride <= MAX_PAGE_BYTES
            or not is_memory(region.base_address, region.page_count * stride)
        ):
            raise OrderInvalidError(
                f"agent {message.agent_name}, region {region.name}: {region.page_count} pages, one "
                f"each {stride} bytes, at address {region.base_address} of device "
                f"{region.device_id}, memory of kind {region.memory}, can't be",
                agent=message.agent_name,
            )
    places = {MemoryPlace(_KINDS[one.memory], one.device_id) for one in message.regions} or {HOST}
    if len(places) > 1:
        raise OrderInvalidError(
            f"agent {message.agent_name} has regions at several places, which no agent serves: "
            f"{', '.join(sorted(map(str, places)))}",
            agent=message.agent_name,
        )
    return Peer(
        message.agent_name,
        message.rank,
        message.nixl_metadata,
        RegionTable(
            _int64s([region.base_address for region in message.regions]),
            _int64s([region.page_stride_bytes for region in message.regions]),
            _int64s([region.page_count for region in message.regions]),
        ),
        places.pop(),
        HostMemory.decoded(message.host_memory),
    )


def stage_from_proto(message: pb.Stage) -> StageOrder:
    """An order to gather. Raises `PagesError` and `OrderInvalidError`."""
    parts = {part.dst_rank: StagePart(part.program_id, part.dst_rank) for part in message.parts}
    if not parts or len(parts) < len(message.parts):
        raise OrderInvalidError("an order to gather for nobody, or twice for one rank")
    return StageOrder(
        message.handoff,
        tuple(parts.values()),
        Blocks(wire.blocks_from_proto(message.src_blocks)),
        _tokens(message.first_token, message.stop_token),
        _hashed(message.digest),
    )


def probe_from_proto(message: pb.Probe) -> ProbeOrder:
    """An order to measure. Raises `OrderInvalidError`."""
    if message.agent_name and not is_memory(message.address, message.bytes):
        raise OrderInvalidError(
            f"agent {message.agent_name} holds {message.bytes} bytes at {message.address}, which "
            f"can't be",
            agent=message.agent_name,
        )
    if message.name_transport and not message.agent_name:
        raise OrderInvalidError("a transport is asked for, and no agent to read from is named")
    return ProbeOrder(
        message.number,
        message.bytes,
        message.agent_name,
        message.address,
        message.name_transport,
    )


def execute_from_proto(message: pb.Execute) -> ExecuteOrder:
    """An order to read. Raises `PagesError` and `OrderInvalidError`."""
    return ExecuteOrder(
        message.handoff,
        message.program_id,
        Blocks(wire.blocks_from_proto(message.src_blocks)),
        Blocks(wire.blocks_from_proto(message.dst_blocks)),
        _tokens(message.first_token, message.stop_token),
        tuple(
            Source(s.src_rank, s.agent_name, s.staged_address, s.staged_bytes, s.digest)
            for s in message.sources
        ),
        message.grant_ms / 1000,
        _hashed(message.digest),
        message.write_mark,
    )


def _hashed(kind: pb.DigestKind.ValueType) -> bool:
    if kind not in (pb.DIGEST_KIND_UNSPECIFIED, pb.DIGEST_KIND_XXH3_128):
        raise OrderInvalidError(f"digests of kind {kind} are not known here")
    return kind == pb.DIGEST_KIND_XXH3_128


def _tokens(first: int, stop: int) -> Tokens:
    if not 0 <= first <= stop:
        raise OrderInvalidError(f"tokens [{first}, {stop}) are no range")
    return Tokens(first, stop)


def _int64s(values: list[int]) -> Int64s:
    return np.array(values, np.int64)
