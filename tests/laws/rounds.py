"""How often each law is tried in the everyday suite; ``RESTOW_LAW_TIMES`` multiplies it."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

CASES = {
    "cover, families": 600,
    "cover, outright": 500,
    "cover, casts": 200,
    "round trip": 200,
    "round trip, casts": 100,
    "composition": 200,
    "minimality": 300,
    "minimality, twins": 100,
    "determinism": 200,
}


def tried(law: str) -> settings:
    """Settings of a law: repeatable where CI is set, and any failure prints how to repeat it."""
    return settings(
        max_examples=CASES[law] * int(os.environ.get("RESTOW_LAW_TIMES", "1")),
        deadline=None,
        derandomize="CI" in os.environ,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
