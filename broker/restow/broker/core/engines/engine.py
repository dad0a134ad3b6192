"""Fences of handoffs that nobody has published yet: a rank may be quicker than its scheduler."""

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


class EarlyFences:
    """Those of one engine, by handoff. They are no handoffs yet, and count as none."""

    def __init__(self, account: Account) -> None:
        """None yet; their ids count in the tenant's ``account``."""
        self._account = account
        self._fences: OrderedDict[str, tuple[float, set[int]]] = OrderedDict()

    def __len__(self) -> int:
        """Of how many handoffs there are any."""
        return len(self._fences)

    def __contains__(self, handoff_id: str) -> bool:
        """Whether a rank has fenced the handoff."""
        return handoff_id in self._fences

    def add(self, handoff_id: str, rank: int, until_s: float) -> None:
        """Keep that a rank has fenced; the first one says until when.

        Raises `DirectoryFullError`, and `QuotaExceededError` for the bytes of ids.
        """
        known = self._fences.get(handoff_id)
        if known is not None:
            known[1].add(rank)
            return
        if len(self._fences) >= MAX_FENCES:
            raise DirectoryFullError(
                f"{MAX_FENCES} handoffs are fenced and not published: publish before fencing, or "
                f"soon after"
            )
        self._account.keep(_bytes_of(handoff_id))
        self._fences[handoff_id] = (until_s, {rank})

    def take(self, handoff_id: str) -> set[int]:
        """The ranks that have fenced a handoff that is published now, or of none any more."""
        known = self._fences.pop(handoff_id, None)
        if known is None:
            return set()
        self._account.let_go(_bytes_of(handoff_id))
        return known[1]

    def forget(self) -> None:
        """The engine is gone."""
        for _ in self.take_all():
            pass

    def take_all(self) -> Iterator[tuple[str, set[int]]]:
        """Take all out: the handoff and the ranks of each."""
        for handoff_id in list(self._fences):
            yield handoff_id, self.take(handoff_id)

    @property
    def size_bytes(self) -> int:
        """What they count in the account."""
        return sum(map(_bytes_of, self._fences))

    def forget_rank(self, rank: int) -> None:
        """A rank's agent is gone, and what it had in memory with it."""
        for handoff_id, (_, ranks) in list(self._fences.items()):
            ranks.discard(rank)
            if not ranks:
                self.take(handoff_id)

    def expired(self, now_s: float) -> Iterator[tuple[str, set[int]]]:
        """Take out those that were never published: the handoff and the ranks of each."""
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
    """What is remembered of a rank's agent, also when it has been given up."""

    agent_name: str
    gone_s: float = inf
    """When its stream broke; until then it is there."""


@dataclass(slots=True, eq=False)
class EngineRecord(BlockLists):
    """A registered engine in one incarnation."""

    incarnation: str
    revision: str
    """Revision of the weights that it has now: its layout's, until it says another one."""
    layout: Layout
    layout_digest: str
    token_bytes: int
    snapshot_bytes: int
    """Bytes of all ranks for each token of a prompt, and for each position."""
    last_seen_s: float
    born_s: float
    """When this incarnation registered."""
    account: Account
    """Of its tenant."""
    layout_bytes: int
    """What is kept for the layout."""
    early_fences: EarlyFences
    agents: dict[int, AgentRecord] = field(default_factory=dict)
    """Those that are connected, by rank."""
    away: dict[int, AgentRecord] = field(default_factory=dict)
    """Those whose stream broke, and that may come back."""
    in_use: PagesInUse | None = None
    """Its blocks that are in use; None until its first demand, for an engine that only publishes
    writes to none."""
    admitted: int = 0
    """How often an agent was admitted: ids checked before need another look afterwards."""
    handoffs: set[int] = field(default_factory=set)
    """Numbers of the live handoffs that it has a side of."""
    quarantined: set[int] = field(default_factory=set)
    """Numbers of ended handoffs whose pages here may still be written to."""
    heard: dict[int, Heard] = field(default_factory=dict)
    """The latest agent of each rank that has ever said Hello here."""
    former_agents: tuple[str, ...] = ()
    """The names of the latest agents that were replaced: none of them is let in again."""
    replacements: int = 0
    """How often an agent of another name came for a rank."""
    replaced_s: float = -inf
    """When that last happened."""
    has_session: bool = False
    session_s: float = inf
    """When the session that is open was opened."""
    publishes: bool = False
    asks: bool = False
    """What it has said that it will do, or has done."""
    keeps: bool = False
    """Whether it is a store: it is told of states that others hold."""
    offers: int = 0
    """How often it was asked for a state that it had told of."""
    offers_declined: int = 0
    """How often it declined that, was refused in it, or did not answer."""
    drains_since_s: float = 0.0
    leaves: bool = False
    """Whether it drains because it said so itself, on the session that is open."""
    """Since when it takes part in nothing new; 0: it does."""
    handing_over: bool = False
    """Whether it was asked to hand over what it holds, and has not said that it has."""
    gone: bool = False
    version: str = ""
    """Of the software of its session; empty: it did not say."""
    former: tuple[str, ...] = ()
    """The latest incarnations before this one; those that had unregistered are none."""
    _fingerprint: tuple[int, bytes] = (0, b"")
    """That of the agents, and `admitted` when it was made."""

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
        """A record of a checked layout; ``account`` is that of the tenant."""
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
        fences = EarlyFences(account)
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
        """Return which revision a word of the engine means; empty means that of its layout."""
        return revision or self.layout.model.revision

    def has_revision(self, revision: str) -> bool:
        """Return whether a word of the engine may be of ``revision``: a store's of any."""
        return self.keeps or self.revision_said(revision) == self.revision

    def identity(self, revision: str = "") -> ModelIdentity:
        """Return the model that it serves, with ``revision``; empty: the one that it has now."""
        return replace(self.layout.model.identity, revision=revision or self.revision)

    @property
    def ranks(self) -> int:
        """How many ranks its layout has."""
        return len(self.layout.ranks)

    @property
    def may_ask(self) -> bool:
        """Whether it is there, and no P alone, as far as anybody knows."""
        return (self.has_session or bool(self.agents)) and (self.asks or not self.publishes)

    @property
    def may_publish(self) -> bool:
        """Whether it is no D alone, as far as anybody knows."""
        return self.publishes or not self.asks

    @property
    def complete(self) -> bool:
        """Whether every rank's agent is connected."""
        return len(self.agents) == len(self.layout.ranks)

    def fingerprint(self) -> bytes:
        """Return a fingerprint of the names of all ranks' agents; empty: not all are connected."""
        if not self.complete:
            return b""
        if self._fingerprint[0] != self.admitted:
            names = "\n".join(self.agents[rank].agent_name for rank in sorted(self.agents))
            digest = blake2b(names.encode(), digest_size=16).digest()
            self._fingerprint = (self.admitted, digest)
        return self._fingerprint[1]

    @property
    def missing_ranks(self) -> list[int]:
        """The ranks whose agents are not connected."""
        return [one.rank for one in self.layout.ranks if one.rank not in self.agents]

    @property
    def unheard_ranks(self) -> set[int]:
        """The ranks whose agents have never said Hello here."""
        return {one.rank for one in self.layout.ranks} - self.heard.keys()

    def is_life_of(self, other: EngineRecord | None) -> bool:
        """Whether ``other`` is of the same life, which may have been forgotten meanwhile."""
        return other is not None and (self.key, self.incarnation) == (other.key, other.incarnation)

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

    def check_there(self) -> None:
        """Raise `EngineReplacedError` if it is gone."""
        if self.gone:
            raise EngineReplacedError(
                f"engine {self.key.engine_id}, incarnation {self.incarnation} is gone from here: "
                f"it was replaced or unregistered",
                engine=self.key.engine_id,
            )

    @property
    def draining(self) -> bool:
        """Whether it takes part in nothing new."""
        return self.drains_since_s > 0.0

    def check_takes(self, handoff_id: str, began_s: float) -> None:
        """Raise `EngineDrainingError` for a handoff that it must not begin to take part in."""
        if self.draining and began_s > self.drains_since_s:
            name = self.key.engine_id
            raise EngineDrainingError(
                f"engine {name} drains and takes nothing new, handoff {handoff_id} neither: send "
                f"its prompt to another engine",
                engine=name,
                handoff=handoff_id,
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

    def admit(self, agent: AgentRecord) -> None:
        """Take an agent in.

        Raises `AgentUnknownError`, `AgentMismatchError`, and `RegionsOverlapError` for memory that
        is given twice.
        """
        rank = agent.key.rank
        layout = self.rank_layout(rank)
        _check_regions(self.key.engine_id, layout, agent.regions)
        there = {one.rank: one for one in self.layout.ranks}
        agents = [
            (there[one], other) for one, other in (self.away | self.agents | {rank: agent}).items()
        ]
        check_apart(self.key.engine_id, agent, agents)
        self.overlaid = overlaid(agents)
        if self.in_use is not None:
            for groups in self.overlaid:
                self.in_use.join(groups)
        self.agents[rank] = agent
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
    """Raise `AgentMismatchError` that names the first region that is not the layout's."""
    for number, (region, memory) in enumerate(zip_longest(layout.regions, regions)):
        name = memory.name if region is None else region.name
        if region is None or memory is None or memory.name != region.name:
            wrong = (
                f"number {number} is {_named(region)} in the layout, and the agent announces "
                f"{_named(memory)}: give all regions of the rank, in the layout's order"
            )
        elif memory.page_stride_bytes != region.page_stride_bytes:
            wrong = (
                f"the agent's pages follow each other after {memory.page_stride_bytes} bytes, and "
                f"the layout's after {region.page_stride_bytes}: register a layout with the stride "
                f"that the memory has (padding counts: `page_align_bytes`)"
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


def _named(one: Region | RegionMemory | None) -> str:
    return "none" if one is None else repr(one.name)


def pool_of(engine: EngineRecord) -> Pool:
    """The pool that an engine is of."""
    return Pool.of(engine.key.tenant, engine.layout.model.identity)
