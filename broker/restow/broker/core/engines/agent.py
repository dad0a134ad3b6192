"""An agent that is connected, or may come back, and where the memory of its rank lies."""

from __future__ import annotations

from dataclasses import dataclass, field

from restow.broker.core.actions import AgentKey
from restow.broker.text_bytes import text_bytes

MAX_ADDRESS = 1 << 63
AGENT_BYTES = 4096
"""Of an agent beside its names, its metadata and its regions."""
REGION_BYTES = 256


def is_memory(address: int, size_bytes: int) -> bool:
    """Whether bytes may lie there; no bytes may lie anywhere."""
    return size_bytes >= 0 and (not size_bytes or 0 < address <= MAX_ADDRESS - size_bytes)


@dataclass(frozen=True, slots=True)
class RegionMemory:
    """Where a region of a rank lies."""

    name: str
    base_address: int
    page_count: int
    page_stride_bytes: int
    """Bytes from page to page, as the memory really lies there."""
    memory: int
    device_id: int
    space: str = ""
    """The address space of ``space_address``, as agents name it; empty: that of its own agent."""
    space_address: int = 0
    """Where page 0 lies in that space."""

    @property
    def place(self) -> tuple[str, int]:
        """The address space, and where page 0 lies in it."""
        return (self.space, self.space_address) if self.space else ("", self.base_address)

    @property
    def size_bytes(self) -> int:
        """From page 0 to the end of the last page."""
        return self.page_count * self.page_stride_bytes


@dataclass(slots=True, eq=False)
class AgentRecord:
    """A connected agent and what it has been told."""

    key: AgentKey
    agent_name: str
    nixl_metadata: bytes
    regions: tuple[RegionMemory, ...]
    staging_bytes: int
    host: str = ""
    """Empty: unknown."""
    host_memory: bytes = b""
    """What agents of its host read it by; theirs to understand."""
    version: str = ""
    """Of its software; empty: it did not say."""
    programs: set[str] = field(default_factory=set)
    peers: set[str] = field(default_factory=set)
    gone: bool = False
    """Its stream broke: what still arrives from it changes nothing."""
    gone_s: float = 0.0
    """When that was."""

    @property
    def kept_bytes(self) -> int:
        """About how many bytes are kept of it."""
        names = text_bytes(self.agent_name) + text_bytes(self.host)
        regions = sum(
            REGION_BYTES + text_bytes(memory.name) + text_bytes(memory.space)
            for memory in self.regions
        )
        return AGENT_BYTES + names + len(self.nixl_metadata) + len(self.host_memory) + regions

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
        return sum(memory.size_bytes for memory in self.regions)
