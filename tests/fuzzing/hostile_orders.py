"""Orders of a broker that errs or lies: right ones with a few things changed, and any others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from fuzzing.messages import ODDNESS, Draw, Known, draw_message
from fuzzing.mutation import mutated
from fuzzing.scalars import INT64S, near
from restow.broker.planner import Program, Strategy
from restow.broker.planner.program import Step
from restow.broker.rpc import wire_program
from restow.v1 import agent_link_pb2 as pb

PROGRAMS = (
    ("wide", Strategy.SLICES),
    ("wide", Strategy.WHOLE),
    ("wide", Strategy.PACK),
    ("wide", Strategy.INTERLEAVE),
    ("cast", Strategy.WHOLE),
    ("cast", Strategy.PACK),
    ("cast", Strategy.INTERLEAVE),
    ("recompute", Strategy.RECOMPUTE),
)
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
