"""How often each law is tried.

``RESTOW_ONE_OF`` (``./run test``) leaves out all but one of so many cases; ``RESTOW_LAWS``
(``./run test --laws N``) asks for so many cases over all laws instead.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

CASES = {
    "device copies": 250,
    "device copies, casts": 100,
    "cover, families": 900,
    "cover, outright": 500,
    "cover, casts": 250,
    "cover, drafts": 250,
    "recompute": 300,
    "round trip": 300,
    "round trip, casts": 150,
    "composition": 300,
    "store": 200,
    "minimality": 300,
    "minimality, twins": 100,
    "determinism": 250,
    "early, families": 200,
    "early, casts": 80,
    "early, drafts": 80,
    "digests": 150,
    "digests, casts": 60,
    "digests, recompute": 60,
}


def tried(law: str) -> settings:
    """Return a law's settings: repeatable where CI is set; failures print how to repeat them."""
    every = sum(CASES.values())
    wanted = int(os.environ.get("RESTOW_LAWS", every // int(os.environ.get("RESTOW_ONE_OF", "1"))))
    return settings(
        max_examples=-(-CASES[law] * wanted // sum(CASES.values())),
        derandomize="CI" in os.environ,
        print_blob=True,
        # Pairs that a law does not speak of are drawn again; now and then many in a row are.
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
    )
