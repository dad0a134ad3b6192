"""``restow plan`` shows what moves between two layouts, without a broker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from restow.broker.cli.common.output import print_json
from restow.broker.cli.settings.options import CostsOption, JsonFile, JsonOption
from restow.broker.strategy import Strategy


def plan(
    source: JsonFile,
    destination: JsonFile,
    strategy: Annotated[Strategy, typer.Option(help="How the state travels.")] = Strategy.AUTO,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Also show the boxes, replicas and pieces of every field."),
    ] = False,
    allow_narrowing: Annotated[
        bool, typer.Option("--allow-narrowing", help="Plan even if D's types round P's values.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 8192,
    costs: CostsOption = None,
    svg: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Draw the moves and the pages into this file."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what each rank of DESTINATION reads from which rank of SOURCE."""
    from restow.broker.cli.common.files import read_layout, read_object, write_text
    from restow.broker.cli.views.plan_views import plan_json, show_costs_used, show_plan
    from restow.broker.draw.explain import explain as explain_plan
    from restow.broker.draw.picture import make_picture
    from restow.broker.planner import CostModel, check_exact, make_plan

    made = make_plan(read_layout(source), read_layout(destination))
    if not allow_narrowing:
        check_exact(made)
    model = CostModel() if costs is None else CostModel.of(read_object(costs))
    ranks = explain_plan(made, strategy, tokens, model)
    picture = make_picture(made, ranks, tokens) if svg or explain else None
    if svg and picture:
        from restow.broker.draw.svg import plan_svg

        write_text(svg, plan_svg(picture))
    if as_json:
        print_json(plan_json(made, ranks, tokens, model, picture if explain else None))
    else:
        show_plan(made, ranks, tokens, picture if explain else None)
        if explain:
            show_costs_used(model)
