"""Bring the ends of handoffs to the scheduler's thread, and count them in intervals.

Counts are plain values, so that an engine can carry them between its processes and add them up.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

from restow.agents.link.settings import AgentFigures
from restow.broker.client import HandoffEnded
from restow.broker.errors import RestowError
from restow.broker.logs import get_logger
from restow.broker.reasons import ORDINARY, REASONS

POOLS = ("gather", "scatter")
OTHER = "OTHER"
"""Counted in place of a reason that this version does not know."""


@dataclass(frozen=True, slots=True)
class HandoffEnd:
    """The end of a request's part of a handoff; ``reason`` is empty if all went well.

    ``waited_s`` are seconds since the state was asked for, ``tokens`` those that D did not compute.
    """

    request_id: str
    handoff_id: str
    reason: str = ""
    detail: str = ""
    bytes: int = 0
    transfer_us: int = 0
    waited_s: float = 0.0
    tokens: int = 0

    @property
    def failed(self) -> bool:
        """Whether the end is a failure, and not an ordinary end such as a cancelled request."""
        return self.reason != "" and self.reason not in ORDINARY

    def log(self, words: str) -> None:
        """Write the end to the engine's log, as a warning if the handoff failed."""
        log = get_logger("restow.engine")
        (log.warning if self.failed else log.info)(
            words,
            request=self.request_id,
            handoff=self.handoff_id,
            reason=self.reason,
            detail=self.detail,
        )


class HandoffEnds:
    """Collects ends in the session's thread. `watch` and `take` belong to the scheduler's."""

    def __init__(self) -> None:
        """Begin with no ends."""
        self._queue: SimpleQueue[HandoffEnd] = SimpleQueue()

    @property
    def empty(self) -> bool:
        """Whether no handoff has ended since the last `take`. Any thread may ask."""
        return self._queue.empty()

    def watch(
        self,
        request_id: str,
        handoff_id: str,
        future: Future[HandoffEnded],
        pages_free: Future[None] | None = None,
        tokens: int = 0,
    ) -> None:
        """Note the end when it comes; ``tokens`` are those that D does not compute.

        A demand has ended when its ``pages_free`` are: D may give them to another request then.
        """
        began_s = time.monotonic()

        def done(_: Future[HandoffEnded] | Future[None]) -> None:
            end = _end(request_id, handoff_id, future)
            self._queue.put(replace(end, waited_s=time.monotonic() - began_s, tokens=tokens))

        if pages_free is None:
            future.add_done_callback(done)
        else:
            pages_free.add_done_callback(done)

    def take(self) -> Iterator[HandoffEnd]:
        """Yield each end that has come since the last call, once."""
        while True:
            try:
                yield self._queue.get_nowait()
            except Empty:
                return


def _end(request_id: str, handoff_id: str, future: Future[HandoffEnded]) -> HandoffEnd:
    try:
        ended = future.result()
    except CancelledError:
        words = "its request ended before the state was there"
        return HandoffEnd(request_id, handoff_id, "CANCELLED", words)
    except RestowError as error:
        return HandoffEnd(request_id, handoff_id, error.reason, error.message)
    reason = "" if ended.done else ended.reason or ended.state
    return HandoffEnd(request_id, handoff_id, reason, ended.detail, ended.bytes, ended.transfer_us)


# -- the counts of an interval --------------------------------------------------------------------


def no_counts() -> dict[str, Any]:
    """Return the counts of an interval in which nothing happened."""
    return {
        # Counted by the scheduler's side.
        "transfers": [],
        "failures": {},
        "hints": {},
        "waits": [],
        "external_tokens": 0,
        "states_sent": 0,
        "present": {},
        # Counted by the workers' agents. By transport: reads, bytes and errors.
        "reads": {},
        "lanes_given_up": 0,
        "staging_used_bytes": {},
    }


def joined_counts(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of two sides, or of two intervals.

    Gauges (``present``) are those of the later interval. Staging in use is that of the rank that
    uses the most.
    """
    reads = {kind: list(counts) for kind, counts in mine["reads"].items()}
    for kind, counts in theirs["reads"].items():
        so_far = reads.get(kind, [0, 0, 0])
        reads[kind] = [count + more for count, more in zip(so_far, counts, strict=True)]
    used = dict(mine["staging_used_bytes"])
    for pool, size_bytes in theirs["staging_used_bytes"].items():
        used[pool] = max(size_bytes, used.get(pool, 0))
    sums = ("transfers", "waits", "external_tokens", "states_sent", "lanes_given_up")
    return {
        **{name: mine[name] + theirs[name] for name in sums},
        **{
            name: dict(Counter(mine[name]) + Counter(theirs[name]))
            for name in ("failures", "hints")
        },
        "present": {**mine["present"], **theirs["present"]},
        "reads": reads,
        "staging_used_bytes": used,
    }


@dataclass(slots=True)
class HandoffTally:
    """Counts of the scheduler's side since the last `take`."""

    transfers: list[list[float]] = field(default_factory=list)
    """Bytes and seconds of each state received."""
    failures: Counter[str] = field(default_factory=Counter)
    """By side and reason, such as ``decode:NOT_PUBLISHED``."""
    hints: Counter[str] = field(default_factory=Counter)
    """KV hints by kind and outcome, such as ``retain:not_supported``."""
    waits: list[float] = field(default_factory=list)
    """Seconds from D's demand to the beginning of the read."""
    external_tokens: int = 0
    states_sent: int = 0
    """States of P that D has read."""
    present: dict[str, int] = field(default_factory=dict)
    """Gauges by name."""
    _reported: dict[str, int] = field(default_factory=dict)
    """Gauges at the last `take`."""

    def received(self, end: HandoffEnd) -> None:
        """Count a wait of D that has ended."""
        if end.reason:
            self.failures[f"decode:{_known(end.reason)}"] += 1
            return
        self.transfers.append([end.bytes, end.transfer_us / 1e6])
        self.waits.append(max(end.waited_s - end.transfer_us / 1e6, 0.0))
        self.external_tokens += end.tokens

    def sent(self, end: HandoffEnd) -> None:
        """Count a handoff of P whose pages are free."""
        if end.failed:
            self.failures[f"prefill:{_known(end.reason)}"] += 1
        elif not end.reason:
            self.states_sent += 1

    def refused(self, side: str, reason: str) -> None:
        """Count a request that was refused on a ``side``: ``prefill`` or ``decode``."""
        self.failures[f"{side}:{reason}"] += 1

    @property
    def empty(self) -> bool:
        """Whether nothing has happened."""
        happened = self.transfers or self.failures or self.states_sent or self.hints
        return not happened and self.present == self._reported

    def take(self) -> dict[str, Any]:
        """Return the counts so far, and begin anew."""
        data = no_counts() | {
            "transfers": self.transfers,
            "failures": dict(self.failures),
            "hints": dict(self.hints),
            "waits": self.waits,
            "external_tokens": self.external_tokens,
            "states_sent": self.states_sent,
            "present": dict(self.present),
        }
        self._reported = dict(self.present)
        self.transfers, self.failures, self.waits, self.external_tokens = [], Counter(), [], 0
        self.states_sent = 0
        self.hints.clear()
        return data


def _known(reason: str) -> str:
    return reason if reason in REASONS else OTHER


class AgentTally:
    """Counts of a worker's agent since the last `take`. Belongs to the worker's thread."""

    def __init__(self) -> None:
        """Begin with the figures of an agent that has read nothing."""
        self._reported = AgentFigures()

    def take(self, figures: AgentFigures) -> dict[str, Any] | None:
        """Return what is new in the agent's figures; None: nothing is.

        Staging is reported while any is in use, and once more when none is: a rank that reports no
        staging has none in use.
        """
        reported, self._reported = self._reported, figures
        reads = {}
        for kind, counts in figures.reads.items():
            before = reported.reads[kind]
            new = [
                counts.reads - before.reads,
                counts.read_bytes - before.read_bytes,
                counts.errors - before.errors,
            ]
            if any(new):
                reads[kind] = new
        used = [figures.gather.used_bytes, figures.scatter.used_bytes]
        used_before = [reported.gather.used_bytes, reported.scatter.used_bytes]
        lanes_given_up = figures.lanes_given_up - reported.lanes_given_up
        if not (reads or lanes_given_up or any(used) or any(used_before)):
            return None
        return no_counts() | {
            "reads": reads,
            "lanes_given_up": lanes_given_up,
            "staging_used_bytes": dict(zip(POOLS, used, strict=True)),
        }
