"""Between a program and its message, which is a table of numbers for the most part."""

from __future__ import annotations

import numpy as np

from restow.broker.errors import PlanError
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import (
    Column,
    GroupPair,
    PageForm,
    Program,
    ProjectColumn,
    SpanColumn,
)
from restow.v1 import program_pb2


def program_to_proto(
    program: Program, src_rank: int | None = None, hashed: bool = False
) -> program_pb2.Program:
    """The program for its destination's agent, or the part that ``src_rank`` gathers.

    ``hashed``: with all else that is read from there.
    """
    program_id, direct, packed = program.program_id, program.direct, program.packed
    spans, interleaved = program.spans, program.interleaved[:0]
    if src_rank is not None:
        program_id = program.hashed_id(src_rank) if hashed else program.gather_id(src_rank)
        direct, packed, interleaved = (
            rows[rows[:, Column.SRC_RANK] == src_rank]
            for rows in (program.direct, program.packed, program.interleaved)
        )
        spans = spans[spans[:, SpanColumn.SRC_RANK] == src_rank]
        if not hashed:
            direct, spans = direct[:0], spans[:0]
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
        direct_rows=_bytes(direct),
        packed_rows=_bytes(packed),
        spans=_bytes(spans),
        extracted_rows=_bytes(program.extracted) if src_rank is None else b"",
        cleared_rows=_bytes(program.cleared) if src_rank is None else b"",
        interleaved_rows=_bytes(interleaved),
        restored_rows=_bytes(program.restored) if src_rank is None else b"",
        projected_rows=_bytes(program.projected) if src_rank is None else b"",
    )


def _form_to_proto(form: PageForm) -> program_pb2.PageForm:
    return program_pb2.PageForm(
        group=form.group, page_tokens=form.page_tokens, pages_per_block=form.pages_per_block
    )


def program_from_proto(message: program_pb2.Program) -> Program:
    """The message as a program. Raises `PlanError` for tables that are no tables."""
    return Program(
        program_id=message.program_id,
        dst_rank=message.dst_rank,
        group_pairs=tuple(
            GroupPair(_form(pair.src), _form(pair.dst), pair.window_tokens)
            for pair in message.group_pairs
        ),
        direct=_table(message.direct_rows),
        packed=_table(message.packed_rows),
        spans=_table(message.spans, len(SpanColumn)),
        extracted=_table(message.extracted_rows),
        cleared=_table(message.cleared_rows),
        interleaved=_table(message.interleaved_rows),
        restored=_table(message.restored_rows),
        projected=_table(message.projected_rows, len(ProjectColumn)),
    )


def _form(message: program_pb2.PageForm) -> PageForm:
    return PageForm(message.group, message.page_tokens, message.pages_per_block)


def _bytes(table: Int64s) -> bytes:
    return table.astype("<i8").tobytes()


def _table(data: bytes, columns: int = len(Column)) -> Int64s:
    if len(data) % (8 * columns):
        raise PlanError(f"{len(data)} bytes are not rows of {columns} int64")
    return np.frombuffer(data, "<i8").astype(np.int64).reshape(-1, columns)
