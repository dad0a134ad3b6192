"""Orders of a broker that errs or lies: an agent answers each, and touches only its own memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing.agent_house import (
    HANDOFF,
    PROGRAMS,
    AgentHouse,
    case,
    execute,
    load,
    peers,
    program_of,
    stage,
)
from fuzzing.house import quiet
from fuzzing.messages import INT64S, ODDNESS, Draw, Known, draw_message, mutated, near
from fuzzing.rounds import reaches, tried
from restow.broker.planner import Program, Strategy
from restow.broker.planner.program import Step
from restow.broker.rpc import wire_program
from restow.v1 import agent_link_pb2 as pb

_SEVERAL = st.sampled_from([0, 0, 1, 1, 2, 3])
_SELDOM = st.integers(0, 7).map(lambda number: not number)
_NUMBERS = st.one_of(st.sampled_from(INT64S), st.integers(-1, 100))


def mutated_program(draw: Draw, program: Program) -> pb.AgentOrder:
    """Return the order that brings a program with some numbers changed."""
    steps = tuple(Step(step.form, step.rows.copy()) for step in program.steps)
    for _ in range(draw(_SEVERAL)):
        table = draw(st.sampled_from(steps)).rows
        row = draw(st.integers(0, len(table) - 1))
        column = draw(st.integers(0, table.shape[1] - 1))
        old = int(table[row, column])
        value = draw(near(old) if draw(st.booleans()) else _NUMBERS)
        rows = slice(None) if draw(st.integers(0, 3)) == 0 else row
        table[rows, column] = np.int64(max(-(2**63), min(value, 2**63 - 1)))
    message = wire_program.program_to_proto(replace(program, steps=steps))
    # What a source alone is told, too; and one step twice, or at another place.
    message.steps.extend(wire_program.step_to_proto(step) for step in steps if draw(_SELDOM))
    if draw(st.integers(0, 2)) == 0:
        index = draw(st.integers(0, len(message.group_pairs) - 1))
        message.group_pairs[index].CopyFrom(draw(mutated(message.group_pairs[index])))
    return pb.AgentOrder(program=message)


def perhaps_mutated(draw: Draw, order: pb.AgentOrder) -> pb.AgentOrder:
    """Return the order, changed in one of four cases."""
    return order if draw(st.integers(0, 3)) else draw(mutated(order))


def any_order(draw: Draw, known: Known) -> pb.AgentOrder:
    """Draw any order at all."""
    made = draw_message(draw, pb.AgentOrder.DESCRIPTOR, known, draw(ODDNESS))
    return pb.AgentOrder.FromString(made.SerializeToString())


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
