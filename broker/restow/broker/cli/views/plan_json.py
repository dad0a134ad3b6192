"""Put a plan into the JSON form that scripts rely on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from restow.broker.draw.explain import FieldLine, RankLines
from restow.broker.draw.picture import Picture
from restow.broker.layout import digest
from restow.broker.layout.json_form import box_to_json
from restow.broker.planner import CostModel, Move, Place, Plan
from restow.broker.planner.estimate import Cost


def plan_json(
    plan: Plan,
    ranks: Sequence[RankLines],
    tokens: int,
    costs: CostModel,
    picture: Picture | None,
) -> dict[str, Any]:
    """Return the plan as JSON values. ``bytes`` counts one token of per-token fields.

    ``cold`` lists the fields of drafts that P lacks, which D zeroes. With a ``picture`` also return
    its remarks and every field.
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
