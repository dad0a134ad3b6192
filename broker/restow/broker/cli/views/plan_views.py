"""Show layouts, plans and readings of a model's config, as tables and as documents."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from restow.broker.draw.bytes_and_seconds import rate_text, size_text
from restow.broker.draw.explain import FieldLine, RankLines, by_way
from restow.broker.draw.picture import Picture
from restow.broker.layout import Layout, digest
from restow.broker.layout.difference import Difference, RankSummary, scaled_fields, shared_tokens
from restow.broker.layout.json_form import box_to_json
from restow.broker.planner import CostModel, Move, Place, Plan
from restow.broker.planner.compile import Cost
from restow.broker.printable import shown

if TYPE_CHECKING:
    from restow.broker.families.hf import Reading, Readings

_MAX_VALUE_LENGTH = 32
"""Characters of a config's value that are shown."""


def show_layout(layout: Layout, ranks: Sequence[RankSummary]) -> None:
    """Print the sizes of a checked layout."""
    console = Console(highlight=False, markup=False)
    console.print(
        f"ok: model {layout.model.identity}, {len(layout.model.fields)} fields, "
        f"{len(ranks)} ranks, digest {digest(layout)[:12]}",
        soft_wrap=True,
    )
    for scales, names in scaled_fields(layout.model).items():
        console.print(f"scales of {', '.join(names)}: {scales}", soft_wrap=True)
    for group, (parts, run) in shared_tokens(layout).items():
        console.print(f"tokens of {group}: in {parts} parts, {run} in turn", soft_wrap=True)
    columns = ["rank", "regions", "shards", "bytes a token", "bytes a snapshot", "padding"]
    rebuilding = any(rank.bytes_of_inputs or rank.bytes_of_weights for rank in ranks)
    table = _table(*columns, *(["mixer inputs", "weights"] if rebuilding else []))
    for rank in ranks:
        table.add_row(
            str(rank.rank),
            str(rank.regions),
            str(rank.shards),
            f"{rank.bytes_per_token:,}",
            f"{rank.bytes_per_snapshot:,}",
            f"{rank.padding_bytes:,}",
            *([f"{rank.bytes_of_inputs:,}", f"{rank.bytes_of_weights:,}"] if rebuilding else []),
        )
    console.print(table)


def show_differences(differences: Sequence[Difference], left: str, right: str) -> None:
    """Print the differences of two layouts."""
    console = Console(highlight=False, markup=False)
    if not differences:
        console.print("equal")
        return
    table = _table("of", "aspect", left, right)
    for difference in differences:
        table.add_row(difference.subject, difference.aspect, difference.left, difference.right)
    console.print(table)


def show_plan(plan: Plan, ranks: Sequence[RankLines], tokens: int, picture: Picture | None) -> None:
    """Print the reads of every destination rank, and the cost of each strategy.

    With a ``picture``, print every field too, and the remarks of the picture.
    """
    console = Console(highlight=False, markup=False)
    console.print(
        f"{len(plan.source.ranks)} ranks to {len(plan.destination.ranks)}: "
        f"{size_text(plan.bytes_at(tokens))} at {tokens:,} tokens, {len(plan.moves):,} moves",
        soft_wrap=True,
    )
    if plan.cold:
        names = ", ".join(sorted(plan.cold))
        console.print(f"D's fields of drafts that P lacks begin zeroed: {names}", soft_wrap=True)
    table = _table("rank", "from", "state", "a token", "of these fields")
    for rank in ranks:
        for src, size in rank.bytes_from.items():
            token = rank.token_bytes_from[src]
            classes = ", ".join(rank.classes_from[src])
            row = (str(src), size_text(size - token), size_text(token), classes)
            table.add_row(str(rank.dst_rank), *row)
    console.print(table)
    _show_costs(console, ranks)
    if picture:
        console.print(f"\nmodel {plan.source.model.identity}")
        for panel in picture.panels:
            console.print(f"\n{panel.title}", style="bold")
            for remark in panel.remarks:
                console.print(Padding(Text(remark), (0, 0, 0, 2)))
        for rank in ranks:
            _show_fields(console, rank)


def _show_costs(console: Console, ranks: Sequence[RankLines]) -> None:
    """Print the costs of each strategy; ranks that cost the same share their lines."""
    alike: dict[object, list[RankLines]] = {}
    for rank in ranks:
        key = tuple(rank.cost_by_strategy.items()), rank.cost, tuple(rank.strategy.items())
        alike.setdefault(key, []).append(rank)
    table = _table("ranks", "strategy", "bytes", "reads", "launches", "expected", "")
    for group in alike.values():
        first = group[0]
        names = ",".join(str(rank.dst_rank) for rank in group)
        chosen = (f"{way} {', '.join(names)}" for way, names in by_way(first.strategy).items())
        table.add_row(names, "as asked", *_numbers(first.cost), "; ".join(chosen))
        for strategy, cost in first.cost_by_strategy.items():
            if isinstance(cost, Cost):
                table.add_row("", strategy.value, *_numbers(cost), "")
            else:
                table.add_row("", strategy.value, "", "", "", "", f"refused: {cost}")
    console.print()
    console.print(table)


def _numbers(cost: Cost) -> tuple[str, str, str, str]:
    expected = f"{cost.seconds * 1e3:,.2f} ms"
    return size_text(cost.bytes), f"{cost.reads:,}", f"{cost.launches:,}", expected


def show_costs_used(costs: CostModel) -> None:
    """Print the costs that expected times are computed from."""
    Console(highlight=False, markup=False).print(
        f"\nexpected by these costs: {costs.seconds_per_descriptor * 1e6:.2f} us a read, "
        f"{rate_text(costs.read_bytes_per_second)}; {costs.seconds_per_copy * 1e6:.2f} us "
        f"a copy, {costs.seconds_per_element * 1e9:.1f} ns an element, "
        f"{rate_text(costs.copy_bytes_per_second)}; {costs.seconds_per_launch * 1e6:.0f} us a "
        f"launch, {costs.seconds_per_stage * 1e6:.0f} us a stage; "
        f"{costs.seconds_per_weight_byte * 1e9:.2f} ns a byte of weights",
    )


def _show_fields(console: Console, rank: RankLines) -> None:
    console.print(f"\nrank {rank.dst_rank}")
    table = _table("field", "box", "from", "pieces", "by")
    table.columns[0].no_wrap = True
    for line in rank.fields:
        count = f" x{len(line.fields)}" if len(line.fields) > 1 else ""
        for index, part in enumerate(line.parts):
            others = ",".join(str(r) for r in part.replicas if r != part.src_rank)
            unit = "/token" if line.per_token else ""
            table.add_row(
                line.name + count if index == 0 else "",
                " ".join(f"[{span.start},{span.stop})" for span in part.box),
                f"{part.src_rank} or {others}" if others else str(part.src_rank),
                f"{part.pieces:,} x {part.piece_bytes:,} B{unit}"
                + (f", {part.cast}" if part.cast else ""),
                line.strategy if index == 0 else "",
            )
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def plan_json(
    plan: Plan,
    ranks: Sequence[RankLines],
    tokens: int,
    costs: CostModel,
    picture: Picture | None,
) -> dict[str, Any]:
    """Return a plan as ``--json`` prints it; ``bytes`` count one token of per-token fields.

    ``cold`` are D's draft fields that P does not have: they are zeroed. With a ``picture``, the
    document has every field too, and the remarks of the picture.
    """
    data = {
        "model": asdict(plan.source.model.identity),
        "source": digest(plan.source),
        "destination": digest(plan.destination),
        "bytes": plan.bytes,
        "tokens": tokens,
        "bytes_at_tokens": plan.bytes_at(tokens),
        "costs": asdict(costs),
        "moves": [_move_json(move) for move in plan.moves],
        "cold": sorted(plan.cold),
        "ranks": [_rank_json(rank, picture is not None) for rank in ranks],
    }
    if picture:
        data["alike"] = [
            {"layers": panel.layers, "classes": tuple(panel.ways), "remarks": panel.remarks}
            for panel in picture.panels
        ]
    return data


def _move_json(move: Move) -> dict[str, Any]:
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


def show_readings(readings: Readings, as_json: bool) -> None:
    """Print the keys read from a model's config to stderr: value, and file or assumption."""
    if as_json:
        sys.stderr.write(json.dumps({"readings": [asdict(reading) for reading in readings]}) + "\n")
        return
    lines = [(shown(reading.key), _short(reading.value), _origin(reading)) for reading in readings]
    keys, values = (max((len(line[i]) for line in lines), default=0) for i in (0, 1))
    for key, value, origin in lines:
        sys.stderr.write(f"{key:<{keys}}  {value:<{values}}  {origin}\n")


def _short(value: object) -> str:
    text = shown(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= _MAX_VALUE_LENGTH else text[: _MAX_VALUE_LENGTH - 3] + "..."


def _origin(reading: Reading) -> str:
    where = reading.file or "assumed"
    return shown(f"{where}: {reading.note}" if reading.note else where)
