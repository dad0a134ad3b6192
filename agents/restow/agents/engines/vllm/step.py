"""A `Step` is what the scheduler's side tells the workers in one step of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from restow.agents.engines.common.unwritten import Unwritten


@dataclass(slots=True)
class Step:
    """Holds the words of one step; nearly always all is empty.

    ``fences`` are handoffs whose prompt this step completes. ``loading`` says what of the blocks of
    requests that now wait for a state will not be written. ``received`` are requests whose state
    has arrived (True) or will not; ``sent`` those whose pages are free again.
    """

    fences: list[str] = field(default_factory=list)
    loading: list[Unwritten] = field(default_factory=list)
    received: Mapping[str, bool] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
