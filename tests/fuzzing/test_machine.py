"""A hostile party in the midst of good engines, over many calls and streams."""

from __future__ import annotations

from collections import Counter

from hypothesis.stateful import run_state_machine_as_test

from broker.fakes import answer_at_once
from fuzzing.good_engine import CONNECT, SESSION
from fuzzing.hostile_words import REFS
from fuzzing.house import PROBE_PAIR, TENANTS, House, quiet
from fuzzing.machine import HostileParty
from fuzzing.party import Party, fence, given, holdings, wanted
from fuzzing.rounds import tried
from restow.broker.server.base.hub import P_HEARS_AFTER_S
from restow.v1 import admin_pb2
from restow.v1 import agent_link_pb2 as link
from restow.v1 import broker_pb2 as pb

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
