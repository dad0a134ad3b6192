"""A `WorkerStep` is what the scheduler's side tells the workers in one step of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from restow.agents.engines.common.unwritten import UnwrittenTokens


@dataclass(slots=True)
class WorkerStep:
    """Holds the words of one step; nearly always all is empty.

    ``fences`` are handoffs whose prompt this step completes, ``early_fences`` those of which it
    computes leading tokens: so many are computed then. ``unwritten`` says what of the blocks
    of requests that now wait for a state will not be written. ``received`` are requests whose state
    has arrived (True) or will not; ``sent`` those whose pages are free again. ``write_mark`` is the
    mark of all states that were asked for while the step was scheduled; 0: none were.
    """

    fences: list[str] = field(default_factory=list)
    early_fences: dict[str, int] = field(default_factory=dict)
    unwritten: list[UnwrittenTokens] = field(default_factory=list)
    received: dict[str, bool] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    write_mark: int = 0
