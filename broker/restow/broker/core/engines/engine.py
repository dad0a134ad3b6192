"""An engine's record: its layout, agents, blocks and fences, and what it takes part in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from hashlib import blake2b
from itertools import zip_longest
from math import inf

from restow.broker.core.common.keys import EngineKey
from restow.broker.core.engines.account import FENCE_BYTES, Account
from restow.broker.core.engines.agent import (
    AgentRecord,
    RegionMemory,
    check_apart,
    is_memory,
    overlaid,
)
from restow.broker.core.engines.blocks import BlockLists, PagesInUse
from restow.broker.errors import (
    AgentMismatchError,
    AgentUnknownError,
    DirectoryFullError,
    EngineDrainingError,
    EngineReplacedError,
)
from restow.broker.layout import Layout, RankLayout, Region
from restow.broker.layout.span import volume
from restow.broker.layout.values import ModelIdentity, Pool
from restow.broker.text_bytes import text_bytes

MAX_FENCES = 1 << 16


class UnpublishedFences:
    """Fences of handoffs that P's scheduler has not yet published, because a rank may be faster.

    They belong to a single engine. They are no handoffs yet and do not count as handoffs.
    """

    def __init__(self, account: Account) -> None:
        """Begin without fences; their ids count in the tenant's ``account``."""
        self._account = account
        self._fences: OrderedDict[str, tuple[float, set[int]]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of fenced handoffs."""
        return len(self._fences)

    def __contains__(self, handoff_id: str) -> bool:
        """Return whether a rank has fenced the handoff."""
        return handoff_id in self._fences

    def add(self, handoff_id: str, rank: int, until_s: float) -> None:
        """Store a rank's fence; the first fence of a handoff sets its expiry ``until_s``.

        Raises `DirectoryFullError`, and `QuotaExceededError` for the bytes of ids.
        """
        known = self._fences.get(handoff_id)
        if known is not None:
            known[1].add(rank)
            return
        if len(self._fences) >= MAX_FENCES:
            raise DirectoryFullError(
                f"{MAX_FENCES} handoffs are fenced but not published: publish before fencing, or "
                f"soon after"
            )
        self._account.keep(_bytes_of(handoff_id))
        self._fences[handoff_id] = (until_s, {rank})

    def take(self, handoff_id: str) -> set[int]:
        """Remove a handoff's fences and return the ranks that had fenced it."""
        known = self._fences.pop(handoff_id, None)
        if known is None:
            return set()
        self._account.let_go(_bytes_of(handoff_id))
        return known[1]

    def forget(self) -> None:
        """Drop all fences and give their bytes back, because the engine is gone."""
        for _ in self.take_all():
            pass

    def take_all(self) -> Iterator[tuple[str, set[int]]]:
        """Remove all fences; yield each handoff with its ranks."""
        for handoff_id in list(self._fences):
            yield handoff_id, self.take(handoff_id)

    @property
    def size_bytes(self) -> int:
        """Return the bytes that the fences count in the account."""
        return sum(map(_bytes_of, self._fences))

    def forget_rank(self, rank: int) -> None:
        """Drop a rank's fences, because its agent and the memory of it are gone."""
        for handoff_id, (_, ranks) in list(self._fences.items()):
            ranks.discard(rank)
            if not ranks:
                self.take(handoff_id)

    def expired(self, now_s: float) -> Iterator[tuple[str, set[int]]]:
        """Remove fences that expired before a publication; yield each handoff with its ranks."""
        while self._fences:
            handoff_id, (until_s, ranks) = next(iter(self._fences.items()))
            if until_s > now_s:
                return
            self.take(handoff_id)
            yield handoff_id, ranks


def _bytes_of(handoff_id: str) -> int:
    return FENCE_BYTES + text_bytes(handoff_id)


MAX_IDS = 1 << 31


@dataclass(slots=True)
class Heard:
    """The broker's memory of a rank's agent, kept even after it gave the agent up."""

    agent_name: str
    gone_s: float = inf
    """When its stream broke; infinite while the agent is connected."""


@dataclass(slots=True, eq=False)
class EngineRecord(BlockLists):
    """A registered engine in a single incarnation."""

    incarnation: str
    revision: str
    """Revision of its present weights: the layout's until the engine announces another revision."""
    layout: Layout
    layout_digest: str
    token_bytes: int
    snapshot_bytes: int
    """Bytes over all ranks per token of a prompt, and per snapshot."""
    last_seen_s: float
    born_s: float
    """When this incarnation registered."""
    account: Account
    """The account of its tenant."""
    layout_bytes: int
    """Bytes that the account stores for the layout."""
    unpublished_fences: UnpublishedFences
    agents: dict[int, AgentRecord] = field(default_factory=dict)
    """Connected agents by rank."""
    complete: bool = False
    """Whether the agents of all ranks are connected."""
    host: str = ""
    """Host of the first rank's agent, as it named it; empty until that agent connects."""
    on_device: bool = False
    """Whether that agent's pages are in a device's memory."""
    away: dict[int, AgentRecord] = field(default_factory=dict)
    """Agents by rank whose streams broke and that may come back."""
    in_use: PagesInUse | None = None
    """Blocks in use; None until the first demand, because an engine that only publishes writes
    no blocks."""
    admitted: int = 0
    """Number of admissions of agents; after an admission, block ids must be checked again."""
    handoffs: set[int] = field(default_factory=set)
    """Numbers of the live handoffs in which it has a side."""
    quarantined: set[int] = field(default_factory=set)
    """Numbers of ended handoffs whose pages here may still be written."""
    heard: dict[int, Heard] = field(default_factory=dict)
    """The last agent of each rank that has ever said Hello."""
    former_agents: tuple[str, ...] = ()
    """Names of recently replaced agents, which are not admitted again."""
    replacements: int = 0
    """How often an agent with another name came for a rank."""
    replaced_s: float = -inf
    """When that last happened."""
    has_session: bool = False
    session_s: float = inf
    """When the open session was opened."""
    repeat_from_s: float = -inf
    """Handoffs that the engine named earlier are granted only after it has repeated them: no agent
    had told which process the engine is, and the session ended on which it named them."""
    publishes: bool = False
    asks: bool = False
    """Whether it has announced that it will publish or ask, or has done so."""
    digests: bool = False
    """Whether the content of each of its handoffs is compared by digests."""
    keeps: bool = False
    """Whether it is a store, which is told of states that other engines hold."""
    offers: int = 0
    """Number of offers that it received."""
    offers_declined: int = 0
    """Number of offers that it declined, that were refused, or that it did not answer."""
    drains_since_s: float = 0.0
    """Since when it has been draining, and joins no new handoffs; 0 if it is not draining."""
    leaves: bool = False
    """Whether it drains because it asked to drain on the open session."""
    handing_over: bool = False
    """Whether it was asked to hand over its holdings and has not yet reported that it did."""
    gone: bool = False
    version: str = ""
    """Version of the software behind its session; empty if it named none."""
    former: tuple[str, ...] = ()
    """Recent earlier incarnations, except those that unregistered."""
    _fingerprint: tuple[int, bytes] = (0, b"")
    """The fingerprint of the agents, and the value of `admitted` for which it was computed."""

    @classmethod
    def of(
        cls,
        key: EngineKey,
        incarnation: str,
        layout: Layout,
        layout_digest: str,
        now_s: float,
        account: Account,
        layout_bytes: int = 0,
    ) -> EngineRecord:
        """Create the record of a checked layout; ``account`` is the tenant's."""
        block_tokens = {
            region.group: region.block_tokens
            for rank in layout.ranks
            for region in rank.regions
            if not region.constant
        }
        null_blocks = {
            region.group: region.null_block
            for rank in layout.ranks
            for region in rank.regions
            if region.null_block is not None
        }
        token_bytes, snapshot_bytes = Fraction(), 0
        for rank in layout.ranks:
            parts = {region.name: region.context_parts for region in rank.regions}
            for shard in rank.shards:
                size_bytes = volume(shard.box) * shard.dtype.itemsize_bytes
                if shard.token_stride_bytes is None:
                    snapshot_bytes += size_bytes
                else:
                    token_bytes += Fraction(size_bytes, parts[shard.region])
        limits = dict.fromkeys(block_tokens, MAX_IDS)
        rules = (key, block_tokens, null_blocks, limits)
        sizes = (round(token_bytes), snapshot_bytes)
        fences = UnpublishedFences(account)
        return cls(
            *rules,
            incarnation,
            layout.model.revision,
            layout,
            layout_digest,
            *sizes,
            now_s,
            now_s,
            account,
            layout_bytes,
            fences,
        )

    def revision_said(self, revision: str) -> str:
        """Return the revision that a message of the engine means; empty means its layout's."""
        return revision or self.layout.model.revision

    def has_revision(self, revision: str) -> bool:
        """Return whether a message of the engine may name ``revision``; a store may name any."""
        return self.keeps or self.revision_said(revision) == self.revision

    def identity(self, revision: str = "") -> ModelIdentity:
        """Return the model that it serves, at ``revision``; empty means the present revision."""
        return replace(self.layout.model.identity, revision=revision or self.revision)

    @property
    def ranks(self) -> int:
        """Return the number of ranks of its layout."""
        return len(self.layout.ranks)

    @property
    def may_ask(self) -> bool:
        """Return whether it is present and may act as D, as far as the broker knows."""
        return (self.has_session or bool(self.agents)) and (self.asks or not self.publishes)

    @property
    def may_publish(self) -> bool:
        """Return whether it may act as P, as far as the broker knows."""
        return self.publishes or not self.asks

    def session_over(self, now_s: float) -> None:
        """Note that a session has ended, or that another session begins."""
        if self.unheard_ranks:
            self.repeat_from_s = now_s

    def fingerprint(self) -> bytes:
        """Return a fingerprint of the names of all agents; empty unless all are connected."""
        if not self.complete:
            return b""
        if self._fingerprint[0] != self.admitted:
            names = "\n".join(self.agents[rank].agent_name for rank in sorted(self.agents))
            digest = blake2b(names.encode(), digest_size=16).digest()
            self._fingerprint = (self.admitted, digest)
        return self._fingerprint[1]

    @property
    def missing_ranks(self) -> list[int]:
        """Return the ranks whose agents are not connected."""
        return [rank.rank for rank in self.layout.ranks if rank.rank not in self.agents]

    @property
    def unheard_ranks(self) -> set[int]:
        """Return the ranks whose agents have never said Hello."""
        return {rank.rank for rank in self.layout.ranks} - self.heard.keys()

    def is_life_of(self, other: EngineRecord | None) -> bool:
        """Return whether ``other`` is the same incarnation, perhaps in another record."""
        return other is not None and (self.key, self.incarnation) == (other.key, other.incarnation)

    def state_bytes(self, held_tokens: int, position_tokens: int) -> int:
        """Return roughly how many bytes all ranks read of a state; windows may need fewer."""
        return self.snapshot_bytes + self.token_bytes * (position_tokens - held_tokens)

    def memory_of(self, rank: int) -> AgentRecord:
        """Return the agent with a rank's memory; it may be away. Raises `AgentUnknownError`."""
        agent = self.agents.get(rank) or self.away.get(rank)
        if agent is None:
            raise AgentUnknownError(
                f"engine {self.key.engine_id}, rank {rank} has no agent",
                engine=self.key.engine_id,
                rank=rank,
            )
        return agent

    def check_there(self) -> None:
        """Raise `EngineReplacedError` if it is gone."""
        if self.gone:
            raise EngineReplacedError(
                f"engine {self.key.engine_id}, incarnation {self.incarnation} is not registered "
                f"any more: it was replaced or unregistered; `restow engines` shows who is",
                engine=self.key.engine_id,
            )

    @property
    def draining(self) -> bool:
        """Return whether it joins no new handoffs."""
        return self.drains_since_s > 0.0

    def check_takes(self, handoff_id: str, began_s: float) -> None:
        """Raise `EngineDrainingError` if it drains and the handoff began after its drain."""
        if 0.0 < self.drains_since_s < began_s:
            name = self.key.engine_id
            raise EngineDrainingError(
                f"engine {name} is draining and takes no new handoff, so {handoff_id} is refused: "
                f"send its prompt to another engine",
                engine=name,
                handoff=handoff_id,
            )

    def rank_layout(self, rank: int) -> RankLayout:
        """Return the layout of a rank. Raises `AgentUnknownError`."""
        layout = next(
            (candidate for candidate in self.layout.ranks if candidate.rank == rank), None
        )
        if layout is None:
            raise AgentUnknownError(
                f"engine {self.key.engine_id} has no rank {rank}: its layout has "
                f"{[known.rank for known in self.layout.ranks]}",
                engine=self.key.engine_id,
                rank=rank,
            )
        return layout

    def admit(self, agent: AgentRecord) -> None:
        """Admit an agent.

        Raises `AgentUnknownError`, `AgentMismatchError`, and `RegionsOverlapError` if regions share
        memory.
        """
        rank = agent.key.rank
        layout = self.rank_layout(rank)
        _check_regions(self.key.engine_id, layout, agent.regions)
        layouts = {known.rank: known for known in self.layout.ranks}
        agents = [
            (layouts[number], record)
            for number, record in (self.away | self.agents | {rank: agent}).items()
        ]
        check_apart(self.key.engine_id, agent, agents)
        self.overlaid = overlaid(agents)
        if self.in_use is not None:
            for groups in self.overlaid:
                self.in_use.join(groups)
        self.agents[rank] = agent
        self.complete = len(self.agents) == len(self.layout.ranks)
        if rank == min(self.agents):
            self.host = agent.host
            self.on_device = agent.on_device
        self.heard[rank] = Heard(agent.agent_name)
        self.admitted += 1
        self.block_limits = self._limits()

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


def _check_regions(engine_id: str, layout: RankLayout, regions: Sequence[RegionMemory]) -> None:
    """Raise `AgentMismatchError` for the first region that differs from the layout."""
    for number, (region, memory) in enumerate(zip_longest(layout.regions, regions)):
        name = memory.name if region is None else region.name
        if region is None or memory is None or memory.name != region.name:
            wrong = (
                f"region {number} is {_named(region)} in the layout, but the agent announces "
                f"{_named(memory)}: announce all regions of the rank in the layout's order"
            )
        elif memory.page_stride_bytes != region.page_stride_bytes:
            wrong = (
                f"the agent's page stride is {memory.page_stride_bytes} bytes, but the layout's is "
                f"{region.page_stride_bytes}: register a layout with the stride of the memory "
                f"(padding counts: `page_align_bytes`)"
            )
        elif memory.page_count < 1 or not is_memory(memory.base_address, memory.size_bytes):
            wrong = (
                f"address {memory.base_address} and page count {memory.page_count} must be "
                f"positive and end below 2**63"
            )
        elif memory.device_id < 0:
            wrong = f"device {memory.device_id} must not be negative"
        else:
            continue
        raise AgentMismatchError(
            f"engine {engine_id}, rank {layout.rank}, region {name}: {wrong}",
            engine=engine_id,
            rank=layout.rank,
            region=name,
        )


def _named(region: Region | RegionMemory | None) -> str:
    return "none" if region is None else repr(region.name)


def pool_of(engine: EngineRecord) -> Pool:
    """Return the engine's pool."""
    return Pool.of(engine.key.tenant, engine.layout.model.identity)
