"""Does every value arrive as it was sent?"""

from __future__ import annotations

from restow.broker.errors import NarrowingError
from restow.broker.planner.plan import Plan


def check_exact(plan: Plan) -> None:
    """Raise `NarrowingError` that names a field whose type on D can't hold every value of P's."""
    for move in plan.moves:
        if not move.dst.dtype.holds(move.src.dtype):
            raise NarrowingError(
                f"field {move.field}: P holds {move.src.dtype.label}, D wants "
                f"{move.dst.dtype.label}, which rounds: states would not arrive exactly. Give both "
                f"sides one type, or have the operator allow it (--allow-narrowing)",
                field=move.field,
                source=move.src.dtype.label,
                destination=move.dst.dtype.label,
            )
