"""What a demo shows: tables for people, one object for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from restow.agents.demo.answers import Answer
from restow.agents.demo.experiment import Outcome
from restow.agents.demo.options import DemoOptions
from restow.agents.engines.recall.task import decode
from restow.broker.planner import compile_programs, make_plan
from restow.broker.planner.program import GATHER_IN_ORDER, READ_PAGES, SCATTER_SPANS


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome in figures; ``equal`` counts prompts whose tokens are the reference's."""
    answers = outcome.answers
    return {
        "prompts": len(answers),
        **_compared(answers),
        "accuracy_standalone": sum(a.right_alone for a in answers) / len(answers),
        "accuracy_restow": sum(a.right_through for a in answers) / len(answers),
        "bytes": sum(answer.bytes for answer in answers),
        "handoffs": len(answers) + sum(len(wrong) for wrong in outcome.sabotaged.values()),
        "sabotage": {name.value: _compared(wrong) for name, wrong in outcome.sabotaged.items()},
    }


def _compared(answers: Sequence[Answer]) -> dict[str, Any]:
    return {
        "equal": sum(answer.tokens_equal for answer in answers),
        "logits_equal": sum(answer.logits_equal for answer in answers),
        "max_logit_diff": max(answer.logit_diff for answer in answers),
        "min_logit_diff": min(answer.logit_diff for answer in answers),
    }


def passed(outcome: Outcome) -> bool:
    """Whether the right run is exact and every sabotage is seen on every prompt."""
    right = all(answer.exact for answer in outcome.answers)
    bites = all(
        not any(answer.logits_equal for answer in wrong)
        and not all(answer.tokens_equal for answer in wrong)
        for wrong in outcome.sabotaged.values()
    )
    return right and bites


def show(console: Console, options: DemoOptions, outcome: Outcome) -> None:
    """Print the closing tables."""
    table = Table(title="Each prompt, answered alone and through Restow")
    for name in ("prompt", "alone", "through Restow"):
        table.add_column(name, overflow="fold")
    for name in ("logits", "KiB", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for answer in outcome.answers:
        same = answer.tokens_equal
        table.add_row(
            _tail(answer.prompt.text),
            decode(answer.alone.token_ids),
            f"[{'green' if same else 'red'}]{decode(answer.through.token_ids)}",
            "equal" if answer.logits_equal else f"[red]{answer.logit_diff:.3g}",
            f"{answer.bytes / 1024:.0f}",
            f"{answer.transfer_us / 1000:.1f}",
        )
    console.print(table)
    console.print(routes(options, outcome))
    if outcome.sabotaged:
        console.print(_sabotage_table(outcome))
    good = sum(a.exact for a in outcome.answers)
    color = "green" if passed(outcome) else "red"
    console.print(
        f"[{color}]{good} of {len(outcome.answers)} prompts exact to the last bit[/]; "
        f"{sum(a.right_through for a in outcome.answers)} answered right "
        f"({sum(a.right_alone for a in outcome.answers)} alone)"
    )


def _tail(text: str) -> str:
    """The end of a prompt: its last fact and the questions."""
    facts, _, questions = text.rpartition("?")
    return f"... {' '.join(facts.split()[-4:])} ? {questions.strip()}"


def routes(options: DemoOptions, outcome: Outcome) -> Table:
    """For each rank of D, whom it reads from, and how many rows travel which way."""
    plan = make_plan(outcome.p_layout, outcome.d_layout)
    programs = compile_programs(plan, options.strategy)
    table = Table(
        *("D rank", "reads from P ranks", "straight into place", "whole", "packed"),
        title=f"Who reads from whom: P TP{options.p.tp} {options.p.conv_layout}, pages of "
        f"{options.p.page_tokens}, to D TP{options.d.tp} {options.d.conv_layout}, pages of "
        f"{options.d.page_tokens}; rows by strategy {options.strategy}",
    )
    for program in programs:
        table.add_row(
            str(program.dst_rank),
            ", ".join(map(str, program.src_ranks)),
            str(len(program.rows(READ_PAGES))),
            str(len(program.rows(SCATTER_SPANS))),
            str(len(program.rows(GATHER_IN_ORDER))),
        )
    return table


def _sabotage_table(outcome: Outcome) -> Table:
    columns = "sabotage", "logits differ on", "largest difference", "tokens differ on"
    table = Table(*columns, title="Does the test bite? Three runs that are broken on purpose")
    for sabotage, answers in outcome.sabotaged.items():
        count = len(answers)
        table.add_row(
            sabotage.value,
            f"{sum(not a.logits_equal for a in answers)} of {count} prompts",
            f"{max(a.logit_diff for a in answers):.3g}",
            f"{sum(not a.tokens_equal for a in answers)} of {count} prompts",
        )
    return table
