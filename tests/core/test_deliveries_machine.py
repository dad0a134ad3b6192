"""Random lives of one publication at a time and the D's that ask for it, against what must hold.

The model knows who reads, what was told to whom, and how many readers there are.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from core.world import Side, World
from restow.broker.core.common import actions as act
from restow.broker.core.common.keys import State
from restow.broker.core.common.limits import Limits
from restow.broker.errors import RestowError

LIMITS = Limits(max_live=12, max_ended=8, settle_grace_s=0.5, agent_wait_s=1.0, engine_idle_s=50.0)
DS = ("d", "e", "f", "g")
ds = st.sampled_from(DS)
names = st.sampled_from(("h0", "h1"))


@dataclass
class Told:
    """What was told of one handoff's id."""

    publication: act.TellEnded | None = None
    done: set[str] = field(default_factory=set)
    """The lives of D's that were told DONE."""
    declined: set[str] = field(default_factory=set)


class DeliveriesMachine(RuleBasedStateMachine):
    """Any order of words, faults and time."""

    @initialize(staged=st.booleans(), sizes=st.lists(st.integers(1, 2), min_size=5, max_size=5))
    def start(self, staged: bool, sizes: list[int]) -> None:
        self.world = World(staged=staged, limits=LIMITS)
        self.world.plans_at_once = False
        self.sizes = dict(zip(("p", *DS), sizes, strict=True))
        for name, size in self.sizes.items():
            self.world.engine(name, size)
        self.reading: set[tuple[int, str, int]] = set()
        """Numbers, D's and ranks that were told to read and have not settled."""
        self.failed: set[int] = set()
        """Numbers of which a rank did not read well."""
        self.staging: list[tuple[int, int, int]] = []
        self.of: dict[int, tuple[str, str]] = {}
        """Number -> the handoff's id and D."""
        self.by_message: dict[tuple[str, int], set[int]] = {}
        """D and its message -> the numbers that were granted for it."""
        self.told: dict[str, Told] = {}
        self.readers: dict[str, int] = {}
        self.taken: dict[str, set[str]] = {}
        """Lives of D's whose word to do without was taken, by handoff: not all live to be told."""
        self.heard = 0

    def side(self, name: str) -> Side:
        return self.world.side(name)

    def life(self, name: str) -> str:
        return f"{name}/{self.side(name).record.incarnation}"

    def look(self) -> None:
        """Follow what was ordered and told since the last look."""
        for action in self.world.sent[self.heard :]:
            if isinstance(action, act.SendExecute):
                engine = action.agent.engine.engine_id
                told = self.told.get(action.handoff_id, Told())
                assert told.publication is None, "an order to read what P has back"
                self.of[action.handoff] = action.handoff_id, engine
                granted = self.world.directory.ledger.by_number[action.handoff]
                for message in granted.demand_messages.numbers:
                    self.by_message.setdefault((engine, message), set()).add(action.handoff)
                self.reading.add((action.handoff, engine, action.agent.rank))
                live = self.world.directory.ledger.by_number
                taken = [
                    n for n, (of, _) in self.of.items() if of == action.handoff_id and n in live
                ]
                assert len(taken) + len(told.done) <= self.readers[action.handoff_id]
            elif isinstance(action, act.SendStage):
                for part in action.parts:
                    self.staging.append((action.handoff, action.agent.rank, part.dst_rank))
            elif isinstance(action, act.TellEnded):
                self.hear_end(action)
        self.heard = len(self.world.sent)

    def hear_end(self, action: act.TellEnded) -> None:
        name, engine = action.handoff_id, action.engine.engine_id
        told = self.told.setdefault(name, Told())
        if action.demand is None:
            assert engine == "p"
            if told.publication is None:
                told.publication = action
                assert action.delivered == len(told.done), "P is told of other deliveries"
                if action.state is State.DONE:
                    without = told.declined | self.taken.get(name, set())
                    served = len(told.done | without)
                    assert served >= self.readers[name], "P is told before all have it"
            assert told.publication.state is action.state, "two ends"
            return
        life = self.life(engine)
        mine = self.by_message.get((engine, action.demand), set())
        writing = [one for one in self.reading if one[0] in mine and one[1] == engine]
        assert not writing or self.side(engine).record.gone, "free while a rank may be writing"
        if action.state is State.DONE:
            assert life not in told.declined
            well = mine - self.failed or life in told.done
            assert well, "done, and nothing was read well"
            assert told.publication is None or life in told.done, "done after P had its pages"
            told.done.add(life)
        elif action.reason == "DECLINED":
            told.declined.add(life)

    def say(self, words: str, *given: object, **more: object) -> bool:
        try:
            getattr(self.world, words)(*given, **more)
        except RestowError:
            self.world.check()
            return False
        finally:
            self.look()
        return True

    # -- words ------------------------------------------------------------------------------------

    @rule(name=names, readers=st.integers(1, 3), lease_s=st.sampled_from([0.3, 3.0, 30.0]))
    def publish(self, name: str, readers: int, lease_s: float) -> None:
        before = self.readers.get(name)
        # A side that names less than D's did is right: the number can't be known before.
        self.readers[name] = max(readers, before or 0)
        p = self.side("p")
        self.say("publish", p, name, readers=readers, lease_s=lease_s)
        for rank in list(p.agents):
            self.say("fence", p, rank, name)
        known = self.world.directory.ledger.known("t", name)
        if known is not None and known.publication.readers:
            self.readers[name] = known.publication.readers

    @rule(
        name=names, who=ds, readers=st.integers(1, 3), timeout_s=st.sampled_from([0.1, 2.0, 30.0])
    )
    def request(self, name: str, who: str, readers: int, timeout_s: float) -> None:
        known = self.world.directory.ledger.known("t", name)
        if known is None or not known.publication.readers:
            self.readers[name] = max(readers, self.readers.get(name, 0))
        self.say("request", self.side(who), name, readers=readers, timeout_s=timeout_s)

    @rule(name=names, who=ds, readers=st.integers(1, 3))
    def decline(self, name: str, who: str, readers: int) -> None:
        known = self.world.directory.ledger.known("t", name)
        if known is None or not known.publication.readers:
            self.readers[name] = max(readers, self.readers.get(name, 0))
        self.say("decline", self.side(who), name, readers=readers)
        known = self.world.directory.ledger.known("t", name)
        part = known and known.deliveries.by_engine.get(self.side(who).record.key)
        if part and part.failure and part.failure.reason == "DECLINED":
            self.taken.setdefault(name, set()).add(self.life(who))

    @rule(name=names, who=st.sampled_from(("p", *DS)))
    def cancel(self, name: str, who: str) -> None:
        self.say("cancel", self.side(who), name)

    @rule(name=names)
    def renew(self, name: str) -> None:
        self.say("renew", self.side("p"), name, 30.0)

    @precondition(lambda self: self.world.asked_plans)
    @rule()
    def plan(self) -> None:
        self.say("plan")

    @precondition(lambda self: self.staging)
    @rule(data=st.data(), reason=st.sampled_from(["", "", "", "STAGING_FULL"]))
    def stage(self, data: st.DataObject, reason: str) -> None:
        task = data.draw(st.sampled_from(self.staging))
        self.staging.remove(task)
        number, rank, dst_rank = task
        if rank in self.side("p").agents and not self.side("p").agents[rank].gone:
            self.say("stage", self.side("p"), number, rank, dst_rank, reason)

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), reason=st.sampled_from(["", "", "", "TRANSFER_FAILED"]))
    def settle(self, data: st.DataObject, reason: str) -> None:
        one = data.draw(st.sampled_from(sorted(self.reading)))
        self.reading.discard(one)
        number, who, rank = one
        if reason:
            self.failed.add(number)
        if rank in self.side(who).agents:
            self.say("settle", self.side(who), number, rank, reason)

    # -- faults and time --------------------------------------------------------------------------

    @rule(who=st.sampled_from(("p", *DS)))
    def lose_agent(self, who: str) -> None:
        side = self.side(who)
        if 0 in side.agents and not side.agents[0].gone:
            self.say("disconnect", side, 0)

    @rule(who=st.sampled_from(("p", *DS)), same=st.booleans())
    def return_agent(self, who: str, same: bool) -> None:
        side = self.side(who)
        if side.record.gone:
            return
        # Nothing of an earlier stream reads when an agent says Hello; what it read is not known.
        gone = {one for one in self.reading if one[1:] == (who, 0)}
        self.reading -= gone
        self.failed |= {number for number, _, _ in gone}
        name = side.agents[0].agent_name if same and 0 in side.agents else ""
        self.say("connect", side, 0, name=name)

    @rule(who=st.sampled_from(("p", *DS)))
    def end_engine(self, who: str) -> None:
        """Start another life in an engine's place."""
        self.reading = {one for one in self.reading if one[1] != who}
        self.say("engine", who, self.sizes[who])

    @rule(seconds=st.sampled_from([0.02, 0.02, 0.3, 1.5, 12.0]))
    def wait(self, seconds: float) -> None:
        self.say("wait", seconds)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for seconds in (0.0, 700.0, 700.0, 700.0):
            self.say("wait", seconds)
            while self.world.asked_plans:
                self.say("plan")
        for who in ("p", *DS):
            side = self.side(who)
            for rank in range(self.sizes[who]):
                if not side.record.gone:
                    self.reading = {r for r in self.reading if r[1:] != (who, rank)}
                    self.say("connect", side, rank)
        self.look()
        ledger = self.world.directory.ledger
        assert not ledger.live
        assert not ledger.by_number
        assert not len(ledger.quarantine), "all agents are back, and a D was not told"
        for side in self.world.sides.values():
            assert not side.record.handoffs


TestDeliveriesMachine = DeliveriesMachine.TestCase
TestDeliveriesMachine.settings = settings(
    max_examples=int(os.environ.get("RESTOW_HISTORIES", "150")),
    stateful_step_count=50,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
