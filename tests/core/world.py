"""A directory with engines and agents around it, on a clock that the test turns.

Checks after every event what must always hold, and notes what every side was told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pytest

from restow.broker.core.audit import audit
from restow.broker.core.common import actions as act
from restow.broker.core.common.events import (
    Chunk,
    Failure,
    KnownEnd,
    NamedPrefix,
    Settlement,
    StagedRun,
    Wish,
)
from restow.broker.core.common.keys import AgentKey, EngineKey, State
from restow.broker.core.common.limits import Limits
from restow.broker.core.common.pair import Digests, Gather, PairOutcome, PairPlan
from restow.broker.core.engine_events import Directory
from restow.broker.core.engines.agent import AgentRecord, RegionMemory
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.errors import RestowError
from restow.broker.layout import Layout, Model, RankLayout, Region
from restow.broker.planner import GroupPair, PageForm, Program

T = TypeVar("T")
PAGES = 400
BLOCK_TOKENS = 16
POSITION = 40
LIMITS = Limits(max_live=50, max_ended=20, settle_grace_s=0.5)

Blocks = dict[str, list[int]]


KV, STATE = PageForm("kv", BLOCK_TOKENS, 1), PageForm("state", 0, 1)


def layout(ranks: int, pages_per_block: int = 1) -> Layout:
    """Return an engine's layout as far as the core looks into it: its ranks and their regions.

    A block holds equally many tokens, however many pages it has.
    """
    page_tokens = BLOCK_TOKENS // pages_per_block
    regions = (
        Region("kv", "kv", 4096, page_tokens, pages_per_block, null_block=0),
        Region("state", "state", 8192, None, null_block=0),
    )
    return Layout(Model("m", ()), tuple(RankLayout(rank, regions, ()) for rank in range(ranks)))


def packed(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, "<i4").tobytes()


def pair_plan(
    src_ranks: int, dst_ranks: int, staged: bool, together: bool, early: bool = False
) -> PairPlan:
    """Return a plan in which every destination rank reads from every source rank.

    Reads go through staging if ``staged``; ``together``: a source gathers for all ranks in one
    launch.
    """
    sources, readers = tuple(range(src_ranks)), tuple(range(dst_ranks))
    whole = PairPlan(
        programs={d: Program(f"program/{d}", d, (), ()) for d in range(dst_ranks)},
        sources=dict.fromkeys(range(dst_ranks), sources),
        staging=dict.fromkeys(range(dst_ranks), sources if staged else ()),
        gathers=tuple(
            Gather(src_rank, served)
            for src_rank in (sources if staged else ())
            for served in ([readers] if together else [(d,) for d in readers])
        ),
        src_groups=frozenset({"kv", "state"}),
        dst_groups=frozenset({"kv", "state"}),
        group_pairs=frozenset({GroupPair(KV, KV), GroupPair(STATE, STATE)}),
    )
    if not early:
        return whole
    tokens = replace(
        whole,
        programs={d: Program(f"early/{d}", d, (), ()) for d in range(dst_ranks)},
        src_groups=frozenset({"kv"}),
        dst_groups=frozenset({"kv"}),
        group_pairs=frozenset({GroupPair(KV, KV)}),
    )
    return replace(whole, early=tokens)


@dataclass
class Side:
    """One engine of the test."""

    record: EngineRecord
    agents: dict[int, AgentRecord] = field(default_factory=dict)
    told: list[act.TellEnded] = field(default_factory=list)
    offered: list[act.SendOffer | act.SendKeep] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)
    """The handoffs that it asked for with blocks of the test's choice, numbered."""


class World:
    """Drives a `Directory`."""

    def __init__(
        self,
        *,
        staged: bool = False,
        together: bool = False,
        early: bool = False,
        measures: bool = False,
        limits: Limits = LIMITS,
        digests: Digests | None = None,
    ) -> None:
        self.directory = Directory(limits, measures=measures, digests=digests)
        self.now_s = 1000.0
        self.staged_plans, self.together, self.early = staged, together, early
        self.plans_at_once = True
        self.outcome: PairOutcome | None = None
        self.hosts: dict[str, str] = {}
        """Hosts of engines, by engine id, unless `engine` or `connect` names another."""
        self.sides: dict[EngineKey, Side] = {}
        self.connected: set[AgentKey] = set()
        self.sent: list[act.Action] = []
        self.asked_plans: list[act.MakePlan] = []
        self._lives = 0
        self._agents = 0
        self._demands: Counter[EngineKey] = Counter()

    # -- who is there -----------------------------------------------------------------------------

    def engine(
        self,
        name: str,
        ranks: int = 1,
        *,
        tenant: str = "t",
        agents: bool = True,
        host: str = "",
        memory: int = 1,
        pages_per_block: int = 1,
        life: str = "",
        sides: str = "",
        shape: Layout | None = None,
    ) -> Side:
        """Register a life of an engine, a new life by default, and connect all its agents."""
        self._lives += 1
        life = life or f"life{self._lives}"
        key = EngineKey(tenant, name)
        known = shape or layout(ranks, pages_per_block)
        digest = f"{known.model.name}{ranks}/{pages_per_block}"
        said = ("P" in sides, "D" in sides)
        self.run(
            lambda now_s: self.directory.members.register(
                key, life, known, digest, now_s, sides=said
            )
        )
        side = self.sides[key] = Side(self.directory.members.engines[key])
        if agents:
            for rank in range(ranks):
                self.connect(side, rank, host=host, memory=memory)
        return side

    def connect(
        self,
        side: Side,
        rank: int,
        pages: int = PAGES,
        *,
        host: str = "",
        memory: int = 1,
        name: str = "",
    ) -> AgentRecord:
        """Connect the agent of a rank anew."""
        self._agents += 1
        name = name or f"agent{self._agents}"
        regions = [
            RegionMemory(one.name, 1 << 20, pages, one.page_stride_bytes, memory, 0)
            for one in layout(1).ranks[0].regions
        ]
        key = AgentKey(side.record.key, rank)
        host = host or self.hosts.get(key.engine.engine_id, "")
        agent = AgentRecord(key, name, b"meta", tuple(regions), 1 << 20, host)
        self.hear(self.directory.connections.admit(side.record, agent, self.now_s))
        self.connected.add(agent.key)
        side.agents[rank] = agent
        self.run(lambda now_s: self.directory.granting.resume(side.record, now_s))
        self.directory.ahead.expect(side.record)
        return agent

    def disconnect(self, side: Side, rank: int) -> list[act.Action]:
        """Break the stream of a rank's agent."""
        agent = side.agents[rank]
        self.connected.discard(agent.key)
        return self.run(
            lambda now_s: self.directory.connections.break_off(side.record, agent, now_s)
        )

    def unregister(self, side: Side) -> list[act.Action]:
        return self.run(lambda now_s: self.directory.members.unregister(side.record, now_s))

    def side(self, name: str, tenant: str = "t") -> Side:
        """Return the latest life of an engine."""
        return self.sides[EngineKey(tenant, name)]

    # -- what is said -----------------------------------------------------------------------------

    def publish(
        self,
        side: Side,
        name: str = "h",
        blocks: Blocks | None = None,
        *,
        position: int = POSITION,
        first: int = 0,
        final: bool = True,
        lease_s: float = 30.0,
        number: int = 7,
        **how: Any,
    ) -> list[act.Action]:
        """Publish a chunk; ``how`` has further fields of `Chunk`."""
        blocks = {"kv": [1, 2, 3], "state": [4]} if blocks is None else blocks
        listed = tuple((group, first, packed(ids)) for group, ids in blocks.items())
        chunk = Chunk(listed, position, final, lease_s, number=number, **how)
        return self.run(lambda now_s: self.directory.publish(side.record, name, chunk, now_s))

    def request(
        self,
        side: Side,
        name: str = "h",
        blocks: Blocks | None = None,
        *,
        held: int = 0,
        timeout_s: float = 30.0,
        position: int = 0,
        number: int = 0,
        prefix: NamedPrefix | None = None,
        **how: Any,
    ) -> list[act.Action]:
        """Request a state; ``how`` has further fields of `Wish`.

        ``number`` is that of the message that is repeated; 0: a new message.
        """
        blocks = self._own_blocks(side, name) if blocks is None else blocks
        listed = tuple((group, packed(ids)) for group, ids in blocks.items())
        number = number or self._number(side)
        position = prefix.position_tokens if prefix else position
        wish = Wish(listed, held, timeout_s, position, demand=number, prefix=prefix, **how)
        return self.run(lambda now_s: self.directory.request(side.record, name, wish, now_s))

    def _own_blocks(self, side: Side, name: str) -> Blocks:
        """Return blocks of D's that no other handoff of D's has."""
        at = side.asked.setdefault(name, len(side.asked)) % ((PAGES - 11) // 3)
        return {"kv": [11 + 3 * at, 12 + 3 * at, 13 + 3 * at], "state": [14 + at]}

    def fence(
        self, side: Side, rank: int = 0, name: str = "h", tokens: int = 0
    ) -> list[act.Action]:
        """Report that the leading ``tokens`` tokens are complete; 0: all are."""
        reports, agent = self.directory.reports, side.agents[rank]
        return self.run(lambda now_s: reports.fence(side.record, agent, name, now_s, tokens))

    def fence_all(self, side: Side, name: str = "h", tokens: int = 0) -> list[act.Action]:
        return [one for rank in side.agents for one in self.fence(side, rank, name, tokens)]

    def revise(self, side: Side, revision: str) -> list[act.Action]:
        """Replace the engine's weights."""
        return self.run(lambda now_s: self.directory.revise(side.record, revision, now_s))

    def ready(self, side: Side, name: str = "h", blocks: Blocks | None = None, **how: Any) -> None:
        """Publish the whole state, and fence it on every rank."""
        self.publish(side, name, blocks, **how)
        self.fence_all(side, name)

    def begin(self, p: Side, d: Side, name: str = "h") -> int:
        """Publish a whole state and ask for it; return the handoff's number."""
        self.ready(p, name)
        self.request(d, name)
        return self.find(name, p.record.key.tenant).number

    def publish_refused(self, side: Side, name: str = "h", **how: Any) -> RestowError:
        """Publish what is refused, as a session does: whoever waits for it is told."""
        with pytest.raises(RestowError) as caught:
            self.publish(side, name, **how)
        refused = self.directory.publication_refused
        self.run(lambda now_s: refused(side.record, name, caught.value, now_s))
        return caught.value

    def renew(self, side: Side, name: str = "h", lease_s: float = 30.0) -> list[act.Action]:
        return self.run(lambda now_s: self.directory.renew(side.record, name, lease_s, now_s))

    def decline(self, side: Side, name: str = "h", readers: int = 0) -> list[act.Action]:
        number = self._number(side)
        return self.run(
            lambda now_s: self.directory.decline(side.record, name, "", now_s, number, readers)
        )

    def _number(self, side: Side) -> int:
        """Return the number of the next message in the side's session."""
        self._demands[side.record.key] += 1
        return self._demands[side.record.key]

    def cancel(self, side: Side, name: str = "h", demand: int = 0) -> list[act.Action]:
        return self.run(lambda now_s: self.directory.cancel(side.record, name, "", now_s, demand))

    def known_end(self, side: Side, told: act.TellEnded) -> list[act.Action]:
        """Have an engine tell the end that another broker ``told`` it."""
        failure = Failure(told.state, told.reason, told.detail)
        known = KnownEnd(
            told.demand is not None,
            None if told.state is State.DONE else failure,
            *(told.bytes, told.position, told.compared, told.counterparts, told.sampled),
            told.readers,
        )
        name, directory = told.handoff_id, self.directory
        return self.run(lambda now_s: directory.known_end(side.record, name, known, now_s))

    def release(self, handoff: Handoff) -> list[act.Action]:
        return self.run(lambda now_s: self.directory.release(handoff, now_s))

    def abandon(self, name: str = "h", tenant: str = "t") -> list[act.Action]:
        return self.run(lambda now_s: self.directory.abandon(tenant, name, now_s))

    def forget(self, side: Side) -> list[act.Action]:
        return self.run(lambda now_s: self.directory.members.forget(side.record, now_s))

    def drain_engine(self, side: Side, draining: bool = True) -> None:
        self.run(lambda now_s: self.directory.members.drain(side.record, draining, now_s))

    def drain(self, draining: bool) -> list[act.Action]:
        return self.run(lambda now_s: self.directory.granting.drain(draining, now_s))

    def settle(
        self,
        side: Side,
        number: int,
        rank: int = 0,
        reason: str = "",
        size_bytes: int = 7,
        *,
        compared: bool = True,
    ) -> list[act.Action]:
        agent = side.agents[rank]
        words = "words" if reason else ""
        settlement = Settlement(number, size_bytes, 5, reason, words, compared)
        return self.run(
            lambda now_s: self.directory.reports.settled(side.record, agent, settlement, now_s)
        )

    def settle_all(self, side: Side, number: int, reason: str = "") -> list[act.Action]:
        """Have all ranks of D report that they have read."""
        return [one for rank in side.agents for one in self.settle(side, number, rank, reason)]

    def stage_all(self, side: Side, number: int, dst_ranks: int) -> None:
        """Have all ranks of P report that they have gathered for all ranks of D."""
        for dst_rank in range(dst_ranks):
            for rank in side.agents:
                self.stage(side, number, rank, dst_rank)

    def stage(
        self,
        side: Side,
        number: int,
        rank: int = 0,
        dst_rank: int = 0,
        reason: str = "",
        *,
        digest: bytes | None = None,
    ) -> list[act.Action]:
        agent = side.agents[rank]
        failure = Failure(State.FAILED, reason, "words") if reason else None
        digest = digest_of(rank, dst_rank) if digest is None else digest
        run = StagedRun(4096 * (1 + rank), 128, digest)
        return self.run(
            lambda now_s: self.directory.reports.staged(
                side.record, agent, number, dst_rank, run, failure, now_s
            )
        )

    def wait(self, seconds: float) -> list[act.Action]:
        """Let time pass, then tick."""
        self.now_s += seconds
        return self.run(self.directory.tick)

    def plan(self) -> list[act.Action]:
        """Answer the oldest question for a plan."""
        asked = self.asked_plans.pop(0)
        plan = self.outcome or pair_plan(
            len(asked.source.ranks),
            len(asked.destination.ranks),
            self.staged_plans,
            self.together,
            self.early,
        )
        return self.run(lambda now_s: self.directory.granting.plan_made(asked.pair, plan, now_s))

    # -- what comes of it -------------------------------------------------------------------------

    def run(self, event: Callable[[float], list[act.Action]]) -> list[act.Action]:
        """Run an event; return the actions that came of it."""
        actions = list(event(self.now_s))
        self.hear(actions)
        self.check()
        while self.plans_at_once and self.asked_plans:
            actions += self.plan()
        return [one for one in actions if not isinstance(one, act.MakePlan | act.SendUnfence)]

    def hear(self, actions: list[act.Action]) -> None:
        """Hear the actions as streams would."""
        for action in actions:
            self.sent.append(action)
            if isinstance(action, act.TellEnded):
                self.sides[action.engine].told.append(action)
            elif isinstance(action, act.MakePlan):
                self.asked_plans.append(action)
            elif isinstance(action, act.CloseAgent):
                self.connected.discard(action.agent)
            elif isinstance(action, act.SendOffer | act.SendKeep):
                self.sides[action.engine].offered.append(action)
            elif not isinstance(
                action,
                act.CloseSession
                | act.TellExamined
                | act.TellHoldings
                | act.TellDrain
                | act.TellForget
                | act.TellCommand
                | act.SendCommand
                | act.TellSampled,
            ):
                assert action.agent in self.connected, f"{action} to an agent that is gone"

    def check(self) -> None:
        """Check that an audit finds nothing wrong."""
        found = audit(self.directory)
        assert not found, found

    def find(self, name: str = "h", tenant: str = "t") -> Handoff:
        return self.directory.ledger.find(tenant, name)

    def orders(self, kind: type[T]) -> list[T]:
        """Return all orders of a kind so far."""
        return of_kind(kind, self.sent)

    def events(self, name: str = "h") -> list[str]:
        """Return the events of a handoff's timeline."""
        return [event for _, event, _ in self.find(name).timeline]


def alone(name: str, ranks: int = 1, **how: Any) -> tuple[World, Side]:
    """Return a world with a single engine."""
    world = World(**how)
    return world, world.engine(name, ranks)


def p_and_d(src_ranks: int = 1, dst_ranks: int = 1, **how: Any) -> tuple[World, Side, Side]:
    """Return a world with a P and a D of so many ranks."""
    world = World(**how)
    return world, world.engine("p", src_ranks), world.engine("d", dst_ranks)


def p_d_and_e(dst_ranks: int = 1, **how: Any) -> tuple[World, Side, Side, Side]:
    """Return a world with a P and two D's."""
    world, p, d = p_and_d(1, dst_ranks, **how)
    return world, p, d, world.engine("e")


def reading(src_ranks: int = 1, dst_ranks: int = 1, **how: Any) -> tuple[World, Side, Side, int]:
    """Return a P and a D whose ranks were told to read, or to gather first, and the number."""
    world, p, d = p_and_d(src_ranks, dst_ranks, **how)
    return world, p, d, world.begin(p, d)


def digest_of(src_rank: int, dst_rank: int) -> bytes:
    """Return the digest that a source's agent reports for a rank."""
    return bytes([src_rank, dst_rank] * 8)


def ends(side: Side) -> list[tuple[str, str]]:
    """Return the states and reasons that a side was told."""
    return [(told.state.value, told.reason) for told in side.told]


def of_kind(kind: type[T], actions: Iterable[object]) -> list[T]:
    """Return the actions of a kind."""
    return [action for action in actions if isinstance(action, kind)]


def kinds(actions: list[act.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]
