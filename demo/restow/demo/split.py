"""The demo's two engines as separate programs, for separate hosts or containers.

Both draw the same prompts from the same seed, so they share only the ids of handoffs. ``prefill``
hands every prompt's state over; ``decode`` answers, compares and reports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from restow.broker.client.connection.channel import broker_address
from restow.broker.families import ConvLayout, EngineSettings
from restow.demo.experiment import SEED, STEPS, PromptAnswer, errors_as_lines
from restow.demo.recall.model import load_model
from restow.demo.recall.task import decode as words
from restow.demo.recall.task import make_prompts
from restow.demo.transformers.engine import Engine, EngineOptions
from restow.demo.transformers.rank_processes import ForkServer

HANDOFF_TIMEOUT_S = 120.0

app = typer.Typer(add_completion=False)

Broker = Annotated[str | None, typer.Option(help="HOST:PORT, else RESTOW_BROKER.")]
Tp = Annotated[int, typer.Option(help="Ranks of this engine: 1, 2 or 4.")]
Conv = Annotated[ConvLayout, typer.Option(help="This engine's conv states.")]
PageTokens = Annotated[int, typer.Option(min=1, help="Tokens in a page of this engine.")]
Prompts = Annotated[int, typer.Option(min=1, help="Number of prompts; the same on both sides.")]
Sockets = Annotated[
    list[Path] | None,
    typer.Option("--socket", help="Socket of each rank's agent daemon; without: worker processes."),
]


@app.command()
def prefill(
    broker: Broker = None,
    tp: Tp = 2,
    conv_layout: Conv = ConvLayout.SD,
    page_tokens: PageTokens = 16,
    prompts: Prompts = 16,
    socket: Sockets = None,
) -> None:
    """Prefill every prompt and hand its state over; ends when D has taken all."""
    with running_engine("P", broker, tp, conv_layout, page_tokens, socket) as engine:
        ends = [
            engine.prefill(f"split-{index}", prompt.token_ids)
            for index, prompt in enumerate(make_prompts(prompts, SEED))
        ]
        ended = [end.result(HANDOFF_TIMEOUT_S) for end in ends]
    failed = [end for end in ended if not end.done]
    print(f"P handed over {len(ended) - len(failed)} of {len(ended)} states", flush=True)
    for end in failed:
        print(f"{end.handoff_id} {end.state}: {end.reason}: {end.detail}", file=sys.stderr)
    raise typer.Exit(1 if failed else 0)


@app.command()
def decode(
    broker: Broker = None,
    tp: Tp = 4,
    conv_layout: Conv = ConvLayout.DS,
    page_tokens: PageTokens = 8,
    prompts: Prompts = 16,
    socket: Sockets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Answer every prompt from the state that P hands over; exits 1 unless all are exact."""
    answers = []
    with running_engine("D", broker, tp, conv_layout, page_tokens, socket) as engine:
        for index, prompt in enumerate(make_prompts(prompts, SEED)):
            asked = engine.ask(f"split-{index}", prompt.token_ids)
            through = engine.decode(asked, STEPS, HANDOFF_TIMEOUT_S)
            ended = asked.end.result()
            alone = engine.decode_alone(prompt.token_ids, STEPS)
            answers.append(PromptAnswer(prompt, alone, through, ended.bytes, ended.transfer_us))
    exact = sum(answer.exact for answer in answers)
    _report(answers, exact, as_json)
    raise typer.Exit(0 if exact == len(answers) else 1)


def _report(answers: Sequence[PromptAnswer], exact: int, as_json: bool) -> None:
    if as_json:
        figures = {
            "prompts": len(answers),
            "equal": sum(answer.tokens_equal for answer in answers),
            "logits_equal": sum(answer.logits_equal for answer in answers),
            "accuracy_restow": sum(answer.right_through for answer in answers) / len(answers),
            "bytes": sum(answer.bytes for answer in answers),
        }
        print(json.dumps(figures), flush=True)
        return
    for answer in answers:
        mark = "exact" if answer.logits_equal else f"differs by {answer.logit_diff:.3g}"
        print(f"{answer.prompt.text} {words(answer.through.token_ids)}  [{mark}]")
    print(f"{exact} of {len(answers)} prompts exact to the last bit", flush=True)


@contextmanager
def running_engine(
    name: str,
    broker: str | None,
    tp: int,
    conv_layout: ConvLayout,
    page_tokens: int,
    sockets: list[Path] | None,
) -> Iterator[Engine]:
    """Run the recall model in an engine; without sockets each rank is a worker process."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        homes = tuple(sockets or ()) or (stack.enter_context(ForkServer()),) * tp
        settings = EngineSettings(tp=tp, conv_layout=conv_layout, page_tokens=page_tokens)
        options = EngineOptions(name, broker_address(broker), settings, homes)
        yield stack.enter_context(Engine(load_model(), options))


if __name__ == "__main__":
    with errors_as_lines():
        app()
