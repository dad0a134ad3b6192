"""``./run demo``: a real model's state from one engine to another, and back in words."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from restow.agents.demo.experiment import run_experiment
from restow.agents.demo.options import DemoOptions
from restow.agents.demo.report import as_json, passed, show
from restow.agents.engines.transformers import StoredTypes
from restow.broker.errors import RestowError
from restow.broker.families import ConvLayout, EngineSettings
from restow.broker.layout import DType
from restow.broker.planner import Strategy

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
        bool, typer.Option("--allow-narrowing", help="Let a type of D round what P holds.")
    ] = False,
    strategy: Annotated[Strategy, typer.Option(help="How the rows travel.")] = Strategy.AUTO,
    daemon: Annotated[
        bool, typer.Option("--daemon", help="Agents as daemons, memory through POSIX shm.")
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
        show(Console(), options, outcome)
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
