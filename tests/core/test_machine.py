"""Random lives of engines, agents and handoffs against what must always hold."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.test_probing import SECONDS, answer
from core.world import Side, World, digest_of
from restow.broker.core.common import actions as act
from restow.broker.core.common.keys import AgentKey, EngineKey, State
from restow.broker.core.common.limits import Limits
from restow.broker.core.common.pair import DigestMode, Digests
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.errors import RestowError

ENGINES = ("p", "q", "d", "e")
HANDOFFS = tuple(f"h{index}" for index in range(6))
DIGESTS = (Digests(), Digests(DigestMode.SAMPLED, 2), Digests(DigestMode.ALL))
LIMITS = Limits(
    max_live=5,
    max_ended=8,
    max_pairs=4,
    settle_grace_s=0.5,
    agent_wait_s=1.0,
    engine_idle_s=50.0,
    probe_again_s=5.0,
)

engines = st.sampled_from(ENGINES)
handoffs = st.sampled_from(HANDOFFS)
ranks = st.integers(0, 2)


@dataclass
class Reader:
    """A destination rank of the model: it may be reading from the order until it settles."""

    number: int
    rank: int
    side: Side


@dataclass
class Model:
    """What the test knows without asking the directory."""

    readers: list[Reader] = field(default_factory=list)
    staging: list[tuple[Side, int, int, int]] = field(default_factory=list)
    runs: Counter[tuple[AgentKey, int]] = field(default_factory=Counter)
    ended: dict[int, str] = field(default_factory=dict)
    settled: list[Reader] = field(default_factory=list)
    comparing: set[tuple[int, int]] = field(default_factory=set)
    """Numbers and ranks that were told to compare digests."""
    ordered: set[int] = field(default_factory=set)
    """Handoffs of which a rank was told to read or to gather."""
    begun: frozenset[int] | None = None
    """While the broker drains: those that had been ordered before."""


class BrokerMachine(RuleBasedStateMachine):
    """Any order of words, faults and time."""

    @initialize(
        staged=st.booleans(),
        digests=st.sampled_from(DIGESTS),
        sizes=st.lists(st.integers(1, 3), min_size=4, max_size=4),
        sides=st.lists(st.sampled_from(("", "P", "D", "PD")), min_size=4, max_size=4),
        hosts=st.lists(st.sampled_from(("", "x", "y")), min_size=4, max_size=4),
    )
    def start(
        self,
        staged: bool,
        digests: Digests,
        sizes: list[int],
        sides: list[str],
        hosts: list[str],
    ) -> None:
        self.world = World(staged=staged, limits=LIMITS, digests=digests, measures=True)
        self.world.hosts = dict(zip(ENGINES, hosts, strict=True))
        self.world.plans_at_once = False
        self.model = Model()
        self.sizes = dict(zip(ENGINES, sizes, strict=True))
        self.heard = 0
        self.numbers: dict[tuple[str, str], int] = {}
        for name, said in zip(ENGINES, sides, strict=True):
            self.world.engine(name, self.sizes[name], sides=said)
        self.look()

    def side(self, name: str) -> Side:
        return self.world.side(name)

    def look(self) -> None:
        """Follow the actions that came since the last look."""
        world, model = self.world, self.model
        known = set(model.ended)
        tells: Counter[tuple[int, EngineKey, int | None]] = Counter()
        ledger = world.directory.ledger
        for handoff in (*ledger.ended.values(), *ledger.live.values()):
            self.numbers[handoff.tenant, handoff.handoff_id] = handoff.number
        for action in world.sent[self.heard :]:
            if isinstance(action, (act.SendExecute, act.SendStage)):
                model.ordered.add(action.handoff)
                assert model.begun is None or action.handoff in model.begun, "granted in a drain"
            if isinstance(action, act.SendExecute):
                assert action.handoff not in model.ended, "an order to read after the end"
                handoff = world.directory.ledger.by_number[action.handoff]
                assert handoff.lease.grant_until_s < handoff.lease.until_s
                assert world.now_s + action.grant_ms / 1000 <= handoff.lease.grant_until_s + 1e-6
                side = world.sides[action.agent.engine]
                assert handoff.destination is side.record
                reader = Reader(action.handoff, action.agent.rank, side)
                assert not any(
                    (one.number, one.rank) == (reader.number, reader.rank) for one in model.readers
                ), "told to read twice"
                model.readers.append(reader)
                if action.hashed:
                    model.comparing.add((reader.number, reader.rank))
                for source in action.sources:
                    right = digest_of(source.src_rank, reader.rank) if action.hashed else b""
                    assert source.digest == right, "a digest of another, or unasked"
            elif isinstance(action, act.SendStage):
                assert action.handoff not in model.ended
                side = world.sides[action.agent.engine]
                for part in action.parts:
                    model.staging.append((side, action.agent.rank, action.handoff, part.dst_rank))
            elif isinstance(action, act.SendUnstage):
                model.runs.pop((action.agent, action.handoff), None)
            elif isinstance(action, act.TellEnded):
                live = ledger.live.get((action.engine.tenant, action.handoff_id))
                if live is not None:
                    self.dismissed(action, live)
                else:
                    tells[self.told(action), action.engine, action.demand] += 1
        self.heard = len(world.sent)
        assert max(tells.values(), default=1) == 1, "a message is told twice"
        # Each message of D's is told the end of its side.
        sides_told = {(number, engine, demand is not None) for number, engine, demand in tells}
        for number, count in Counter(number for number, _, _ in sides_told).items():
            # At the end every side that is known hears of it, D perhaps later; later, whoever says
            # something again: on both sides, if it is both.
            handoff = self.ended_one(number)
            sides = (handoff.source is not None) + (handoff.destination is not None)
            both = handoff.source is handoff.destination
            again = (1, 2) if both else (1,)
            assert count in (again if number in known else (sides - 1, sides)), "not told once"

    def ended_one(self, number: int) -> Handoff:
        """Return the ended handoff with a number."""
        ledger = self.world.directory.ledger
        return next(one for one in ledger.ended.values() if one.number == number)

    def dismissed(self, action: act.TellEnded, handoff: Handoff) -> None:
        """Check that P still has the state of a refused demand.

        No rank was told to read for the demand.
        """
        assert action.state in (State.FAILED, State.EXPIRED)
        assert not [one for one in self.model.readers if one.number == handoff.number]

    def told(self, action: act.TellEnded) -> int:
        """Check a told end: no rank of D can be writing, and nobody hears another end later."""
        number = self.numbers[action.engine.tenant, action.handoff_id]
        known = self.model.ended.setdefault(number, action.state.value)
        assert known == action.state.value, "two ends"
        for reader in self.model.readers:
            if reader.number == number:
                is_d = action.demand is not None
                assert not is_d or reader.side.record.gone, "free while a rank may be writing"
        if action.state is State.DONE:
            left = [one for one in self.model.readers if one.number == number]
            assert not left, "done, and a rank has not settled"
        return number

    def say(self, words: str, *given: object, **more: object) -> None:
        """Call the world's method ``words``; if the call is refused, nothing may have changed."""
        world = self.world
        before = (len(world.sent), set(world.directory.ledger.live))
        try:
            getattr(world, words)(*given, **more)
            if words in ("publish", "request") and isinstance(given[0], Side):
                self.took(words, given[0], str(given[1]))
        except RestowError:
            assert before == (len(world.sent), set(world.directory.ledger.live))
            world.check()
        self.look()

    def took(self, words: str, side: Side, name: str) -> None:
        """Check that an engine that drains takes part in no handoff that began after the drain."""
        handoff = self.world.find(name)
        mine = handoff.source if words == "publish" else handoff.destination
        if side.record.draining and mine is side.record and not handoff.ended:
            since_s = side.record.drains_since_s
            assert handoff.born_s <= since_s, "an engine that drains takes something new"

    # -- words ------------------------------------------------------------------------------------

    @rule(who=engines, name=handoffs, lease_s=st.sampled_from([0.3, 2.0, 30.0]))
    def publish(self, who: str, name: str, lease_s: float) -> None:
        self.say("publish", self.side(who), name, lease_s=lease_s)

    @rule(who=engines, name=handoffs, first=st.integers(0, 2))
    def publish_a_chunk(self, who: str, name: str, first: int) -> None:
        blocks = {"kv": [1 + first]}
        self.say("publish", self.side(who), name, blocks, first=first, final=False)

    @rule(who=engines, rank=ranks, name=handoffs)
    def fence(self, who: str, rank: int, name: str) -> None:
        if rank in self.side(who).agents:
            self.say("fence", self.side(who), rank, name)

    @rule(who=engines, name=handoffs)
    def publish_and_fence(self, who: str, name: str) -> None:
        self.publish(who, name, 30.0)
        for rank in self.side(who).agents:
            self.fence(who, rank, name)

    @rule(
        who=engines,
        name=handoffs,
        odd=st.booleans(),
        timeout_s=st.sampled_from([0.02, 1.0, 30.0]),
    )
    def request(self, who: str, name: str, odd: bool, timeout_s: float) -> None:
        blocks = {"kv": [11, 12, 13 + odd], "state": [14]}
        self.say("request", self.side(who), name, blocks, timeout_s=timeout_s)

    @precondition(lambda self: self.world.orders(act.SendProbe))
    @rule(reason=st.sampled_from(["", "", "STAGING_EXHAUSTED"]))
    def answer_probe(self, reason: str) -> None:
        """Have an agent answer what it was last asked to hold or to measure."""
        asked = self.world.orders(act.SendProbe)[-1]
        side, rank = self.world.sides[asked.agent.engine], asked.agent.rank
        if rank in side.agents:
            seconds = SECONDS if asked.peer is not None else 0.0
            answer(self.world, side, asked.number, rank, reason, seconds)
        self.look()

    @rule(who=engines, name=handoffs, lease_s=st.sampled_from([1.0, 60.0]))
    def renew(self, who: str, name: str, lease_s: float) -> None:
        self.say("renew", self.side(who), name, lease_s)

    @rule(who=engines, name=handoffs)
    def cancel(self, who: str, name: str) -> None:
        self.say("cancel", self.side(who), name)

    @rule(who=engines, name=handoffs)
    def decline(self, who: str, name: str) -> None:
        self.say("decline", self.side(who), name)

    @precondition(lambda self: self.model.readers)
    @rule(
        data=st.data(),
        reason=st.sampled_from(["", "", "", "TRANSFER_FAILED", "DIGEST_MISMATCH"]),
        compared=st.sampled_from([True, True, True, False]),
    )
    def settle(self, data: st.DataObject, reason: str, compared: bool) -> None:
        reader = data.draw(st.sampled_from(self.model.readers))
        self.model.readers.remove(reader)
        self.model.settled.append(reader)
        if reader.rank in reader.side.agents:
            asked = (reader.number, reader.rank) in self.model.comparing
            self.say("settle", reader.side, reader.number, reader.rank, reason, compared=compared)
            state = self.model.ended.get(reader.number)
            assert state != "DONE" or compared or not asked, "done, and nothing was compared"

    @precondition(lambda self: self.model.settled)
    @rule(data=st.data(), reason=st.sampled_from(["", "TRANSFER_FAILED"]))
    def settle_again(self, data: st.DataObject, reason: str) -> None:
        """Repeat a report of a handoff, which may have ended long ago.

        The report is doubled or late.
        """
        reader = data.draw(st.sampled_from(self.model.settled))
        if reader.rank in reader.side.agents:
            heard = len(self.world.sent)
            self.say("settle", reader.side, reader.number, reader.rank, reason)
            assert len(self.world.sent) == heard, "a late report changed something"

    @precondition(lambda self: self.model.staging)
    @rule(
        data=st.data(),
        reason=st.sampled_from(["", "", "", "STAGING_FULL"]),
        digest=st.sampled_from([None, None, None, b"", b"short"]),
    )
    def stage(self, data: st.DataObject, reason: str, digest: bytes | None) -> None:
        task = data.draw(st.sampled_from(self.model.staging))
        self.model.staging.remove(task)
        side, rank, number, dst_rank = task
        agent = side.agents.get(rank)
        if agent is None or agent.gone:
            return
        if not reason:
            self.model.runs[agent.key, number] += 1
        self.say("stage", side, number, rank, dst_rank, reason, digest=digest)

    @rule(who=engines, rank=ranks, number=st.integers(0, 12), dst_rank=ranks)
    def lie(self, who: str, rank: int, number: int, dst_rank: int) -> None:
        """Report what nobody asked of an agent, or what the agent has reported before."""
        side = self.side(who)
        reads = any((one.number, one.rank) == (number, rank) for one in self.model.readers)
        if rank in side.agents and not reads:
            self.say("settle", side, number, rank)
        stages = any(task[1:] == (rank, number, dst_rank) for task in self.model.staging)
        if rank in side.agents and not stages:
            self.say("stage", side, number, rank, dst_rank)

    @precondition(lambda self: self.world.asked_plans)
    @rule()
    def plan(self) -> None:
        self.say("plan")

    # -- faults and time --------------------------------------------------------------------------

    @rule(who=engines, rank=ranks)
    def lose_agent(self, who: str, rank: int) -> None:
        side = self.side(who)
        if rank in side.agents and not side.agents[rank].gone:
            key = side.agents[rank].key
            self.say("disconnect", side, rank)
            self.forget_runs(key)

    @rule(who=engines, rank=ranks, same=st.booleans())
    def return_agent(self, who: str, rank: int, same: bool) -> None:
        """Send an agent's Hello: from a new agent, or from an agent whose stream broke."""
        side = self.side(who)
        if rank < side.record.ranks and not side.record.gone:
            key = AgentKey(side.record.key, rank)
            # Nothing of an earlier stream reads when an agent says Hello.
            readers = self.model.readers
            self.model.readers = [r for r in readers if not (r.side is side and r.rank == rank)]
            before = side.agents.get(rank)
            name = before.agent_name if same and before is not None else ""
            self.forget_runs(key)
            self.say("connect", side, rank, name=name)

    def forget_runs(self, key: AgentKey) -> None:
        """Forget an agent's runs: an agent that lost its stream gives everything back by itself."""
        for run in [run for run in self.model.runs if run[0] == key]:
            del self.model.runs[run]

    @rule(who=engines, leave=st.booleans())
    def end_engine(self, who: str, leave: bool) -> None:
        side = self.side(who)
        if leave and not side.record.gone:
            self.say("unregister", side)
        else:
            self.world.engine(who, self.sizes[who])
            self.look()
        for rank in range(3):
            self.forget_runs(AgentKey(side.record.key, rank))

    @rule(who=engines)
    def return_engine(self, who: str) -> None:
        """Register a forgotten life again; its ranks may have gone on all the time."""
        old = self.side(who)
        if old.record.gone:
            life = old.record.incarnation
            new = self.world.engine(who, self.sizes[who], life=life, agents=False)
            for reader in self.model.readers:
                if reader.side is old:
                    reader.side = new
            self.look()

    @rule(who=engines)
    def forget(self, who: str) -> None:
        side = self.side(who)
        if not side.record.gone:
            self.say("forget", side)

    @rule(who=engines, draining=st.booleans())
    def drain_engine(self, who: str, draining: bool) -> None:
        self.say("drain_engine", self.side(who), draining)

    @rule(name=handoffs)
    def abandon(self, name: str) -> None:
        self.say("abandon", name)
        handoff = self.world.directory.ledger.known("t", name)
        if handoff is not None and handoff.source is None and handoff.destination is None:
            self.model.ended.setdefault(handoff.number, handoff.state.value)  # nobody to be told

    @rule(name=handoffs)
    def release(self, name: str) -> None:
        handoff = self.world.directory.ledger.live.get(("t", name))
        if handoff is not None:
            self.say("release", handoff)

    @rule(draining=st.booleans())
    def drain(self, draining: bool) -> None:
        model = self.model
        model.begun = (
            (frozenset(model.ordered) if model.begun is None else model.begun) if draining else None
        )
        self.say("drain", draining)

    @rule(seconds=st.sampled_from([0.02, 0.3, 1.5, 12.0, 80.0]))
    def wait(self, seconds: float) -> None:
        self.say("wait", seconds)

    # -- what must hold ---------------------------------------------------------------------------

    @invariant()
    def runs_of_ended_handoffs_are_given_back(self) -> None:
        live = self.world.directory.ledger.by_number
        kept = [run for run in self.model.runs if run[1] not in live]
        assert not kept, f"runs that nobody gave back: {kept}"

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for seconds in (0, 10_000):
            world.wait(seconds)
            while world.asked_plans:
                world.plan()
                self.look()
        self.look()
        for name in self.sizes:
            for rank in range(self.side(name).record.ranks):
                self.return_agent(name, rank, False)
        ledger = world.directory.ledger
        assert not ledger.live
        assert not ledger.by_number
        assert not len(ledger.quarantine), "all agents are back, and a D was not told"
        assert not world.directory.plans.planning
        for side in world.sides.values():
            assert not side.record.handoffs
        # Every handoff that both sides were told of ended in one state.
        assert set(self.model.ended) <= set(self.numbers.values())
        # One that handed over to itself and went before its rank was heard of hears nothing.
        alone = {
            one.number
            for one in ledger.ended.values()
            if one.source is one.destination and one.source is not None and one.source.gone
        }
        assert set(self.numbers.values()) <= set(self.model.ended) | alone


TestBrokerMachine = BrokerMachine.TestCase
TestBrokerMachine.settings = settings(
    max_examples=int(os.environ.get("RESTOW_HISTORIES", "150")),
    stateful_step_count=50,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
