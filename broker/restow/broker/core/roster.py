"""Who is there: engines with their layouts, and the agents of their ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from restow.broker.core.actions import AgentKey, EngineKey
from restow.broker.core.early_fences import EarlyFences
from restow.broker.errors import (
    AgentMismatchError,
    AgentUnknownError,
    EngineReplacedError,
    PageCountError,
    PageRangeError,
    PagesError,
)
from restow.broker.layout import Layout, RankLayout
from restow.broker.layout.span import volume

MAX_BLOCKS = 1 << 20
MAX_ADDRESS = 1 << 63
MAX_IDS = 1 << 31

_UNSIGNED = np.dtype("<u4")


def is_memory(address: int, size_bytes: int) -> bool:
    """Whether bytes may lie there; no bytes may lie anywhere."""
    return size_bytes >= 0 and (not size_bytes or 0 < address <= MAX_ADDRESS - size_bytes)


@dataclass(frozen=True, slots=True)
class RegionMemory:
    """Where a region of a rank lies."""

    name: str
    base_address: int
    page_count: int
    memory: int
    device_id: int


@dataclass(slots=True, eq=False)
class AgentRecord:
    """A connected agent and what it has been told."""

    key: AgentKey
    agent_name: str
    nixl_metadata: bytes
    regions: tuple[RegionMemory, ...]
    page_strides_bytes: tuple[int, ...]
    staging_bytes: int
    host: str = ""
    """Empty: unknown."""
    host_memory: bytes = b""
    """What agents of its host read it by; theirs to understand."""
    follows: bool = False
    """Whether it can read runs that are still being gathered."""
    programs: set[str] = field(default_factory=set)
    peers: set[str] = field(default_factory=set)
    gone: bool = False
    """Its stream broke: what still arrives from it changes nothing."""
    gone_s: float = 0.0
    """When that was."""

    def is_back_as(self, other: AgentRecord) -> bool:
        """Whether ``other`` is the same agent on another stream, with the memory that it had."""
        return (
            self.agent_name == other.agent_name
            and self.nixl_metadata == other.nixl_metadata
            and self.regions == other.regions
            and self.staging_bytes == other.staging_bytes
            and self.host_memory == other.host_memory
        )

    @property
    def tenant(self) -> str:
        """Whose agent it is."""
        return self.key.engine.tenant

    @property
    def region_bytes(self) -> int:
        """Bytes of its regions."""
        strides = self.page_strides_bytes
        return sum(m.page_count * s for m, s in zip(self.regions, strides, strict=True))


@dataclass(slots=True, eq=False)
class EngineRecord:
    """A registered engine in one incarnation."""

    key: EngineKey
    incarnation: str
    layout: Layout
    layout_digest: str
    token_bytes: int
    snapshot_bytes: int
    """Bytes of all ranks for each token, and for each position."""
    block_tokens: dict[str, int]
    """Tokens that a block of each group holds; 0: it holds snapshots."""
    last_seen_s: float
    born_s: float
    """When this incarnation registered."""
    agents: dict[int, AgentRecord] = field(default_factory=dict)
    """Those that are connected, by rank."""
    away: dict[int, AgentRecord] = field(default_factory=dict)
    """Those whose stream broke, and that may come back."""
    early_fences: EarlyFences = field(default_factory=EarlyFences)
    block_limits: dict[str, int] = field(default_factory=dict)
    """The first block id of each group that some connected rank has no memory for."""
    admitted: int = 0
    """How often an agent was admitted: ids checked before need another look afterwards."""
    handoffs: set[int] = field(default_factory=set)
    """Numbers of the live handoffs that it has a side of."""
    quarantined: set[int] = field(default_factory=set)
    """Numbers of ended handoffs whose pages here may still be written to."""
    heard_ranks: set[int] = field(default_factory=set)
    """Ranks whose agent has ever said Hello here."""
    has_session: bool = False
    gone: bool = False
    former: tuple[str, ...] = ()
    """The latest incarnations before this one; those that had unregistered are none."""

    @classmethod
    def of(
        cls, key: EngineKey, incarnation: str, layout: Layout, layout_digest: str, now_s: float
    ) -> EngineRecord:
        """A record of a checked layout."""
        block_tokens = {
            region.group: (region.page_tokens or 0) * region.pages_per_block
            for rank in layout.ranks
            for region in rank.regions
            if not region.constant
        }
        token_bytes = snapshot_bytes = 0
        for rank in layout.ranks:
            for shard in rank.shards:
                size_bytes = volume(shard.box) * shard.dtype.itemsize_bytes
                if shard.token_stride_bytes is None:
                    snapshot_bytes += size_bytes
                else:
                    token_bytes += size_bytes
        return cls(
            key,
            incarnation,
            layout,
            layout_digest,
            token_bytes,
            snapshot_bytes,
            block_tokens,
            now_s,
            now_s,
            block_limits=dict.fromkeys(block_tokens, MAX_IDS),
        )

    @property
    def ranks(self) -> int:
        """How many ranks its layout has."""
        return len(self.layout.ranks)

    @property
    def complete(self) -> bool:
        """Whether every rank's agent is connected."""
        return len(self.agents) == len(self.layout.ranks)

    @property
    def missing_ranks(self) -> list[int]:
        """The ranks whose agents are not connected."""
        return [one.rank for one in self.layout.ranks if one.rank not in self.agents]

    @property
    def unheard_ranks(self) -> set[int]:
        """The ranks whose agents have never said Hello here."""
        return {one.rank for one in self.layout.ranks} - self.heard_ranks

    def state_bytes(self, held_tokens: int, position_tokens: int) -> int:
        """About how many bytes all ranks read of a state; windows may need fewer."""
        return self.snapshot_bytes + self.token_bytes * (position_tokens - held_tokens)

    def memory_of(self, rank: int) -> AgentRecord:
        """The agent whose memory a rank's is; it may be away. Raises `AgentUnknownError`."""
        agent = self.agents.get(rank) or self.away.get(rank)
        if agent is None:
            raise AgentUnknownError(
                f"engine {self.key.engine_id}, rank {rank} has no agent",
                engine=self.key.engine_id,
                rank=rank,
            )
        return agent

    def departed(self) -> EngineReplacedError:
        """What to answer to words of an engine that is gone."""
        return EngineReplacedError(
            f"engine {self.key.engine_id}, incarnation {self.incarnation} is gone from here: "
            f"it was replaced or unregistered",
            engine=self.key.engine_id,
        )

    def rank_layout(self, rank: int) -> RankLayout:
        """The layout of a rank. Raises `AgentUnknownError`."""
        layout = next((one for one in self.layout.ranks if one.rank == rank), None)
        if layout is None:
            raise AgentUnknownError(
                f"engine {self.key.engine_id} has no rank {rank}: its layout has "
                f"{[one.rank for one in self.layout.ranks]}",
                engine=self.key.engine_id,
                rank=rank,
            )
        return layout

    def admit(
        self,
        rank: int,
        agent_name: str,
        nixl_metadata: bytes,
        regions: Sequence[RegionMemory],
        staging_bytes: int,
        host: str = "",
        host_memory: bytes = b"",
        follows: bool = False,
    ) -> AgentRecord:
        """Take an agent in. Raises `AgentUnknownError` or `AgentMismatchError`."""
        layout = self.rank_layout(rank)
        _check_regions(self.key.engine_id, layout, regions)
        if staging_bytes < 0:
            raise AgentMismatchError(
                f"engine {self.key.engine_id}, rank {rank}: staging_bytes is {staging_bytes}",
                engine=self.key.engine_id,
                rank=rank,
            )
        agent = AgentRecord(
            AgentKey(self.key, rank),
            agent_name,
            nixl_metadata,
            tuple(regions),
            tuple(region.page_stride_bytes for region in layout.regions),
            staging_bytes,
            host,
            host_memory,
            follows,
        )
        self.agents[rank] = agent
        self.heard_ranks.add(rank)
        self.admitted += 1
        self.block_limits = self._limits()
        return agent

    def _limits(self) -> dict[str, int]:
        limits = dict.fromkeys(self.block_tokens, MAX_IDS)
        for layout in self.layout.ranks:
            agent = self.agents.get(layout.rank)
            if agent is None:
                continue
            for region, memory in zip(layout.regions, agent.regions, strict=True):
                if region.constant:
                    continue
                limit = memory.page_count // region.pages_per_block
                limits[region.group] = min(limit, limits[region.group])
        return limits

    def check_ids(self, group: str, data: bytes) -> None:
        """Raise a `PagesError` unless the ids are int32 inside the group's memory."""
        limit = self.block_limits.get(group)
        if limit is None:
            raise PagesError(
                f"engine {self.key.engine_id} has no group {group!r}; it has "
                f"{sorted(self.block_limits)}",
                group=group,
            )
        size_bytes = len(data)
        # Seen as unsigned, a negative id is out of every range. A snapshot's one id needs no array.
        if size_bytes == 4:
            highest = int.from_bytes(data, "little")
        elif size_bytes % 4:
            raise PagesError(f"group {group}: {size_bytes} bytes are not int32 ids", group=group)
        elif data:
            ids = np.frombuffer(data, _UNSIGNED)
            highest = ids.item(ids.argmax())
        else:
            return
        if highest >= limit:
            ids = np.frombuffer(data, _UNSIGNED)
            wrong = int(np.frombuffer(data, "<i4")[int(np.argmax(ids >= limit))])
            raise PageRangeError(
                f"engine {self.key.engine_id}, group {group}: block {wrong} is outside of "
                f"[0, {limit})",
                engine=self.key.engine_id,
                group=group,
                page=wrong,
                range=f"[0, {limit})",
            )

    def check_counts(
        self, groups: Iterable[str], blocks: Mapping[str, bytes], position_tokens: int
    ) -> None:
        """Raise `PageCountError` unless each group's list holds a prompt up to the position."""
        for group in groups:
            tokens, count = self.block_tokens[group], len(blocks.get(group, b"")) // 4
            if count != 1 if tokens == 0 else count * tokens < position_tokens:
                raise self._miscounted(group, tokens, count, position_tokens)

    def _miscounted(
        self, group: str, tokens: int, count: int, position_tokens: int
    ) -> PageCountError:
        if tokens == 0:
            return PageCountError(
                f"engine {self.key.engine_id}, group {group} holds snapshots: exactly one "
                f"block is needed, got {count}",
                group=group,
                count=count,
            )
        return PageCountError(
            f"engine {self.key.engine_id}, group {group}: {count} blocks of {tokens} tokens "
            f"do not hold {position_tokens} tokens",
            group=group,
            count=count,
        )


def _check_regions(engine_id: str, layout: RankLayout, regions: Sequence[RegionMemory]) -> None:
    expected = [region.name for region in layout.regions]
    if [memory.name for memory in regions] != expected:
        raise AgentMismatchError(
            f"engine {engine_id}, rank {layout.rank}: the agent announces regions "
            f"{[memory.name for memory in regions][:8]}, the layout has {expected[:8]}",
            engine=engine_id,
            rank=layout.rank,
        )
    for region, memory in zip(layout.regions, regions, strict=True):
        size_bytes = memory.page_count * region.page_stride_bytes
        if not size_bytes or memory.device_id < 0 or not is_memory(memory.base_address, size_bytes):
            raise AgentMismatchError(
                f"engine {engine_id}, rank {layout.rank}, region {memory.name}: address "
                f"{memory.base_address} and page count {memory.page_count} must be positive and "
                f"end below 2**63, and device {memory.device_id} must not be negative",
                engine=engine_id,
                rank=layout.rank,
                region=memory.name,
            )
