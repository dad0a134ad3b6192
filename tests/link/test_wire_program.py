"""Programs on the wire: what goes in comes out, and what another release says is refused."""

from __future__ import annotations

import numpy as np
import pytest

from restow.broker.errors import AgentReleaseError, PlanError
from restow.broker.layout import TokenClass
from restow.broker.planner.program import (
    FORMS,
    GATHERED,
    READ_OR_GATHERED,
    READ_SPANS,
    Column,
    Form,
    GroupPair,
    Operand,
    PageForm,
    Program,
    Step,
    StepKind,
    columns_of,
)
from restow.broker.rpc.wire_program import program_from_proto, program_to_proto
from restow.v1 import program_pb2

PAIR = GroupPair(PageForm("kv", 16, 2), PageForm("kv", 8, 1, whole_blocks=True), 4)


def every_form() -> Program:
    """Return a program with one step of each form, with rows of ranks 0 and 1."""
    rng = np.random.default_rng(0)
    steps = []
    for form in FORMS:
        rows = rng.integers(-(2**62), 2**62, (4, len(columns_of(form))))
        if form in READ_OR_GATHERED:
            rows[:, Column.SRC_RANK] = [0, 1, 1, 0]
        steps.append(Step(form, rows))
    return Program("p", 3, (PAIR,), tuple(steps))


def is_same(one: Program, other: Program) -> bool:
    return (one.dst_rank, one.group_pairs) == (other.dst_rank, other.group_pairs) and all(
        mine.form == its.form and np.array_equal(mine.rows, its.rows)
        for mine, its in zip(one.steps, other.steps, strict=True)
    )


def test_a_destination_is_sent_all_but_what_fills_its_run() -> None:
    program = every_form()
    sent = program_from_proto(program_to_proto(program))
    kept = tuple(step for step in program.steps if step.form.dst is not Operand.RUN)
    assert len(kept) == len(FORMS) - 1
    assert is_same(sent, Program("p", 3, (PAIR,), kept))


@pytest.mark.parametrize("hashed", [False, True])
def test_a_source_is_sent_its_own_rows_and_no_others(hashed: bool) -> None:
    program, forms = every_form(), READ_OR_GATHERED if hashed else GATHERED
    sent = program_from_proto(program_to_proto(program, 1, hashed))
    kept = tuple(Step(one.form, one.rows[1:3]) for one in program.steps if one.form in forms)
    assert len(kept) == len(forms)
    for one in kept:
        if one.form == READ_SPANS:
            one.rows[:, Column.DST_REGION] = [0, 1]
    assert is_same(sent, Program("p", 3, (PAIR,), kept))


def test_which_tokens_lists_hold_is_sent_where_they_do_not_hold_all() -> None:
    cut = GroupPair(PageForm("kv", 16, 1, TokenClass(4, 3, 2)), PageForm("kv", 8, 1), 4)
    program = Program("p", 3, (PAIR, cut), ())
    message = program_to_proto(program)
    assert program_from_proto(message).group_pairs == (PAIR, cut)
    assert not program_to_proto(Program("p", 3, (PAIR,), ())).pair_tokens
    # An agent that is older finds a field of the program that it does not know, and refuses it.
    assert {one.name for one, _ in message.ListFields()} >= {"pair_tokens"}
    del message.pair_tokens[1]
    with pytest.raises(PlanError, match="2 pairs of lists"):
        program_from_proto(message)


@pytest.mark.parametrize(("enum", "prefix"), [(StepKind, "STEP_KIND"), (Operand, "OPERAND")])
def test_numbers_are_those_of_the_contract(enum: type[StepKind | Operand], prefix: str) -> None:
    theirs = getattr(program_pb2, "StepKind" if enum is StepKind else "Operand")
    ours = {f"{prefix}_{one.name}".replace("NOTHING", "UNSPECIFIED"): one.value for one in enum}
    assert ours.items() <= dict(theirs.items()).items()
    assert set(theirs.values()) == {0, *ours.values()}


def test_the_tables_of_the_release_before_are_refused() -> None:
    # This release would else leave out eight fields of bytes: nothing would be read, and the end
    # DONE.
    for number in range(4, 12):
        old = program_to_proto(Program("p", 3, (PAIR,), ())).SerializeToString()
        old += bytes([number << 3 | 2, 8]) + bytes(8)
        with pytest.raises(AgentReleaseError, match="has unknown fields"):
            program_from_proto(program_pb2.Program.FromString(old))


def test_a_step_of_a_release_to_come_is_refused() -> None:
    known = {tuple(map(int, form)) for form in FORMS}
    for kind in range(-1, 8):
        for src in range(-1, 5):
            for dst in range(-1, 5):
                message = program_pb2.Program(program_id="p")
                message.steps.add(kind=kind, src=src, dst=dst)
                if (kind, src, dst) in known:
                    assert program_from_proto(message).steps[0].form == Form(
                        StepKind(kind), Operand(src), Operand(dst)
                    )
                else:
                    with pytest.raises(AgentReleaseError, match="steps of kind"):
                        program_from_proto(message)
    message = program_to_proto(every_form())
    more = program_pb2.Step.FromString(message.steps[0].SerializeToString() + bytes([9 << 3, 1]))
    message.steps[0].CopyFrom(more)
    with pytest.raises(AgentReleaseError, match="has unknown fields"):
        program_from_proto(message)


def test_rows_that_are_no_rows_are_refused() -> None:
    message = program_to_proto(every_form())
    message.steps[0].rows += bytes(8)
    with pytest.raises(PlanError, match="do not make rows of 13 int64"):
        program_from_proto(message)
