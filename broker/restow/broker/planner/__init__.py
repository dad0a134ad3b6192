"""Plans between two layouts, and the programs that agents execute for a plan.

This is the only room that reasons over shards. It imports no torch, grpc or NIXL.
"""

from restow.broker.planner.compile import check_exact, compile_programs, early_plan
from restow.broker.planner.costs import CopyCosts, CostModel, ReadCosts
from restow.broker.planner.plan import Move, Place, Plan, make_plan
from restow.broker.planner.program import GroupPair, PageForm, Program
from restow.broker.strategy import Strategy

__all__ = [
    "CopyCosts",
    "CostModel",
    "GroupPair",
    "Move",
    "PageForm",
    "Place",
    "Plan",
    "Program",
    "ReadCosts",
    "Strategy",
    "check_exact",
    "compile_programs",
    "early_plan",
    "make_plan",
]
