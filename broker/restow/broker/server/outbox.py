"""Messages on their way to one stream: whatever has queued up leaves as one batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from restow.broker.errors import QueueFullError, RestowError

Batch = TypeVar("Batch")

MAX_BATCH = 512


class Outbox(Generic[Batch]):
    """A bounded queue of batches that messages are written into where they lie.

    Batches grow with the load by themselves: no message waits for others, and none is copied. A
    reader that lets more than ``max_queue`` messages pile up loses its stream.
    """

    def __init__(self, make: Callable[[], Batch], max_queue: int) -> None:
        """Start empty and open; ``make`` makes an empty batch."""
        self._make = make
        self._full: deque[Batch] = deque()
        self._last = make()
        self._in_last = 0
        self._max_full = max(1, max_queue // MAX_BATCH)
        self._wake = asyncio.Event()
        self._end: RestowError | None = None
        self._closed = False

    def open(self) -> Batch:
        """The batch to add exactly one message to; never blocks."""
        if self._in_last >= MAX_BATCH:
            self._full.append(self._last)
            self._start()
            if len(self._full) >= self._max_full:
                self._full.clear()
                self.close(QueueFullError("too many messages wait: the stream reads too slowly"))
        self._in_last += 1
        self._wake.set()
        return self._last

    def _start(self) -> None:
        self._last = self._make()
        self._in_last = 0

    def close(self, end: RestowError | None = None) -> None:
        """Let the stream end after what is queued, with an error if one is given."""
        if not self._closed:
            self._closed = True
            self._end = end
        self._wake.set()

    async def take(self) -> Batch | None:
        """Wait for a batch; None when closed. Raises the error of `close`."""
        while True:
            if self._full:
                return self._full.popleft()
            if self._in_last:
                batch = self._last
                self._start()
                return batch
            if self._closed:
                if self._end is not None:
                    raise self._end
                return None
            self._wake.clear()
            await self._wake.wait()
