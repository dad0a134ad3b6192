"""``restow reasons`` says why handoffs fail and engines are refused, and what to do about it."""

from __future__ import annotations

from typing import Annotated

import typer

from restow.broker.cli.common.completion import complete_reason
from restow.broker.cli.common.connection import connects
from restow.broker.cli.common.output import Output


@connects
def reasons(
    reason: Annotated[
        str | None,
        typer.Argument(
            metavar="[REASON]",
            autocompletion=complete_reason,
            help="Show this reason only.",
            show_default=False,
        ),
    ] = None,
    *,
    output: Output,
) -> None:
    """Show what a reason of a failure or refusal means, and what to do. Asks no broker."""
    from restow.broker.reasons import REASONS

    wanted = None if reason is None else reason.upper()
    if wanted is not None and wanted not in REASONS:
        raise typer.BadParameter(
            f"{reason} is not a known reason; `restow reasons` lists them all",
            param_hint="REASON",
        )
    listed = {name: advice for name, advice in REASONS.items() if wanted in (None, name)}
    value = {name: advice._asdict() for name, advice in listed.items()}
    output.answer(value, _show, sorted)


def _show(value: dict[str, dict[str, str]], _: bool) -> None:
    for name, advice in sorted(value.items()):
        typer.secho(name, bold=True)
        typer.echo(f"  {advice['meaning']}\n  Next: {advice['next_step']}")
