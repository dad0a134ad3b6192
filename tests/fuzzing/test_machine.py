"""A hostile party in the midst of good engines, over many calls and streams."""

from __future__ import annotations

from collections import Counter

from hypothesis.stateful import run_state_machine_as_test

from broker.fakes import answer_at_once
from fuzzing.hostile_words import REFS
from fuzzing.house import PROBE_PAIR, TENANTS, House, quiet
from fuzzing.machine import HostileParty
from fuzzing.party import Party
from fuzzing.rounds import tried
from restow.v1 import admin_pb2
from restow.v1 import agent_link_pb2 as link

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
