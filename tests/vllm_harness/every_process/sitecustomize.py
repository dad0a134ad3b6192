"""Every process of an engine sleeps where vLLM's would spin and yield.

vLLM's processes wait for each other by `os.sched_yield`, for a second after each message. A dozen
of them on two processors let nobody else run: under Linux 6.18 a stage that waited for its state
kept the engine that computed it from a processor for minutes.

With NO_FAMILIES_IN_TESTS the connector knows no type of model by its config.
"""

import os
import time

WAIT_S = 0.0005


def _sleep() -> None:
    time.sleep(WAIT_S)


os.sched_yield = _sleep

if os.environ.get("NO_FAMILIES_IN_TESTS"):
    from restow.broker.families.hf.models import MODELS

    MODELS.clear()
