"""The ways to travel, one file each. A new one is one more file, and one more line here."""

from restow.broker.planner.ways.interleave import Interleave
from restow.broker.planner.ways.pack import Pack
from restow.broker.planner.ways.recompute import Recompute
from restow.broker.planner.ways.slices import Slices
from restow.broker.planner.ways.way import Way
from restow.broker.planner.ways.whole import Whole

WAYS: tuple[Way, ...] = (
    Slices(),
    Whole(),
    Pack(),
    Interleave(),
    Recompute(),
)
"""In the order of their shares in a program. Where two cost the same, the first one is taken, and
the very first one is always there to be compared: it costs nothing once."""

__all__ = ["WAYS", "Way"]
