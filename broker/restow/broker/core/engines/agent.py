"""Agents: the record of each, and the check that no two regions of an engine overlap.

    a list of ids names block 1 of both regions:

    region a    | block 0 | block 1 | block 2 |
    region b              | block 0 | block 1 | block 2 |      shared bytes: refused

    region a    |k0..|    |k1..|    |k2..|                     layers that take turns in each page:
    region b         |v0..|    |v1..|    |v2..|                no shared bytes

Engines place regions of several groups over the same bytes and give each block to a single group at
a time; `PagesInUse` checks that. A region without a group of blocks holds weights, and no page may
overlap weights.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd

import numpy as np

from restow.broker.core.common.keys import AgentKey
from restow.broker.errors import RegionsOverlapError
from restow.broker.layout import RankLayout, Region
from restow.broker.layout.check_pages import page_runs
from restow.broker.layout.rows import Int64s
from restow.broker.text_bytes import text_bytes

MAX_ADDRESS = 1 << 63
AGENT_BYTES = 4096
"""Overhead of an agent beside its names, its metadata and its regions."""
REGION_BYTES = 256


def is_memory(address: int, size_bytes: int) -> bool:
    """Return whether an address range is valid; an empty range may be anywhere."""
    return size_bytes >= 0 and (not size_bytes or 0 < address <= MAX_ADDRESS - size_bytes)


CUDA_MEMORY = 2
"""The kind of memory (``MemoryKind``) of a CUDA device."""


@dataclass(frozen=True, slots=True)
class RegionMemory:
    """The memory of a region of a rank."""

    name: str
    base_address: int
    page_count: int
    page_stride_bytes: int
    """Bytes from page to page in the agent's memory."""
    memory: int
    device_id: int
    space: str = ""
    """The address space of ``space_address``, as agents name it; empty: the agent's own."""
    space_address: int = 0
    """Address of page 0 in that space."""

    @property
    def place(self) -> tuple[str, int]:
        """Return the address space and the address of page 0 in it."""
        return (self.space, self.space_address) if self.space else ("", self.base_address)

    @property
    def size_bytes(self) -> int:
        """Return the bytes from page 0 to the end of the last page."""
        return self.page_count * self.page_stride_bytes


@dataclass(slots=True, eq=False)
class AgentRecord:
    """A connected agent and what the broker has told it."""

    key: AgentKey
    agent_name: str
    nixl_metadata: bytes
    regions: tuple[RegionMemory, ...]
    staging_bytes: int
    host: str = ""
    """Empty if unknown."""
    host_memory: bytes = b""
    """Data with which agents of the same host read this agent's memory; opaque to the broker."""
    version: str = ""
    """Version of its software; empty if it named none."""
    programs: set[str] = field(default_factory=set)
    peers: set[str] = field(default_factory=set)
    gone: bool = False
    """Whether its stream broke; anything that still arrives from it is ignored."""
    gone_s: float = 0.0
    """When its stream broke."""

    @property
    def on_device(self) -> bool:
        """Return whether its pages are in a device's memory."""
        return any(memory.memory == CUDA_MEMORY for memory in self.regions)

    @property
    def kept_bytes(self) -> int:
        """Return an estimate of the bytes stored for the agent."""
        names = text_bytes(self.agent_name) + text_bytes(self.host)
        regions = sum(
            REGION_BYTES + text_bytes(memory.name) + text_bytes(memory.space)
            for memory in self.regions
        )
        return AGENT_BYTES + names + len(self.nixl_metadata) + len(self.host_memory) + regions

    def is_back_as(self, other: AgentRecord) -> bool:
        """Return whether ``other`` is the same agent with the same memory on another stream."""
        return (
            self.agent_name == other.agent_name
            and self.nixl_metadata == other.nixl_metadata
            and self.regions == other.regions
            and self.staging_bytes == other.staging_bytes
            and self.host_memory == other.host_memory
        )

    @property
    def tenant(self) -> str:
        """Return the tenant that owns the agent."""
        return self.key.engine.tenant

    @property
    def region_bytes(self) -> int:
        """Return the bytes of all of its regions."""
        return sum(memory.size_bytes for memory in self.regions)


MAX_PAIRS = 512
"""Pairs to compare among regions that interleave without a common page stride."""

Agents = Sequence[tuple[RankLayout, AgentRecord]]
Where = tuple[str | int, int, int]
"""An address space, the kind of memory, and the device."""


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """A region of a rank with its memory."""

    layout: RankLayout
    region: Region
    memory: RegionMemory

    @property
    def start(self) -> int:
        return self.memory.place[1]

    @property
    def stop(self) -> int:
        return self.start + self.memory.size_bytes

    @property
    def step_bytes(self) -> int:
        """Return the bytes from page to page; 0 if there is a single page."""
        return self.memory.page_stride_bytes if self.memory.page_count > 1 else 0

    @property
    def runs(self) -> Int64s:
        """Return the byte ranges of a page that hold data; the whole page for weights."""
        if self.region.constant:
            return np.array([[0, self.memory.page_stride_bytes]])
        return page_runs(self.layout, self.region)


def check_apart(engine_id: str, new: AgentRecord, agents: Agents) -> None:
    """Raise `RegionsOverlapError` if a page of a new agent overlaps another page.

    ``agents`` are all agents of the engine, including the new agent; the others were compared
    before.
    """
    spaces = {memory.place[0] for memory in new.regions}
    lists: dict[tuple[Where, str], list[_Placed]] = defaultdict(list)
    weights: dict[Where, list[_Placed]] = defaultdict(list)
    for layout, agent in agents:
        for region, memory in zip(layout.regions, agent.regions, strict=True):
            space = memory.place[0]
            if space not in spaces:
                continue
            # Regions without an address space are compared only with other regions of their agent.
            where = (space or agent.key.rank, memory.memory, memory.device_id)
            placed = _Placed(layout, region, memory)
            if region.constant:
                weights[where].append(placed)
            else:
                lists[where, region.group].append(placed)
    for (where, _), some in lists.items():
        _check(engine_id, [*some, *weights[where]])


def overlaid(agents: Agents) -> tuple[tuple[str, ...], ...]:
    """Return the groups whose blocks with equal ids are the same memory at some agent."""
    together: dict[str, set[str]] = {}
    for layout, agent in agents:
        first: dict[object, str] = {}
        for region, memory in zip(layout.regions, agent.regions, strict=True):
            if region.constant:
                continue
            block_bytes = memory.page_stride_bytes * region.pages_per_block
            place = (memory.place, memory.memory, memory.device_id, block_bytes)
            earlier = first.setdefault(place, region.group)
            joined = together.get(earlier, {earlier}) | together.get(region.group, {region.group})
            if earlier != region.group:
                together.update(dict.fromkeys(joined, joined))
    return tuple(sorted({tuple(sorted(groups)) for groups in together.values()}))


def _check(engine_id: str, regions: Sequence[_Placed]) -> None:
    for some in _meeting(regions):
        suspects = _meeting_in_a_page(some)
        if suspects == ():
            continue
        pairs = itertools.chain([suspects] if suspects else [], _pairs(some))
        for number, (first, second) in enumerate(pairs, 1):
            common = _common(first, second)
            if number > MAX_PAIRS:  # too many pairs to prove that the regions are disjoint
                common = second.start, min(first.stop, second.stop)
            if common is not None:
                raise _overlap(engine_id, first, second, *common)


def _meeting(regions: Sequence[_Placed]) -> Iterator[list[_Placed]]:
    """Yield sets of at least two regions whose address ranges overlap, ordered by address."""
    some: list[_Placed] = []
    stop = 0
    for region in sorted(regions, key=lambda region: region.start):
        if some and region.start >= stop:
            if len(some) > 1:
                yield some
            some = []
        some.append(region)
        stop = max(stop, region.stop)
    if len(some) > 1:
        yield some


def _meeting_in_a_page(some: Sequence[_Placed]) -> tuple[()] | tuple[_Placed, _Placed] | None:
    """Find two regions that share bytes, given that all regions have the same page stride.

    Returns () if no two regions share bytes, and None if the strides differ, so that every pair
    must be compared.
    """
    steps = {region.step_bytes for region in some} - {0}
    if len(steps) != 1:
        return None
    folded = [_folded(region, max(steps)) for region in some]
    owners = np.repeat(np.arange(len(some)), [len(region) for region in folded])
    table = np.concatenate(folded)
    order = np.argsort(table[:, 0], kind="stable")
    table, owners = table[order], owners[order]
    clash = np.flatnonzero(table[1:, 0] < np.maximum.accumulate(table[:-1, 1]))
    if not clash.size:
        return ()
    at = int(clash[0])
    first, second = sorted((owners.item(at), owners.item(at + 1)))
    return some[first], some[second]


def _pairs(some: Sequence[_Placed]) -> Iterator[tuple[_Placed, _Placed]]:
    """Yield pairs of regions whose address ranges overlap; two regions of weights are no pair."""
    for at, first in enumerate(some):
        for second in itertools.islice(some, at + 1, None):
            if second.start >= first.stop:
                break
            if not (first.region.constant and second.region.constant):
                yield first, second


def _common(first: _Placed, second: _Placed) -> tuple[int, int] | None:
    """Return an address range in which two regions share bytes; None if they share none."""
    edges = []
    for placed in (first, second):
        runs = placed.runs
        if not len(runs):
            return None
        last = placed.start + (placed.memory.page_count - 1) * placed.memory.page_stride_bytes
        edges.append((placed.start + int(runs[0, 0]), last + int(runs[-1, 1])))
    start, stop = max(edge[0] for edge in edges), min(edge[1] for edge in edges)
    if start >= stop:
        return None
    step_bytes = gcd(first.step_bytes, second.step_bytes) or max(first.stop, second.stop)
    table = np.concatenate([_merged(_folded(placed, step_bytes)) for placed in (first, second)])
    table = table[np.argsort(table[:, 0], kind="stable")]
    return (start, stop) if (table[1:, 0] < table[:-1, 1]).any() else None


def _folded(placed: _Placed, step_bytes: int) -> Int64s:
    """Return a region's byte ranges modulo ``step_bytes``, as ``[runs, 2]``."""
    runs = placed.runs
    starts = runs[:, 0] + placed.start % step_bytes
    lengths = np.minimum(runs[:, 1] - runs[:, 0], step_bytes)
    starts %= step_bytes
    ends = starts + lengths
    beyond = ends > step_bytes
    folded = np.stack([starts, np.minimum(ends, step_bytes)], axis=1)
    again = np.stack([np.zeros_like(ends), ends - step_bytes], axis=1)[beyond]
    return np.concatenate([folded, again])


def _merged(runs: Int64s) -> Int64s:
    """Merge byte ranges into rising, disjoint ranges."""
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    stops = np.maximum.accumulate(runs[:, 1])
    begins = np.concatenate([[True], runs[1:, 0] > stops[:-1]])
    lasts = np.concatenate([begins[1:], [True]])
    return np.stack([runs[begins, 0], stops[lasts]], axis=1)


def _overlap(
    engine_id: str, left: _Placed, right: _Placed, start: int, stop: int
) -> RegionsOverlapError:
    first, second = (
        f"bytes [{start - placed.start}, {stop - placed.start}) of rank {placed.layout.rank}, "
        f"region {placed.region.name}"
        for placed in (left, right)
    )
    return RegionsOverlapError(
        f"engine {engine_id}: {first} overlap {second}: give every region of every rank memory of "
        f"its own",
        engine=engine_id,
        ranks=f"{left.layout.rank},{right.layout.rank}",
        region=left.region.name,
        other_region=right.region.name,
        range=f"[{start - left.start}, {stop - left.start})",
    )
