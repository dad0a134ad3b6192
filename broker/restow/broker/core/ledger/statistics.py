"""Counts of how handoffs ended and how long each phase took, bounded whatever peers say."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from enum import StrEnum

from restow.broker.core.common.keys import State
from restow.broker.core.common.traffic import STEP_S, TallySeries
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.errors import QuotaExceededError, RestowError
from restow.broker.reasons import REASONS

OTHER = "OTHER"
"""Stands for reasons that are not in `REASONS`: agents and engines of other versions report
them."""
QUOTAS = ("engines", "handoffs", "bytes", "calls")
"""What a tenant's quotas limit, as a `QuotaExceededError` names it."""
BOUNDS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0),
)


class Phase(StrEnum):
    """A phase of a handoff. Phases that it did not reach are not counted."""

    WAIT = "wait"
    """Until P's state was complete and D had asked for it."""
    GRANT = "grant"
    """Until the read was ordered; includes waits for agents, a plan and costs."""
    TRANSFER = "transfer"
    """Until the last rank of D had reported."""
    ALL = "all"
    """From the first message about the handoff to its end."""

    __hash__ = str.__hash__


class Durations:
    """A histogram of durations."""

    def __init__(self) -> None:
        """Begin empty."""
        self.counts = [0] * (len(BOUNDS_S) + 1)
        """For each bound, the durations up to it and above the previous bound; then the longer
        durations."""
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds


class Statistics:
    """What a broker counts of ended handoffs and of refusals, beside the counts of each tenant."""

    def __init__(self) -> None:
        """Begin without counts."""
        self.ends: Counter[tuple[State, str]] = Counter()
        self.publications: Counter[tuple[State, str]] = Counter()
        """Ends of publications with several readers; ``ends`` has the ends of their deliveries."""
        self.bytes_read = self.early_bytes = 0
        """Bytes that D's agents reported as read; of these, bytes that they read early."""
        self.phases = {phase: Durations() for phase in Phase}
        self.series = TallySeries(STEP_S)
        self.refused: Counter[str] = Counter()
        """Refused messages of engines and agents, by reason."""
        self.refused_calls: Counter[str] = Counter()
        """Calls and streams that were refused or ended with an error, by reason."""
        self.over_quota: Counter[str] = Counter()
        """Messages and calls that were refused for a quota, by the kind of quota."""

    @property
    def by_state(self) -> Counter[State]:
        """Return how many handoffs ended in each state."""
        counts: Counter[State] = Counter()
        for (state, _), count in self.ends.items():
            counts[state] += count
        return counts

    def refuse(self, reason: str) -> None:
        """Count a refused message; the handoff goes on, or had ended."""
        self.refused[_known(reason)] += 1

    def refuse_call(self, error: RestowError) -> None:
        """Count a refused call, or a stream that an error ends."""
        self.refused_calls[_known(error.reason)] += 1
        self.count_quota(error)

    def count_quota(self, error: RestowError) -> None:
        """Count an error if it is about a quota."""
        if isinstance(error, QuotaExceededError):
            what = error.subject.get("what", "")
            self.over_quota[what if what in QUOTAS else OTHER] += 1

    def count_publication(self, handoff: Handoff) -> None:
        """Count a shared publication that has just ended, beside its deliveries."""
        reason = "" if handoff.failure is None else _known(handoff.failure.reason)
        self.publications[handoff.state, reason] += 1

    def count(self, handoff: Handoff) -> None:
        """Count a handoff that has just ended; ``series`` counts it apart."""
        self.bytes_read += handoff.bytes_read
        self.early_bytes += handoff.early_bytes
        reason = "" if handoff.failure is None else _known(handoff.failure.reason)
        self.ends[handoff.state, reason] += 1
        whole = (Phase.ALL, handoff.born_s, handoff.ended_s)
        for phase, begin_s, end_s in (whole, *phases_of(handoff)):
            durations, seconds = self.phases[phase], end_s - begin_s
            durations.counts[bisect_left(BOUNDS_S, seconds)] += 1
            durations.total_s += seconds


def _known(reason: str) -> str:
    return reason if not reason or reason in REASONS else OTHER


def phases_of(handoff: Handoff) -> list[tuple[Phase, float, float]]:
    """Return the phases that an ended handoff reached, with begin and end in seconds."""
    met_s, granted_s, ended_s = handoff.met_s, handoff.granted_s, handoff.ended_s
    if not met_s:
        return []
    phases = [(Phase.WAIT, handoff.born_s, met_s)]
    if granted_s:
        phases += [(Phase.GRANT, met_s, granted_s), (Phase.TRANSFER, granted_s, ended_s)]
    return phases
