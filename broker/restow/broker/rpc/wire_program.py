"""Translate programs to and from messages, which consist mostly of tables of numbers."""

from __future__ import annotations

import numpy as np
from google.protobuf.unknown_fields import UnknownFieldSet

from restow.broker.errors import AgentReleaseError, PlanError
from restow.broker.layout import ALL_TOKENS, TokenClass
from restow.broker.layout.rows import Int64s
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
    columns_of,
)
from restow.v1 import program_pb2

PROGRAM_FORM = 3
"""Version of the program format, as in `Hello.program_form`: 3 has lists of steps, and windows may
begin at blocks; 2 had steps without that; 1 had eight tables."""


def program_to_proto(
    program: Program, src_rank: int | None = None, hashed: bool = False
) -> program_pb2.Program:
    """Return the program for its destination's agent, or the part that ``src_rank`` gathers.

    ``hashed`` adds everything else that is read from that source.
    """
    if src_rank is None:
        program_id = program.program_id
        steps = [step for step in program.steps if step.form.dst is not Operand.RUN]
    else:
        program_id = program.hashed_id(src_rank) if hashed else program.gather_id(src_rank)
        forms = READ_OR_GATHERED if hashed else GATHERED
        steps = [_part(step, src_rank) for step in program.steps if step.form in forms]
    return program_pb2.Program(
        program_id=program_id,
        dst_rank=program.dst_rank,
        group_pairs=[
            program_pb2.GroupPair(
                src=_form_to_proto(pair.src),
                dst=_form_to_proto(pair.dst),
                window_tokens=pair.window_tokens,
            )
            for pair in program.group_pairs
        ],
        pair_tokens=_pair_tokens(program),
        steps=[step_to_proto(step) for step in steps if len(step.rows)],
    )


def _part(step: Step, src_rank: int) -> Step:
    """Return the rows of a source; its spans are renumbered."""
    part = step.of_source(src_rank)
    if step.form == READ_SPANS:
        part.rows[:, Column.DST_REGION] = np.arange(len(part.rows))
    return part


def step_to_proto(step: Step) -> program_pb2.Step:
    """Return the message of a step."""
    kind, src, dst = step.form
    return program_pb2.Step(
        kind=program_pb2.StepKind.ValueType(kind),
        src=program_pb2.Operand.ValueType(src),
        dst=program_pb2.Operand.ValueType(dst),
        rows=step.rows.astype("<i8").tobytes(),
    )


def _pair_tokens(program: Program) -> list[program_pb2.PairTokens]:
    """Return the tokens of all lists; empty if all hold all tokens, as older agents expect."""
    pairs = program.group_pairs
    if all(pair.alike and pair.src.tokens == ALL_TOKENS for pair in pairs):
        return []
    return [
        program_pb2.PairTokens(
            src=_tokens_to_proto(pair.src.tokens), dst=_tokens_to_proto(pair.dst.tokens)
        )
        for pair in pairs
    ]


def _tokens_to_proto(tokens: TokenClass) -> program_pb2.TokenClass:
    return program_pb2.TokenClass(
        parts=tokens.parts, part=tokens.part, interleave_tokens=tokens.interleave_tokens
    )


def _form_to_proto(form: PageForm) -> program_pb2.PageForm:
    return program_pb2.PageForm(
        group=form.group,
        page_tokens=form.page_tokens,
        pages_per_block=form.pages_per_block,
        whole_blocks=form.whole_blocks,
    )


def program_from_proto(message: program_pb2.Program) -> Program:
    """Return the program of a message.

    Raises `PlanError` for malformed tables, and `AgentReleaseError` for fields or steps that this
    release does not know.
    """
    if len(UnknownFieldSet(message)) or any(len(UnknownFieldSet(step)) for step in message.steps):
        raise _other_release(f"program {message.program_id} has unknown fields")
    held = message.pair_tokens or [program_pb2.PairTokens()] * len(message.group_pairs)
    if len(held) != len(message.group_pairs):
        raise PlanError(
            f"program {message.program_id} has {len(message.group_pairs)} pairs of lists, but "
            f"names the tokens of {len(held)}"
        )
    return Program(
        program_id=message.program_id,
        dst_rank=message.dst_rank,
        group_pairs=tuple(
            GroupPair(_form(pair.src, tokens.src), _form(pair.dst, tokens.dst), pair.window_tokens)
            for pair, tokens in zip(message.group_pairs, held, strict=True)
        ),
        steps=tuple(_step(step) for step in message.steps),
    )


def _step(message: program_pb2.Step) -> Step:
    form = _FORMS.get((message.kind, message.src, message.dst))
    if form is None:
        raise _other_release(
            f"steps of kind {message.kind} from operand {message.src} to {message.dst} are unknown"
        )
    return Step(form, _table(message.rows, len(columns_of(form))))


def _form(message: program_pb2.PageForm, held: program_pb2.TokenClass) -> PageForm:
    tokens = TokenClass(held.parts or 1, held.part, held.interleave_tokens or 1)
    return PageForm(
        message.group, message.page_tokens, message.pages_per_block, tokens, message.whole_blocks
    )


def _other_release(why: str) -> AgentReleaseError:
    return AgentReleaseError(
        f"this agent and the broker have different releases: {why}; run the same release of Restow "
        f"on both"
    )


def _table(data: bytes, columns: int) -> Int64s:
    if len(data) % (8 * columns):
        raise PlanError(f"{len(data)} bytes do not make rows of {columns} int64")
    return np.frombuffer(data, "<i8").astype(np.int64).reshape(-1, columns)


_FORMS: dict[tuple[int, int, int], Form] = {(form.kind, form.src, form.dst): form for form in FORMS}
