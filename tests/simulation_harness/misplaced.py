"""Bytes of the right prompt in wrong places, each fault by its name: histories must find them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

from restow.agents.binding.pages import Blocks
from restow.agents.execute import orders
from restow.broker.core.common.pair import PairOutcome
from restow.broker.layout import Layout
from restow.broker.planner import Move, Plan, make_plan
from restow.broker.server.base import planning
from simulation_harness import replaced
from simulation_harness.taken_out import Mutation, instead

Order = orders.StageOrder | orders.ExecuteOrder
CONV_B, CONV_C, CONV_X = (f"layers.0.conv.{part}" for part in "BCx")


def _ordered_otherwise(change: Callable[[Any], Order]) -> Mutation:
    """Let agents obey other orders than they were given."""

    def changed(read: Callable[[Any], Order]) -> Callable[[Any], Order]:
        return lambda message: change(read(message))

    return instead(
        (orders, "stage_from_proto", changed(orders.stage_from_proto)),
        (orders, "execute_from_proto", changed(orders.execute_from_proto)),
    )


def _planned_otherwise(change: Callable[[Plan], list[Move]]) -> Mutation:
    """Let the broker make other moves of its plans."""

    def make(source: Layout, destination: Layout, **how: bool) -> Plan:
        plan = make_plan(source, destination, **how)
        return replace(plan, moves=tuple(change(plan)))

    def plan_pair(*how: Any) -> PairOutcome:
        with patch.object(planning, "make_plan", make):
            return planning.plan_pair(*how)

    return instead((replaced, "plan_once", cache(plan_pair)))


def _turned(order: Order) -> Order:
    ids = order.src_blocks.by_group
    return replace(order, src_blocks=Blocks({group: ids[group][::-1] for group in ids}))


def _longer(order: Order) -> Order:
    tokens = order.tokens
    return replace(order, tokens=replace(tokens, stop=tokens.stop + tokens.stop % 2))


def _exchanged(plan: Plan) -> list[Move]:
    other = {CONV_B: CONV_C, CONV_C: CONV_B}
    moves = {(move.field, move.dst_rank, move.box): move for move in plan.moves}
    return [
        replace(move, src=moves[other.get(field, field), rank, box].src)
        for (field, rank, box), move in moves.items()
    ]


def _shifted(plan: Plan) -> list[Move]:
    return [
        replace(move, src=replace(move.src, offset_bytes=move.src.offset_bytes + 2))
        if move.field == CONV_X
        else move
        for move in plan.moves
    ]


MISPLACED: dict[str, Mutation] = {
    # Read P's pages of a prompt from the last to the first.
    "order": _ordered_otherwise(_turned),
    # Hand over the token behind the position too, where P and D have a place for it.
    "tail": _ordered_otherwise(_longer),
    # Read B of a conv state where C is, and C where B is.
    "fields": _planned_otherwise(_exchanged),
    # Read one field an element further on.
    "offset": _planned_otherwise(_shifted),
}
