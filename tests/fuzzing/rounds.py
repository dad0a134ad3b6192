"""How often each thing is tried in the everyday suite; ``RESTOW_FUZZ`` (a factor) asks for more."""

from __future__ import annotations

import os
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, settings

FACTOR = float(os.environ.get("RESTOW_FUZZ", "1"))


def tried(examples: int, steps: int = 30) -> settings:
    """Return settings: repeatable where CI is set; failures print how to repeat them."""
    return settings(
        max_examples=max(1, int(examples * FACTOR)),
        stateful_step_count=steps,
        deadline=None,
        derandomize="CI" in os.environ,
        print_blob=True,
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
    )


def reaches(say: Callable[[], None], what: Callable[[], int]) -> int:
    """Call ``say`` until chance has brought about `what`, five times at most; return `what`."""
    for _ in range(5):
        say()
        if what():
            break
    return what()
