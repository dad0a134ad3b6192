"""What of a plan may be read before P has computed the whole prompt."""

from __future__ import annotations

from dataclasses import replace

from restow.broker.layout import Kind, Layout
from restow.broker.planner.plan import Plan


def early_plan(plan: Plan) -> Plan | None:
    """The moves of tokens alone, which leave those of any later tokens as they are; None: no plan.

    A snapshot moves with the last token. Where fields have a window, or D keeps whole blocks, the
    first token that moves depends on the last one, so nothing moves early.
    """
    fields = {field.name: field for field in plan.source.model.fields}
    of_d = {field.name: field for field in plan.destination.model.fields}
    moves = tuple(move for move in plan.moves if fields[move.field].kind is Kind.PER_TOKEN)
    filled = [fields[move.field] for move in moves] + [of_d[name] for name in plan.cold]
    windows = any(field.window_tokens for field in filled)
    if not moves or windows or _keeps_whole_blocks(plan.destination):
        return None
    cold = frozenset(name for name in plan.cold if of_d[name].kind is Kind.PER_TOKEN)
    if len(moves) == len(plan.moves) and cold == plan.cold:
        return plan
    return replace(plan, moves=moves, cold=cold)


def _keeps_whole_blocks(layout: Layout) -> bool:
    return any(region.whole_blocks for rank in layout.ranks for region in rank.regions)
