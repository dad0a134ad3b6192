"""Handoffs that ended while the engine was busy: from the session's thread to the scheduler's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from restow.broker.client import HandoffEnded
from restow.broker.errors import RestowError

DECLINED = "DECLINED"
"""The broker's reason where D did without."""
SILENT = "BROKER_SILENT"
"""The reason where the broker, which is gone, said nothing in time."""
SILENCE_S = 30.0
"""How much longer than the broker an engine waits. By then no agent reads or writes any more:
grants end before D's patience and P's lease, and agents settle within `AgentSettings.quarantine_s`.
"""


@dataclass(frozen=True, slots=True)
class End:
    """How a request's part of a handoff ended; ``reason`` is empty if all went well.

    ``waited_s`` are seconds since it was asked for, ``tokens`` what D did not compute.
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
        """Whether somebody may want to know why. D may do without a state."""
        return self.reason not in ("", DECLINED)


@dataclass(frozen=True, slots=True)
class _Watched:
    """An end that is waited for."""

    request_id: str
    handoff_id: str
    began_s: float
    until_s: float


class Ends:
    """Collects them. `watch` and `take` belong to the scheduler's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing has ended."""
        self._clock = clock
        self._queue: SimpleQueue[End] = SimpleQueue()
        self._watched: dict[str, _Watched] = {}
        self._look_s = math.inf
        """No watched end is overdue before."""

    def watch(
        self,
        request_id: str,
        handoff_id: str,
        future: Future[HandoffEnded],
        within_s: float,
        tokens: int = 0,
    ) -> None:
        """Note the end when it comes; ``tokens`` are those that D does not compute.

        If the broker says nothing for ``within_s`` and `SILENCE_S` more, that is the end.
        """
        began_s = self._clock()
        until_s = began_s + within_s + SILENCE_S
        self._watched[request_id] = _Watched(request_id, handoff_id, began_s, until_s)
        self._look_s = min(self._look_s, until_s)

        def done(ended: Future[HandoffEnded]) -> None:
            end = _end(request_id, handoff_id, ended)
            waited_s = self._clock() - began_s
            self._queue.put(replace(end, waited_s=waited_s, tokens=tokens))

        future.add_done_callback(done)

    def take(self) -> Iterator[End]:
        """All that have come since the last call, each request's once."""
        while True:
            try:
                end = self._queue.get_nowait()
            except Empty:
                break
            if self._watched.pop(end.request_id, None) is not None:
                yield end
        if self._watched and self._clock() >= self._look_s:
            yield from self._overdue(self._clock())

    def _overdue(self, now_s: float) -> Iterator[End]:
        late = [one for one in self._watched.values() if one.until_s <= now_s]
        for one in late:
            del self._watched[one.request_id]
        self._look_s = min((one.until_s for one in self._watched.values()), default=math.inf)
        for one in late:
            waited_s = now_s - one.began_s
            detail = f"the broker has not said within {waited_s:.0f} s how it ended"
            yield End(one.request_id, one.handoff_id, SILENT, detail, waited_s=waited_s)


def _end(request_id: str, handoff_id: str, future: Future[HandoffEnded]) -> End:
    try:
        ended = future.result()
    except CancelledError:
        return End(request_id, handoff_id, "SESSION_CLOSED", "the session is closed")
    except RestowError as error:
        return End(request_id, handoff_id, error.reason, error.message)
    reason = "" if ended.done else ended.reason or ended.state
    return End(request_id, handoff_id, reason, ended.detail, ended.bytes, ended.transfer_us)
