"""Handoffs that ended while the engine was busy: from the session's thread to the scheduler's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from restow.broker.client import HandoffEnded
from restow.broker.errors import RestowError

DECLINED = "DECLINED"
"""The broker's reason where D did without."""


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


class Ends:
    """Collects them. `watch` and `take` belong to the scheduler's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing has ended."""
        self._clock = clock
        self._queue: SimpleQueue[End] = SimpleQueue()

    def watch(
        self,
        request_id: str,
        handoff_id: str,
        future: Future[HandoffEnded],
        pages_free: Future[None] | None = None,
        tokens: int = 0,
    ) -> None:
        """Note the end when it comes; ``tokens`` are those that D does not compute.

        That of a demand has come when ``pages_free``: D may give them to another request then.
        """
        began_s = self._clock()

        def done(_: Future[HandoffEnded] | Future[None]) -> None:
            end = _end(request_id, handoff_id, future)
            waited_s = self._clock() - began_s
            self._queue.put(replace(end, waited_s=waited_s, tokens=tokens))

        if pages_free is None:
            future.add_done_callback(done)
        else:
            pages_free.add_done_callback(done)

    def take(self) -> Iterator[End]:
        """All that have come since the last call, each once."""
        while True:
            try:
                yield self._queue.get_nowait()
            except Empty:
                return


def _end(request_id: str, handoff_id: str, future: Future[HandoffEnded]) -> End:
    try:
        ended = future.result()
    except CancelledError:
        words = "its request ended before the state was there"
        return End(request_id, handoff_id, "CANCELLED", words)
    except RestowError as error:
        return End(request_id, handoff_id, error.reason, error.message)
    reason = "" if ended.done else ended.reason or ended.state
    return End(request_id, handoff_id, reason, ended.detail, ended.bytes, ended.transfer_us)
