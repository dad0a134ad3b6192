"""``restow plan``: what goes where between two layouts, without a broker."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from restow.broker.cli.layout_commands import JsonFile, JsonOption
from restow.broker.cli.options import CostsOption, StrategyName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restow.broker.draw.explain import FieldLine, RankLines
    from restow.broker.draw.picture import Picture
    from restow.broker.planner import CostModel, Move, Place, Plan
    from restow.broker.planner.estimate import Cost


def plan(
    source: JsonFile,
    destination: JsonFile,
    strategy: Annotated[StrategyName, typer.Option(help="How the pieces travel.")] = "auto",
    explain: Annotated[
        bool, typer.Option("--explain", help="Every field: boxes, replicas, pieces, costs.")
    ] = False,
    allow_narrowing: Annotated[
        bool, typer.Option("--allow-narrowing", help="Plan though D's types round P's values.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt to count with.")] = 8192,
    costs: CostsOption = None,
    svg: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Draw which bytes go where, into this file."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say for every rank of DESTINATION what it reads from whom in SOURCE."""
    from restow.broker.cli.files import read_layout, read_object, write_text
    from restow.broker.cli.output import print_json
    from restow.broker.cli.plan_view import show_costs_used, show_plan
    from restow.broker.draw.explain import explain as explain_plan
    from restow.broker.draw.picture import make_picture
    from restow.broker.planner import CostModel, Strategy, check_exact, make_plan

    made = make_plan(read_layout(source), read_layout(destination))
    if not allow_narrowing:
        check_exact(made)
    model = CostModel() if costs is None else CostModel.of(read_object(costs))
    ranks = explain_plan(made, Strategy(strategy), tokens, model)
    picture = make_picture(made, ranks, tokens) if svg or explain else None
    if svg and picture:
        from restow.broker.draw.plan_svg import plan_svg

        write_text(svg, plan_svg(picture))
    if as_json:
        print_json(plan_json(made, ranks, tokens, model, picture if explain else None))
    else:
        show_plan(made, ranks, tokens, picture if explain else None)
        if explain:
            show_costs_used(model)


def plan_json(
    plan: Plan,
    ranks: Sequence[RankLines],
    tokens: int,
    costs: CostModel,
    picture: Picture | None,
) -> dict[str, Any]:
    """The plan in the form that scripts rely on; ``bytes`` count one token of per-token fields.

    With a ``picture`` also every field, and what the picture says in words.
    """
    data = {
        "model": asdict(plan.source.model.identity),
        "source": plan.source_digest,
        "destination": plan.destination_digest,
        "bytes": plan.bytes,
        "tokens": tokens,
        "bytes_at_tokens": plan.bytes_at(tokens),
        "costs": asdict(costs),
        "moves": [_move_json(move) for move in plan.moves],
        "ranks": [_rank_json(rank, picture is not None) for rank in ranks],
    }
    if picture:
        data["alike"] = [
            {"layers": panel.layers, "classes": tuple(panel.ways), "remarks": panel.remarks}
            for panel in picture.panels
        ]
    return data


def _move_json(move: Move) -> dict[str, Any]:
    from restow.broker.layout.json_form import box_to_json

    return {
        "field": move.field,
        "src_rank": move.src_rank,
        "dst_rank": move.dst_rank,
        "box": box_to_json(move.box),
        "src": _place_json(move.src),
        "dst": _place_json(move.dst),
    }


def _place_json(place: Place) -> dict[str, Any]:
    return {
        "region": place.region,
        "offset_bytes": place.offset_bytes,
        "strides_bytes": list(place.strides_bytes),
        "token_stride_bytes": place.token_stride_bytes,
        "dtype": place.dtype.label,
    }


def _rank_json(rank: RankLines, with_fields: bool) -> dict[str, Any]:
    data: dict[str, Any] = {
        "dst_rank": rank.dst_rank,
        "bytes": rank.bytes,
        "bytes_at_tokens": rank.bytes_at_tokens,
        "bytes_from": {str(src): size for src, size in rank.bytes_from.items()},
        "strategy": rank.strategy,
        "reads": rank.cost.reads,
        "launches": rank.cost.launches,
        "strategies": {
            name.value: {"refused": cost} if isinstance(cost, str) else _cost_json(cost)
            for name, cost in rank.cost_by_strategy.items()
        },
    }
    if with_fields:
        data["fields"] = [_field_json(line) for line in rank.fields]
    return data


def _cost_json(cost: Cost) -> dict[str, float]:
    return {
        "bytes": cost.bytes,
        "reads": cost.reads,
        "launches": cost.launches,
        "expected_ms": round(cost.seconds * 1e3, 3),
    }


def _field_json(line: FieldLine) -> dict[str, Any]:
    from restow.broker.layout.json_form import box_to_json

    return {
        "class": line.field_class,
        "fields": list(line.fields),
        "per_token": line.per_token,
        "strategy": line.strategy,
        "bytes": line.bytes,
        "parts": [
            {
                "box": box_to_json(part.box),
                "src_rank": part.src_rank,
                "replicas": list(part.replicas),
                "pieces": part.pieces,
                "piece_bytes": part.piece_bytes,
            }
            for part in line.parts
        ],
    }
