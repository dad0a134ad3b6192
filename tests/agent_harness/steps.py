"""Programs with other rows, for tests of what is wrong with them."""

from __future__ import annotations

from dataclasses import replace

from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import Form, Program, Step, joined_steps


def with_rows(program: Program, form: Form, rows: Int64s) -> Program:
    """Return the program with ``rows`` instead of its own rows of the form."""
    others = [step for step in program.steps if step.form != form]
    return replace(program, steps=joined_steps([*others, Step(form, rows)]))
