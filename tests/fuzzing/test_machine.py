"""A hostile party beside good engines: any calls, streams and bytes, in any order, and time."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from broker.fakes import answer_at_once
from fuzzing.door import Stream
from fuzzing.good_engine import CONNECT, REGISTER, SESSION
from fuzzing.house import PROBE_PAIR, TENANTS, House, quiet
from fuzzing.messages import ODDNESS, Known, draw_message, mutated, spoiled
from fuzzing.party import (
    ANSWERING,
    LAYOUT_MESSAGES,
    METHODS,
    REFS,
    STREAMING,
    UNARY,
    Party,
    declined,
    demand,
    fence,
    given,
    hellos,
    holdings,
    keep,
    known,
    publication,
    wanted,
)
from fuzzing.rounds import tried
from restow.broker.core.common.pair import DigestMode, Digests
from restow.broker.planner import Strategy
from restow.broker.server.base.hub import P_HEARS_AFTER_S
from restow.v1 import admin_pb2
from restow.v1 import agent_link_pb2 as link
from restow.v1 import broker_pb2 as pb

tenants = st.sampled_from([TENANTS[0], TENANTS[0], TENANTS[1]])
strategies = st.sampled_from([Strategy.AUTO, Strategy.SLICES, Strategy.PACK, Strategy.INTERLEAVE])
digests = st.sampled_from([Digests(), Digests(DigestMode.ALL)])
now_and_then = st.integers(0, 3)


class HostileParty(RuleBasedStateMachine):
    """Whatever it says, it is answered with a reason, and the good engines go on."""

    seen: ClassVar[Counter[str]] = Counter()
    """How often what was reached, over all runs: who fuzzes the first check alone finds nothing."""

    @initialize(strategy=strategies, digests=digests)
    def start(self, strategy: Any, digests: Any) -> None:
        self.house = House(strategy, digests=digests)
        self.party = Party(self.house, self.seen)
        self.handed_over = 0

    # -- what is said well, or nearly so ----------------------------------------------------------

    @rule(tenant=tenants, ref=st.sampled_from(REFS))
    def come(self, tenant: str, ref: pb.EngineRef) -> None:
        self.party.come(tenant, ref)

    @rule(data=st.data(), tenant=tenants, lease_ms=st.sampled_from([2000, 30_000]))
    def hand_over(self, data: st.DataObject, tenant: str, lease_ms: int) -> None:
        """Publish, fence and ask as two good engines would, with a few things changed."""
        self.handed_over += 1
        name = f"h{self.handed_over}"
        source, destination = data.draw(st.permutations([REFS[0], REFS[2]]))
        for ref, right in (
            (source, publication(name, lease_ms)),
            (destination, demand(name, lease_ms)),
        ):
            message = right if data.draw(now_and_then) else data.draw(mutated(right))
            for stream in self.party.of(SESSION, tenant, ref):
                stream.say(pb.SessionRequest(messages=[message]))
        for stream in self.party.of(CONNECT, tenant, source):
            stream.say(fence(name))
        self.house.wait(0.001)

    @rule(data=st.data(), tenant=tenants, timeout_ms=st.sampled_from([2000, 30_000]))
    def ask_by_content(self, data: st.DataObject, tenant: str, timeout_ms: int) -> None:
        """Hold a state, ask for it and have it kept, with a few things changed."""
        self.handed_over += 1
        source, destination = data.draw(st.permutations([REFS[0], REFS[2]]))
        for ref, right in (
            (source, holdings()),
            (destination, wanted(f"h{self.handed_over}", timeout_ms)),
            (source, keep()),
        ):
            message = right if data.draw(now_and_then) else data.draw(mutated(right))
            for stream in self.party.of(SESSION, tenant, ref):
                stream.say(pb.SessionRequest(messages=[message]))
        self.house.wait(0.001)

    @precondition(lambda self: self.party.offers)
    @rule(data=st.data(), right=st.sampled_from([given, given, declined]))
    def answer_offer(self, data: st.DataObject, right: Any) -> None:
        """Give the offered state or decline, rightly or not; perhaps as another engine."""
        stream, offer = data.draw(st.sampled_from(self.party.offers))
        message = right(offer)
        if data.draw(now_and_then) == 0:
            message = data.draw(mutated(message))
        else:
            self.party.offers.remove((stream, offer))
        if data.draw(now_and_then) == 0:
            stream = data.draw(st.sampled_from(self.party.streams))
        if stream.path == SESSION:
            stream.say(pb.SessionRequest(messages=[message]))
        for agent in self.party.streams:
            if agent.path == CONNECT:
                agent.say(fence(offer.handoff_id))
        self.house.wait(0.001)

    @precondition(lambda self: self.party.orders)
    @rule(data=st.data(), change=st.booleans())
    def answer(self, data: st.DataObject, change: bool) -> None:
        """Answer an agent's order, rightly or not; perhaps again, perhaps on another's stream."""
        stream, order = data.draw(st.sampled_from(self.party.orders))
        answers = answer_at_once(order)
        if change:
            answers = [data.draw(mutated(one)) for one in answers]
            if data.draw(now_and_then) == 0:
                stream = data.draw(st.sampled_from(self.party.streams))
        else:
            self.party.orders.remove((stream, order))
        stream.say(link.ConnectRequest(messages=answers))
        self.house.wait(0.001)

    @precondition(lambda self: self.party.orders)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        """Report about the right handoff or probe as an agent, with any other values."""
        stream, order = data.draw(st.sampled_from(self.party.orders))
        (answer, *_) = answer_at_once(order)
        body = answer.WhichOneof("body")
        part = getattr(answer, str(body))
        right = {one.name: [value] for one, value in part.ListFields() if not one.is_repeated}
        part.CopyFrom(draw_message(data.draw, part.DESCRIPTOR, Known(right), 3))
        stream.say(link.ConnectRequest(messages=[answer]))
        self.house.wait(0.001)

    @rule(data=st.data(), tenant=tenants, ref=st.sampled_from([REFS[0], REFS[2]]))
    def introduce(self, data: st.DataObject, tenant: str, ref: pb.EngineRef) -> None:
        """Introduce an agent with a Hello that is nearly right."""
        one = data.draw(st.sampled_from(hellos([ref], tenant)))
        self.party.introduce(self.party.open(CONNECT, tenant, ref), data.draw(mutated(one)))
        self.house.wait(0.001)

    @rule(data=st.data(), tenant=tenants, tp=st.sampled_from([1, 2]))
    def register(self, data: st.DataObject, tenant: str, tp: int) -> None:
        """Register an engine with a layout that is nearly right."""
        request = pb.RegisterEngineRequest(
            engine=data.draw(st.sampled_from(REFS)),
            layout=data.draw(mutated(LAYOUT_MESSAGES[tp])),
        )
        answer = self.house.call(REGISTER, request.SerializeToString(), tenant)
        if answer is not None:
            self.seen[f"layout {answer.reason or 'OK'}"] += 1

    # -- what is said anyhow ----------------------------------------------------------------------

    @rule(data=st.data(), path=st.sampled_from(UNARY), tenant=tenants)
    def call(self, data: st.DataObject, path: str, tenant: str) -> None:
        kind, odd = METHODS[path].input_type, data.draw(ODDNESS)
        request = draw_message(data.draw, kind, known(self.house, tenant, path), odd)
        answer = self.house.call(path, request.SerializeToString(), tenant)
        self.seen[f"{METHODS[path].name} {answer.reason or 'OK' if answer else 'waits'}"] += 1

    @rule(data=st.data(), path=st.sampled_from([*STREAMING, *ANSWERING]), tenant=tenants)
    def begin(self, data: st.DataObject, path: str, tenant: str) -> None:
        """Begin a stream with any message."""
        stream = self.party.open(path, tenant)
        self._say_anything(data, stream, first=True)

    @precondition(lambda self: self.party.streams)
    @rule(data=st.data())
    def say(self, data: st.DataObject) -> None:
        """Send any further message on a stream."""
        self._say_anything(data, data.draw(st.sampled_from(self.party.streams)))

    def _say_anything(self, data: st.DataObject, stream: Stream, first: bool = False) -> None:
        kind, odd = METHODS[stream.path].input_type, data.draw(ODDNESS)
        words = known(self.house, stream.tenant, first=first)
        stream.say(draw_message(data.draw, kind, words, odd))
        self.house.wait(0.001)

    @precondition(lambda self: self.party.streams)
    @rule(data=st.data())
    def say_bytes(self, data: st.DataObject) -> None:
        """Send bytes that are no message any more, or that are another message."""
        stream = data.draw(st.sampled_from(self.party.streams))
        kind = METHODS[stream.path].input_type
        message = draw_message(data.draw, kind, known(self.house, stream.tenant), 0)
        stream.say(data.draw(spoiled(message.SerializeToString())))
        self.house.wait(0.001)

    # -- faults and time --------------------------------------------------------------------------

    @precondition(lambda self: self.party.streams)
    @rule(data=st.data(), how=st.sampled_from(["cut", "end", "deafen"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        stream = data.draw(st.sampled_from(self.party.streams))
        if how == "deafen":
            stream.reads.clear()
        elif how == "cut":
            stream.cut()
        else:
            stream.end()
        self.house.wait(0.001)

    @rule(seconds=st.sampled_from([0.3, 2.0, 7.0]))
    def wait(self, seconds: float) -> None:
        self.house.wait(seconds)

    @rule()
    def good_engines_hand_over(self) -> None:
        self.house.hand_over()

    @rule()
    def good_engines_ask_by_content(self) -> None:
        self.house.ask_by_content()

    @rule()
    def operators_look(self) -> None:
        self.house.show()

    # -- what must hold ---------------------------------------------------------------------------

    @invariant()
    def nothing_is_wrong(self) -> None:
        if hasattr(self, "party"):
            self.party.look()
            self.house.check()

    def teardown(self) -> None:
        if hasattr(self, "party"):
            with self.house.lives():
                self.house.show()
                self.party.leave()
                self.house.end_well()


RUNS = 60


def test_a_hostile_party() -> None:
    with quiet():
        run_state_machine_as_test(HostileParty, settings=tried(RUNS))


def test_an_operator_may_have_a_good_agent_read_from_any_engine_of_its_tenant() -> None:
    with quiet():
        house = House()
        party = Party(house, Counter())
        asked = admin_pb2.ProbePairRequest(
            source_engine=REFS[0].engine_id, destination_engine=house.d.ref.engine_id
        )
        assert house.call(PROBE_PAIR, asked.SerializeToString(), TENANTS[0]) is None, "no pair"
        stream, order = party.orders[-1]
        stream.say(link.ConnectRequest(messages=answer_at_once(order)))
        house.wait(0.001)
        house.check()
        with house.lives():
            party.leave()
            house.end_well()


def test_a_hostile_party_is_offered_what_it_says_that_it_holds() -> None:
    # Otherwise the rules for offers would try nothing.
    with quiet(), House().lives() as house:
        party = Party(house, Counter())
        tenant, (x, y) = TENANTS[1], (REFS[0], REFS[2])
        (holder,) = party.of(SESSION, tenant, x)
        holder.say(pb.SessionRequest(messages=[holdings()]))
        for stream in party.of(SESSION, tenant, y):
            stream.say(pb.SessionRequest(messages=[wanted("c", 30_000)]))
        house.wait(0.001)
        ((stream, offer),) = party.offers
        assert (stream, offer.handoff_id) == (holder, "c")
        holder.say(pb.SessionRequest(messages=[given(offer)]))
        for agent in party.of(CONNECT, tenant, x):
            agent.say(fence("c"))
        house.wait(0.001)
        while party.orders:
            agent, order = party.orders.pop()
            agent.say(link.ConnectRequest(messages=answer_at_once(order)))
            house.wait(0.001)
        house.wait(2 * P_HEARS_AFTER_S)
        assert party.seen["ended OK"] == 2
        house.check()
