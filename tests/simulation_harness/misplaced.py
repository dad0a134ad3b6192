"""Bytes of the right prompt in wrong places, each fault by its name: histories must find them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from unittest.mock import patch

from restow.agents.binding.pages import Blocks
from restow.agents.execute import orders
from restow.broker.core.common.pair import PairOutcome
from restow.broker.layout import Layout
from restow.broker.planner import Move, Plan, make_plan
from restow.broker.server.base import planning
from simulation_harness import replaced
from simulation_harness.history import History

Order = orders.StageOrder | orders.ExecuteOrder
CONV_B, CONV_C, CONV_X = (f"layers.0.conv.{part}" for part in "BCx")


@contextlib.contextmanager
def _ordered_otherwise(change: Callable[[Order], Order]) -> Iterator[None]:
    """Let agents obey other orders than they were given."""
    with contextlib.ExitStack() as stack:
        for name in ("stage_from_proto", "execute_from_proto"):
            real = getattr(orders, name)

            def read(message: object, real: Callable[[object], Order] = real) -> Order:
                return change(real(message))

            stack.enter_context(patch.object(orders, name, read))
        yield


@contextlib.contextmanager
def _planned_otherwise(change: Callable[[Plan], list[Move]]) -> Iterator[None]:
    """Let the broker make other moves of its plans."""

    def make(source: Layout, destination: Layout, **how: bool) -> Plan:
        plan = make_plan(source, destination, **how)
        return replace(plan, moves=tuple(change(plan)))

    def plan_pair(*how: object) -> PairOutcome:
        with patch.object(planning, "make_plan", make):
            return hubs_plan_pair(*how)  # type: ignore[arg-type]

    hubs_plan_pair = planning.plan_pair
    with patch.object(replaced, "plan_once", cache(plan_pair)):
        yield


def pages_in_another_order(history: History) -> contextlib.AbstractContextManager[None]:
    """Read P's pages of a prompt from the last to the first."""

    def turned(order: Order) -> Order:
        ids = order.src_blocks.by_group
        return replace(order, src_blocks=Blocks({group: ids[group][::-1] for group in ids}))

    return _ordered_otherwise(turned)


def a_token_too_many(history: History) -> contextlib.AbstractContextManager[None]:
    """Hand over the token behind the position too, where P and D have a place for it."""

    def longer(order: Order) -> Order:
        tokens = order.tokens
        return replace(order, tokens=replace(tokens, stop=tokens.stop + tokens.stop % 2))

    return _ordered_otherwise(longer)


def b_and_c_exchanged(history: History) -> contextlib.AbstractContextManager[None]:
    """Read B of a conv state where C is, and C where B is."""
    other = {CONV_B: CONV_C, CONV_C: CONV_B}

    def exchanged(plan: Plan) -> list[Move]:
        moves = {(move.field, move.dst_rank, move.box): move for move in plan.moves}
        return [
            replace(move, src=moves[other.get(field, field), rank, box].src)
            for (field, rank, box), move in moves.items()
        ]

    return _planned_otherwise(exchanged)


def wrong_offset(history: History) -> contextlib.AbstractContextManager[None]:
    """Read one field an element further on."""

    def shifted(plan: Plan) -> list[Move]:
        return [
            replace(move, src=replace(move.src, offset_bytes=move.src.offset_bytes + 2))
            if move.field == CONV_X
            else move
            for move in plan.moves
        ]

    return _planned_otherwise(shifted)


MISPLACED = {
    "order": pages_in_another_order,
    "tail": a_token_too_many,
    "fields": b_and_c_exchanged,
    "offset": wrong_offset,
}
