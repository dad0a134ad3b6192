"""`HandoffEnds` brings ends of handoffs from the session's thread to the scheduler's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from restow.broker.client import HandoffEnded
from restow.broker.errors import RestowError
from restow.broker.logs import get_logger
from restow.broker.reasons import ORDINARY


@dataclass(frozen=True, slots=True)
class HandoffEnd:
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
        """Whether somebody may want to know why: not for an ordinary end."""
        return self.reason != "" and self.reason not in ORDINARY

    def tell(self, words: str) -> None:
        """Say in the engine's log why it ended so: as a warning if it failed."""
        log = get_logger("restow.engine")
        (log.warning if self.failed else log.info)(
            words,
            request=self.request_id,
            handoff=self.handoff_id,
            reason=self.reason,
            detail=self.detail,
        )


class HandoffEnds:
    """Collects them. `watch` and `take` belong to the scheduler's thread."""

    def __init__(self) -> None:
        """Nothing has ended."""
        self._queue: SimpleQueue[HandoffEnd] = SimpleQueue()

    @property
    def empty(self) -> bool:
        """Whether nothing has ended since the last `take`. Any thread may ask."""
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

        That of a demand has come when ``pages_free``: D may give them to another request then.
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
        """All that have come since the last call, each once."""
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
