"""Every RPC of the contract, whatever is said: an answer, or a status with a reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.fakes import POSITION
from fuzzing.good_engine import SESSION
from fuzzing.house import TENANTS, House, quiet
from fuzzing.messages import ODDNESS, Known, draw_message, spoiled
from fuzzing.party import (
    ANSWERING,
    METHODS,
    PREFIXES,
    REFS,
    STREAMING,
    UNARY,
    Party,
    known,
    publication,
)
from fuzzing.rounds import reaches, tried
from restow.broker.server.base.waiting_calls import WAIT_S
from restow.v1 import admin_pb2, agent_link_pb2, broker_pb2
from restow.v1 import broker_pb2 as pb

pytestmark = pytest.mark.sampled

MUST_BE_REACHED = {
    **{path: "OK" for path in UNARY if not path.endswith(("/Request", "/ProbePair"))},
    "/restow.v1.Admin/ForgetEngine": "ENGINE_CONNECTED",
}
"""What random words alone would not reach: then the fuzzing is too weak."""


COMMAND = "/restow.v1.Broker/Command"
A_COMMAND = pb.CommandRequest(
    command=pb.StateCommand(
        command_id="given",
        engine_id="x",
        prefix=PREFIXES[0],
        position_tokens=POSITION,
        evict=pb.EvictState(),
    )
)


def test_every_service_of_the_broker_is_fuzzed() -> None:
    files = (broker_pb2, agent_link_pb2, admin_pb2)
    contracted = {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert {*UNARY, *STREAMING, *ANSWERING} == contracted


def as_one(words: Known, ref: pb.EngineRef) -> Known:
    """Return the same knowledge, but name the engine ``ref`` every other time."""
    refs = words.messages["restow.v1.EngineRef"]
    return replace(
        words, messages={**words.messages, "restow.v1.EngineRef": [*refs, *[ref] * len(refs)]}
    )


@pytest.mark.parametrize("path", UNARY)
def test_a_call(path: str) -> None:
    outcomes: Counter[str] = Counter()
    kind = METHODS[path].input_type

    @tried(15)
    @given(st.data(), st.sampled_from(TENANTS))
    def say(data: st.DataObject, tenant: str) -> None:
        with House().lives() as house:
            party = Party(house, Counter())
            for stream in party.of(SESSION, tenant, REFS[0]):
                messages = [publication(name, 30_000) for name in ("h0", "h1", "h2")]
                stream.say(pb.SessionRequest(messages=messages))
            house.call(COMMAND, A_COMMAND.SerializeToString(), tenant)
            for _ in range(5):
                words = as_one(known(house, tenant, path), REFS[0])
                request = draw_message(data.draw, kind, words, data.draw(ODDNESS))
                answer = house.call(path, request.SerializeToString(), tenant)
                outcomes["waits" if answer is None else answer.reason or "OK"] += 1
                house.check()
            house.call(path, data.draw(spoiled(request.SerializeToString())), tenant)
            house.check()
            house.hand_over()

    with quiet():
        assert reaches(say, lambda: outcomes[MUST_BE_REACHED.get(path, "waits")]), outcomes


@pytest.mark.parametrize("path", STREAMING)
def test_a_stream(path: str) -> None:
    outcomes: Counter[str] = Counter()
    kind = METHODS[path].input_type

    @tried(40)
    @given(st.data(), st.sampled_from(TENANTS))
    def say(data: st.DataObject, tenant: str) -> None:
        def hear(response: Any) -> None:
            outcomes["heard"] += 1

        with House().lives() as house:
            Party(house, Counter())
            stream = house.door.stream(path, tenant)
            stream.hear = hear
            for number in range(data.draw(st.integers(1, 5))):
                words = known(house, tenant, first=number == 0)
                request = draw_message(data.draw, kind, words, data.draw(ODDNESS))
                stream.say(request)
                house.wait(0.001)
                house.check()
            stream.say(data.draw(spoiled(request.SerializeToString())))
            stream.end()
            house.wait(WAIT_S + 0.001)  # for an engine, if it is unknown
            assert stream.over
            house.check()
            house.hand_over()
            if stream.answer is not None:
                outcomes[stream.answer.reason or "OK"] += 1

    with quiet():
        assert reaches(say, lambda: min(outcomes["heard"], outcomes["ARGUMENT_INVALID"])), outcomes


@pytest.mark.parametrize("path", ANSWERING)
def test_a_call_that_is_answered_by_a_stream(path: str) -> None:
    outcomes: Counter[str] = Counter()
    kind = METHODS[path].input_type

    @tried(15)
    @given(st.data(), st.sampled_from(TENANTS))
    def say(data: st.DataObject, tenant: str) -> None:
        def hear(response: Any) -> None:
            outcomes["heard"] += 1

        with House().lives() as house:
            stream = house.door.stream(path, tenant)
            stream.hear = hear
            request = draw_message(data.draw, kind, known(house, tenant), data.draw(ODDNESS))
            words = request.SerializeToString()
            stream.say(data.draw(spoiled(words)) if data.draw(st.booleans()) else words)
            house.ask_by_content()
            house.check()
            stream.end()
            house.wait(0.001)
            assert stream.over
            house.hand_over()
            if stream.answer is not None:
                outcomes[stream.answer.reason or "OK"] += 1

    with quiet():
        assert reaches(say, lambda: min(outcomes["heard"], outcomes["ARGUMENT_INVALID"])), outcomes


def test_an_empty_message_and_no_message_at_all() -> None:
    with quiet(), House().lives() as house:
        for path in UNARY:
            house.call(path, b"", TENANTS[0])
            house.check()
        for path in (*STREAMING, *ANSWERING):
            for requests in ([], [b""], [b"", b""]):
                stream = house.door.stream(path, TENANTS[0])
                for request in requests:
                    stream.say(request)
                stream.end()
                house.wait(0.001)
                assert stream.over
                house.check()
        house.hand_over()
