"""Hostile orders: an agent answers each with a reason, and touches nothing but its own memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing.agent_house import HANDOFF, AgentHouse, case, execute, load, peers, program_of, stage
from fuzzing.hostile_orders import PROGRAMS, any_order, mutated_program, perhaps_mutated
from fuzzing.house import quiet
from fuzzing.messages import Known
from fuzzing.rounds import reaches, tried
from restow.broker.planner import Strategy
from restow.v1 import agent_link_pb2 as pb

pytestmark = pytest.mark.sampled

BODIES = sorted(one.name for one in pb.AgentOrder.DESCRIPTOR.fields)


def answered(house: AgentHouse, orders: list[pb.AgentOrder], outcomes: Counter[str]) -> None:
    """Check that every order that wants an answer has one."""
    heard = {
        (str(one.WhichOneof("body")), getattr(one, str(one.WhichOneof("body"))).ListFields()[0][1])
        for one in house.answers
        if one.WhichOneof("body") in ("settled",)
    }
    for order in orders:
        if order.WhichOneof("body") == "execute" and order.execute.handoff:
            assert ("settled", order.execute.handoff) in heard, order
    for one in house.answers:
        body = str(one.WhichOneof("body"))
        outcomes[f"{body} {getattr(one, body).reason or 'OK'}"] += 1


@pytest.mark.parametrize(("name", "strategy"), PROGRAMS)
def test_orders_to_read(name: str, strategy: Strategy) -> None:
    of, program = case(name), program_of(name, strategy, 0)
    lengths = staged_lengths(name, strategy)
    outcomes: Counter[str] = Counter()

    def take(orders: list[pb.AgentOrder]) -> None:
        with AgentHouse(of, 0, source=False).lives() as house:
            house.take(orders)
            house.finish_writes()
            answered(house, orders, outcomes)
            house.end_well()

    for hashed in (False, True):
        take([load(program), *peers(of), execute(of, program, lengths, hashed)])
    # Nothing is really read here, so nothing can be the same.
    assert outcomes == {"settled OK": 1, "settled DIGEST_MISMATCH": 1}

    @tried(60)
    @given(st.data(), st.booleans())
    def read(data: st.DataObject, hashed: bool) -> None:
        take(
            [
                mutated_program(data.draw, program),
                *(perhaps_mutated(data.draw, one) for one in peers(of)),
                perhaps_mutated(data.draw, execute(of, program, lengths, hashed)),
            ]
        )

    assert reaches(read, lambda: outcomes["settled PROGRAM_INVALID"])


@pytest.mark.parametrize(
    ("name", "strategy", "hashed"),
    [
        *((*one, False) for one in PROGRAMS if one[1] in (Strategy.PACK, Strategy.INTERLEAVE)),
        *((*one, True) for one in PROGRAMS),
    ],
)
def test_orders_to_gather_and_to_hash(name: str, strategy: Strategy, hashed: bool) -> None:
    of, program = case(name), program_of(name, strategy, 0)
    (rank, *_) = program.src_ranks if hashed else program.staging_ranks
    order = stage(of, program, rank, hashed)
    outcomes: Counter[str] = Counter()

    def take(part: pb.AgentOrder, staging: pb.AgentOrder) -> None:
        named = program.hashed_id if hashed else program.gather_id
        part.program.program_id = named(rank)
        with AgentHouse(of, rank, source=True).lives() as house:
            house.take([part, staging])
            answered(house, [part, staging], outcomes)
            house.end_well()

    # Of sixty examples none may be right: many are made from each other.
    take(load(program), order)
    assert outcomes == {"staged OK": 1}

    @tried(60)
    @given(st.data())
    def gather(data: st.DataObject) -> None:
        take(mutated_program(data.draw, program), perhaps_mutated(data.draw, order))

    assert reaches(gather, lambda: outcomes["staged PROGRAM_INVALID"])


@tried(60)
@given(st.data(), st.sampled_from(PROGRAMS))
def test_any_orders_at_all(data: st.DataObject, which: tuple[str, Strategy]) -> None:
    of, program = case(which[0]), program_of(*which, 0)
    right = [load(program), *peers(of), execute(of, program, {})]
    known = Known(
        {
            "program_id": [program.program_id],
            "agent_name": ["peer0", ""],
            "handoff": [HANDOFF, 1],
            "number": [1, 2],
            "src_blocks": [list(right[-1].execute.src_blocks)],
            "dst_blocks": [list(right[-1].execute.dst_blocks)],
            "stop_token": [of.tokens],
            "grant_ms": [1, 10_000],
        },
        {"restow.v1.Program": [right[0].program], "restow.v1.Peer": [right[1].peer]},
    )
    with AgentHouse(of, 0, source=False).lives() as house:
        house.take(right[: data.draw(st.integers(0, len(right)))])
        for _ in range(data.draw(st.integers(1, 6))):
            house.take([any_order(data.draw, known)])
        house.end_well()


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    with quiet():
        yield


@cache
def staged_lengths(name: str, strategy: Strategy) -> dict[int, int]:
    """Return how many bytes each agent of P gathers for rank 0 of D."""
    of, program = case(name), program_of(name, strategy, 0)
    found = {}
    for rank in program.staging_ranks:
        with AgentHouse(of, rank, source=True).lives() as house:
            house.take([load(program, rank), stage(of, program, rank)])
            found[rank] = house.answers[0].staged.bytes
    return found


def test_the_right_orders_are_followed() -> None:
    for name, strategy in PROGRAMS:
        of, program = case(name), program_of(name, strategy, 0)
        lengths = staged_lengths(name, strategy)
        with AgentHouse(of, 0, source=False).lives() as house:
            house.take([load(program), *peers(of), execute(of, program, lengths)])
            assert [one.settled.reason for one in house.answers] == [""]
            house.end_well()
