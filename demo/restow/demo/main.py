"""``./run demo``: hand a real model's state from one engine to another, and show the answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from restow.broker.errors import RestowError
from restow.broker.families import ConvLayout, EngineSettings
from restow.broker.layout import DType
from restow.broker.planner import Strategy
from restow.demo.experiment import DemoOptions, Outcome, PromptAnswer, run_experiment
from restow.demo.recall.task import decode
from restow.demo.transformers.generation import StoredTypes


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome in figures; ``equal`` counts prompts with the tokens of the reference."""
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


def _compared(answers: Sequence[PromptAnswer]) -> dict[str, Any]:
    return {
        "equal": sum(answer.tokens_equal for answer in answers),
        "logits_equal": sum(answer.logits_equal for answer in answers),
        "max_logit_diff": max(answer.logit_diff for answer in answers),
        "min_logit_diff": min(answer.logit_diff for answer in answers),
    }


def passed(outcome: Outcome) -> bool:
    """Return whether the right run is exact and every sabotage is detected on every prompt."""
    right = all(answer.exact for answer in outcome.answers)
    bites = all(
        not any(answer.logits_equal for answer in wrong)
        and not all(answer.tokens_equal for answer in wrong)
        for wrong in outcome.sabotaged.values()
    )
    return right and bites


def show(console: Console, outcome: Outcome) -> None:
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
    """Return the end of a prompt: its last fact and the questions."""
    facts, _, questions = text.rpartition("?")
    return f"... {' '.join(facts.split()[-4:])} ? {questions.strip()}"


def _sabotage_table(outcome: Outcome) -> Table:
    columns = "sabotage", "logits differ on", "largest difference", "tokens differ on"
    table = Table(*columns, title="Three runs that are broken on purpose, and must be detected")
    for sabotage, answers in outcome.sabotaged.items():
        count = len(answers)
        table.add_row(
            sabotage.value,
            f"{sum(not a.logits_equal for a in answers)} of {count} prompts",
            f"{max(a.logit_diff for a in answers):.3g}",
            f"{sum(not a.tokens_equal for a in answers)} of {count} prompts",
        )
    return table


app = typer.Typer(add_completion=False)

Stored = Literal["float32", "bfloat16", "float16"]


@app.command()
def demo(
    p_tp: Annotated[int, typer.Option(help="Ranks of P: 1, 2 or 4.")] = 2,
    d_tp: Annotated[int, typer.Option(help="Ranks of D: 1, 2 or 4.")] = 4,
    p_conv_layout: Annotated[ConvLayout, typer.Option(help="P's conv states.")] = ConvLayout.SD,
    d_conv_layout: Annotated[ConvLayout, typer.Option(help="D's conv states.")] = ConvLayout.DS,
    p_page_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a page of P.")] = 16,
    d_page_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a page of D.")] = 8,
    p_speculative_tokens: Annotated[
        int, typer.Option(min=0, max=16, help="Rows of P's conv states for speculative tokens.")
    ] = 0,
    d_speculative_tokens: Annotated[
        int, typer.Option(min=0, max=16, help="Rows of D's conv states for speculative tokens.")
    ] = 0,
    p_ssm_dtype: Annotated[Stored, typer.Option(help="Type of P's SSM states.")] = "float32",
    d_ssm_dtype: Annotated[Stored, typer.Option(help="Type of D's SSM states.")] = "float32",
    allow_narrowing: Annotated[
        bool, typer.Option("--allow-narrowing", help="Allow D's types to round P's values.")
    ] = False,
    strategy: Annotated[Strategy, typer.Option(help="How the rows travel.")] = Strategy.AUTO,
    daemon: Annotated[
        bool, typer.Option("--daemon", help="Run agents as daemons, with shared memory.")
    ] = False,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 16,
    sabotage: Annotated[bool, typer.Option(help="Also run the three broken ways.")] = True,
    as_json_text: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else.")
    ] = False,
) -> None:
    """Answer prompts on D from states that P prefilled, and compare with D alone."""
    rebuilding = strategy is Strategy.RECOMPUTE
    options = DemoOptions(
        p=EngineSettings(
            tp=p_tp,
            conv_layout=p_conv_layout,
            page_tokens=p_page_tokens,
            conv_rows_extra=p_speculative_tokens,
            mixer_inputs=rebuilding,
        ),
        d=EngineSettings(
            tp=d_tp,
            conv_layout=d_conv_layout,
            page_tokens=d_page_tokens,
            conv_rows_extra=d_speculative_tokens,
            projections=rebuilding,
        ),
        p_stored=StoredTypes(ssm=DType.parse(p_ssm_dtype)),
        d_stored=StoredTypes(ssm=DType.parse(d_ssm_dtype)),
        allow_narrowing=allow_narrowing,
        strategy=strategy,
        daemon=daemon,
        prompts=prompts,
        sabotage=sabotage,
    )
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("starting")

        def progress(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        try:
            outcome = run_experiment(options, progress)
        except RestowError as error:
            bar.stop()
            _fail(error, as_json_text)
    if as_json_text:
        print(json.dumps(as_json(outcome)))
    else:
        show(Console(), outcome)
    if not passed(outcome):
        raise typer.Exit(1)


def _fail(error: RestowError, as_json_text: bool) -> None:
    if as_json_text:
        fault = {"reason": error.reason, "message": error.message, "subject": error.subject}
        print(json.dumps({"error": fault}))
    print(f"{error.reason}: {error.message}", file=sys.stderr)
    raise typer.Exit(1)


if __name__ == "__main__":
    app()
