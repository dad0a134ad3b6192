"""From two layouts to a plan, and from a plan to the programs that agents execute.

The only place that reasons over shards. Imports no torch, no grpc, no NIXL.
"""

from restow.broker.planner.compile import compile_programs
from restow.broker.planner.cost_model import CopyCosts, CostModel, ReadCosts
from restow.broker.planner.early import early_plan
from restow.broker.planner.exactness import check_exact
from restow.broker.planner.move import Move, Place
from restow.broker.planner.plan import Plan, make_plan
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
