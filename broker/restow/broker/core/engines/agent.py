"""Agents: what is known of each, and whether the memory that they announce overlaps.

    one list of ids names block 1 of both regions:

    region a    | block 0 | block 1 | block 2 |
    region b              | block 0 | block 1 | block 2 |      the same bytes twice: refused

    region a    |k0..|    |k1..|    |k2..|                     layers that take turns in each page:
    region b         |v0..|    |v1..|    |v2..|                no byte twice

Engines lay regions of several groups over the same bytes, and give each block to one group at a
time: `PagesInUse` looks at that. A region that no list addresses is weights, which no page may lie
on.
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


MAX_PAIRS = 512
"""Pairs that are compared of regions that lie between each other and have no stride in common."""

Agents = Sequence[tuple[RankLayout, AgentRecord]]
Where = tuple[str | int, int, int]
"""An address space, the kind of memory in it, and the device."""


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """A region of a rank where it lies."""

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
        """From page to page; 0: there is one."""
        return self.memory.page_stride_bytes if self.memory.page_count > 1 else 0

    @property
    def runs(self) -> Int64s:
        """The bytes of a page that are anything's; all of weights."""
        if self.region.constant:
            return np.array([[0, self.memory.page_stride_bytes]])
        return page_runs(self.layout, self.region)


def check_apart(engine_id: str, new: AgentRecord, agents: Agents) -> None:
    """Raise `RegionsOverlapError` where a page of an agent that comes lies on another page.

    ``agents`` are those of the engine, the new one among them; those before it were compared.
    """
    spaces = {memory.place[0] for memory in new.regions}
    lists: dict[tuple[Where, str], list[_Placed]] = defaultdict(list)
    weights: dict[Where, list[_Placed]] = defaultdict(list)
    for layout, agent in agents:
        for region, memory in zip(layout.regions, agent.regions, strict=True):
            space = memory.place[0]
            if space not in spaces:
                continue
            # What has no word for its address space is compared with the agent's own.
            where = (space or agent.key.rank, memory.memory, memory.device_id)
            placed = _Placed(layout, region, memory)
            if region.constant:
                weights[where].append(placed)
            else:
                lists[where, region.group].append(placed)
    for (where, _), some in lists.items():
        _check(engine_id, [*some, *weights[where]])


def overlaid(agents: Agents) -> tuple[tuple[str, ...], ...]:
    """Return the groups whose blocks of one id are the same memory, in some agent."""
    together: dict[str, set[str]] = {}
    for layout, agent in agents:
        first: dict[object, str] = {}
        for region, memory in zip(layout.regions, agent.regions, strict=True):
            if region.constant:
                continue
            block_bytes = memory.page_stride_bytes * region.pages_per_block
            place = (memory.place, memory.memory, memory.device_id, block_bytes)
            other = first.setdefault(place, region.group)
            joined = together.get(other, {other}) | together.get(region.group, {region.group})
            if other != region.group:
                together.update(dict.fromkeys(joined, joined))
    return tuple(sorted({tuple(sorted(groups)) for groups in together.values()}))


def _check(engine_id: str, regions: Sequence[_Placed]) -> None:
    for some in _meeting(regions):
        suspects = _meeting_in_a_page(some)
        if suspects == ():
            continue
        pairs = itertools.chain([suspects] if suspects else [], _pairs(some))
        for number, (one, two) in enumerate(pairs, 1):
            common = _common(one, two)
            if number > MAX_PAIRS:  # nobody can say that these are apart
                common = two.start, min(one.stop, two.stop)
            if common is not None:
                raise _overlap(engine_id, one, two, *common)


def _meeting(regions: Sequence[_Placed]) -> Iterator[list[_Placed]]:
    """Regions that lie between each other, at least two, in the order in which they begin."""
    some: list[_Placed] = []
    stop = 0
    for one in sorted(regions, key=lambda one: one.start):
        if some and one.start >= stop:
            if len(some) > 1:
                yield some
            some = []
        some.append(one)
        stop = max(stop, one.stop)
    if len(some) > 1:
        yield some


def _meeting_in_a_page(some: Sequence[_Placed]) -> tuple[()] | tuple[_Placed, _Placed] | None:
    """Two that have the same bytes of the stride that all have; (): no two have, so all are apart.

    None: they have no stride in common, and have to be compared one with the other.
    """
    steps = {one.step_bytes for one in some} - {0}
    if len(steps) != 1:
        return None
    folded = [_folded(one, max(steps)) for one in some]
    owners = np.repeat(np.arange(len(some)), [len(one) for one in folded])
    table = np.concatenate(folded)
    order = np.argsort(table[:, 0], kind="stable")
    table, owners = table[order], owners[order]
    clash = np.flatnonzero(table[1:, 0] < np.maximum.accumulate(table[:-1, 1]))
    if not clash.size:
        return ()
    at = int(clash[0])
    one, two = sorted((owners.item(at), owners.item(at + 1)))
    return some[one], some[two]


def _pairs(some: Sequence[_Placed]) -> Iterator[tuple[_Placed, _Placed]]:
    """Those of which neither ends before the other begins, and that are not both weights."""
    for at, one in enumerate(some):
        for two in itertools.islice(some, at + 1, None):
            if two.start >= one.stop:
                break
            if not (one.region.constant and two.region.constant):
                yield one, two


def _common(one: _Placed, two: _Placed) -> tuple[int, int] | None:
    """Between which addresses two regions have bytes in common; None: they have none."""
    edges = []
    for placed in (one, two):
        runs = placed.runs
        if not len(runs):
            return None
        last = placed.start + (placed.memory.page_count - 1) * placed.memory.page_stride_bytes
        edges.append((placed.start + int(runs[0, 0]), last + int(runs[-1, 1])))
    start, stop = max(edge[0] for edge in edges), min(edge[1] for edge in edges)
    if start >= stop:
        return None
    step_bytes = gcd(one.step_bytes, two.step_bytes) or max(one.stop, two.stop)
    table = np.concatenate([_merged(_folded(placed, step_bytes)) for placed in (one, two)])
    table = table[np.argsort(table[:, 0], kind="stable")]
    return (start, stop) if (table[1:, 0] < table[:-1, 1]).any() else None


def _folded(placed: _Placed, step_bytes: int) -> Int64s:
    """Where a region's runs lie modulo a step: ``[runs, 2]``."""
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
    """The same bytes as runs that rise and lie apart."""
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    stops = np.maximum.accumulate(runs[:, 1])
    begins = np.concatenate([[True], runs[1:, 0] > stops[:-1]])
    lasts = np.concatenate([begins[1:], [True]])
    return np.stack([runs[begins, 0], stops[lasts]], axis=1)


def _overlap(
    engine_id: str, one: _Placed, two: _Placed, start: int, stop: int
) -> RegionsOverlapError:
    first, second = (
        f"bytes [{start - placed.start}, {stop - placed.start}) of rank {placed.layout.rank}, "
        f"region {placed.region.name}"
        for placed in (one, two)
    )
    return RegionsOverlapError(
        f"engine {engine_id}: {first} are {second} too, and hold other state: give every region of "
        f"every rank memory of its own",
        engine=engine_id,
        ranks=f"{one.layout.rank},{two.layout.rank}",
        region=one.region.name,
        other_region=two.region.name,
        range=f"[{start - one.start}, {stop - one.start})",
    )
