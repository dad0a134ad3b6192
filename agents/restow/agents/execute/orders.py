"""The broker's orders as values, and their conversion from messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from restow.agents.binding.pages import Blocks, RegionTable, TokenRange
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
    """An agent to read from, with the memory of its regions."""

    agent_name: str
    rank: int
    metadata: bytes
    regions: RegionTable
    place: MemoryPlace
    """Place of its regions and its staging."""
    host_memory: HostMemory | None = None
    """Access for processes of its host; None if only NIXL can read it."""

    @cached_property
    def page_strides_bytes(self) -> tuple[int, ...]:
        """Bytes from page to page of each region."""
        return tuple(self.regions.page_stride_bytes.tolist())


@dataclass(frozen=True, slots=True)
class StagePart:
    """A destination rank's part of an order to gather."""

    program_id: str
    dst_rank: int


@dataclass(frozen=True, slots=True)
class StageOrder:
    """Gather what the programs pack and interleave, in one launch; hash all reads if ``hashed``."""

    handoff: int
    parts: tuple[StagePart, ...]
    src_blocks: Blocks
    tokens: TokenRange
    hashed: bool = False


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """Measure in at most ``size_bytes`` of staging.

    With an empty ``agent_name`` hold the memory for a reader. With ``name_transport`` read from
    the agent once and report the transport.
    """

    number: int
    size_bytes: int
    agent_name: str
    address: int
    name_transport: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """A rank to read from: its run (0 bytes if nothing is staged) and the digest of all reads."""

    src_rank: int
    agent_name: str
    staged_address: int
    staged_bytes: int
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class ExecuteOrder:
    """Fill own pages from the sources within ``grant_s`` of the receipt.

    ``hashed`` says that the bytes must match each source's digest. The agent writes nothing before
    the engine's own writes up to ``write_mark`` are done (`WriteMarks`).
    """

    handoff: int
    program_id: str
    src_blocks: Blocks
    dst_blocks: Blocks
    tokens: TokenRange
    sources: tuple[Source, ...]
    grant_s: float
    hashed: bool = False
    write_mark: int = 0


@dataclass(frozen=True, slots=True)
class StagedRun:
    """The run of one destination rank, with the digest of all bytes that the rank reads here."""

    dst_rank: int
    address: int
    length_bytes: int
    digest: bytes = b""


def staged_to_proto(handoff: int, run: StagedRun) -> pb.Staged:
    """Return the message that announces a run."""
    return pb.Staged(
        handoff=handoff,
        dst_rank=run.dst_rank,
        address=run.address,
        bytes=run.length_bytes,
        digest=run.digest,
    )


def region_to_proto(region: RegionMemory, place: tuple[str, int] = ("", 0)) -> pb.RegionMemory:
    """Return the message that announces a region; ``place`` is its address space and offset."""
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
    """Return the peer of a message. Raises `OrderInvalidError` if its regions are impossible."""
    for region in message.regions:
        stride = region.page_stride_bytes
        if (
            region.memory not in _KINDS
            or region.device_id < 0
            or not 0 < stride <= MAX_PAGE_BYTES
            or not is_memory(region.base_address, region.page_count * stride)
        ):
            raise OrderInvalidError(
                f"agent {message.agent_name} announced region {region.name}, which is impossible: "
                f"{region.page_count} pages of {stride} bytes at address {region.base_address} of "
                f"device {region.device_id}, memory of kind {region.memory}",
                agent=message.agent_name,
            )
    places = {
        MemoryPlace(_KINDS[region.memory], region.device_id) for region in message.regions
    } or {HOST}
    if len(places) > 1:
        raise OrderInvalidError(
            f"agent {message.agent_name} has regions at several places, but an agent serves only "
            f"one place: {', '.join(sorted(map(str, places)))}",
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
    """Return the order to gather. Raises `PagesError` and `OrderInvalidError`."""
    parts = {part.dst_rank: StagePart(part.program_id, part.dst_rank) for part in message.parts}
    if not parts or len(parts) < len(message.parts):
        raise OrderInvalidError("an order to gather names no rank, or one rank twice")
    return StageOrder(
        message.handoff,
        tuple(parts.values()),
        Blocks(wire.blocks_from_proto(message.src_blocks)),
        _tokens(message.first_token, message.stop_token),
        _hashed(message.digest),
    )


def probe_from_proto(message: pb.Probe) -> ProbeOrder:
    """Return the order to measure. Raises `OrderInvalidError`."""
    if message.agent_name and not is_memory(message.address, message.bytes):
        raise OrderInvalidError(
            f"agent {message.agent_name} cannot hold {message.bytes} bytes at address "
            f"{message.address}",
            agent=message.agent_name,
        )
    if message.name_transport and not message.agent_name:
        raise OrderInvalidError("an order asks for a transport, but names no agent to read from")
    return ProbeOrder(
        message.number,
        message.bytes,
        message.agent_name,
        message.address,
        message.name_transport,
    )


def execute_from_proto(message: pb.Execute) -> ExecuteOrder:
    """Return the order to read. Raises `PagesError` and `OrderInvalidError`."""
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
        raise OrderInvalidError(f"this agent does not know digests of kind {kind}")
    return kind == pb.DIGEST_KIND_XXH3_128


def _tokens(first: int, stop: int) -> TokenRange:
    if not 0 <= first <= stop:
        raise OrderInvalidError(f"tokens [{first}, {stop}) are not a range")
    return TokenRange(first, stop)


def _int64s(values: list[int]) -> Int64s:
    return np.array(values, np.int64)
